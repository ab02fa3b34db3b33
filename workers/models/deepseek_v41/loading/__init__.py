"""Loading: configuration, weights onto the device, Engram tables."""
