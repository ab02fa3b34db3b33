"""What runs next: sequences, pages and slots. No torch in here."""
