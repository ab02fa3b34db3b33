"""What an instance needs of the machine."""
