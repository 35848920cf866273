"""Megatron-DeepSpeed under EnvPipe, compared."""
