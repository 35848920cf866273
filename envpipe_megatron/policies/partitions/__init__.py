"""Which layers stand on which stage."""
