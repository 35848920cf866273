"""What to look at: each probe is a file."""
