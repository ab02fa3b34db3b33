"""The engine: steps on a device."""
