"""What a process measures of itself, and how it reports that."""
