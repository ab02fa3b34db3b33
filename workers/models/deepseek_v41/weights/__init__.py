"""A checkpoint's tensors, read, checked and put onto the device."""
