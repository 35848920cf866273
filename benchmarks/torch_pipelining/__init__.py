"""EnvPipe with torch.distributed.pipelining."""
