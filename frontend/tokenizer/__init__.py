"""Prompt rendering, encoding and decoding: text on one side, token ids on the other."""
