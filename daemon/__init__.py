"""Command line, configuration, supervisor, router and inspection of an instance."""
