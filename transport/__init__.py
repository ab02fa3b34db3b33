"""Message types, socket wiring and what every process of an instance has in common."""
