"""Plans for when changing a clock takes time and energy."""
