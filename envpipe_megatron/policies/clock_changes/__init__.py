"""Plans where changing a clock takes time and energy."""
