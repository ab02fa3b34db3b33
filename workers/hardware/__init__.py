"""The machine that a worker computes on: its device and its memory."""
