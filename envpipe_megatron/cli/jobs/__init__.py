"""Commands that start a job, or read what one left."""
