"""What the way of a request costs beside the engine."""
