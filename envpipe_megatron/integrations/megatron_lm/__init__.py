"""EnvPipe in a patched Megatron-LM checkout: flags, limits of levels, hooks, reporting."""
