"""One instance from its checks to its last file."""
