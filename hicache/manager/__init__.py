"""A worker's cache manager: who starts from a hit, who waits for one, what is copied. No torch in here."""
