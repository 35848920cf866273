"""What is measured of units, and what is fitted to it."""
