"""DeepSpeed's own engine against ours, and layers split by time."""
