"""megatron-core under EnvPipe: in EnvPipe's order, or in its own."""
