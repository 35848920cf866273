"""What is seen of the units that a framework runs, and how its functions are replaced."""
