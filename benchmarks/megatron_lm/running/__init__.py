"""Jobs of Megatron-LM that take turns on the same GPUs."""
