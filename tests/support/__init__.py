"""Helpers that tests of several folders import."""
