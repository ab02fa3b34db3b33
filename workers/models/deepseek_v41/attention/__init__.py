"""Sliding window, compressed global entries and their indexer."""
