"""Processes of a loaded instance are killed and frozen."""
