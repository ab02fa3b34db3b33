"""What the prefix cache gains, and that it changes nothing."""
