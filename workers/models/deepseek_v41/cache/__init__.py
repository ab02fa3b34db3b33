"""What pages and states consist of, and how vectors become bytes."""
