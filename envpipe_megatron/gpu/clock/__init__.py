"""Sets a clock when the GPU has come to where it is asked for: in the rank, or in its guard."""
