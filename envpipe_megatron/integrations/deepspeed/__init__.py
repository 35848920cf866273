"""EnvPipe under DeepSpeed, without a fork: call `initialize` in place of `deepspeed.initialize`."""

from envpipe_megatron.integrations.deepspeed.engine import EnvPipeEngine
from envpipe_megatron.integrations.deepspeed.initialize import end_training, initialize

__all__ = ["EnvPipeEngine", "end_training", "initialize"]
