"""DeepSeek-V4.1: configuration, checkpoint, forward pass and engine."""
