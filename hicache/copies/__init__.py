"""Copies of rows between a device and a host."""
