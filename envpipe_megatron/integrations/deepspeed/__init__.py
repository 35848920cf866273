"""EnvPipe under DeepSpeed, without a fork."""
