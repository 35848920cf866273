"""Megatron-DeepSpeed under EnvPipe: what its patch calls."""
