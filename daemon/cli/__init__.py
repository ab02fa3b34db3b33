"""The command line. One file per command."""
