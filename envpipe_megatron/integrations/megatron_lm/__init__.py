"""EnvPipe in a patched Megatron-LM checkout: flags, what is refused, hooks, reporting."""
