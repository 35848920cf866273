"""EnvPipe under DeepSpeed, without a fork: `initialize` stands in for `deepspeed.initialize`."""

from envpipe_megatron.integrations.deepspeed.engine import EnvPipeEngine, UnsupportedEngineError
from envpipe_megatron.integrations.deepspeed.initialize import (
    BlockError,
    VersionError,
    end_training,
    initialize,
)

__all__ = [
    "BlockError",
    "EnvPipeEngine",
    "UnsupportedEngineError",
    "VersionError",
    "end_training",
    "initialize",
]
