"""A step: from a batch to the rows and entries that the layers work on."""
