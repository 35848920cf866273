"""Jobs that take turns on the same GPUs."""
