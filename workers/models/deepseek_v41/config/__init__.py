"""Sizes and roles of a DeepSeek-V4.1 model."""
