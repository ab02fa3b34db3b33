"""Questions to a live instance, asked and answered."""
