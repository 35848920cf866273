"""Files that a job leaves for its next start, and what that start takes of them."""
