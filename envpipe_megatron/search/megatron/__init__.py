"""Megatron's space of configurations: its shapes, cuts and flags, and the search over them."""
