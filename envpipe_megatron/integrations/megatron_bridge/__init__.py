"""EnvPipe under Megatron-Bridge and NeMo, without a patch: a callback for `pretrain`."""

from envpipe_megatron.integrations.megatron_bridge.callback import BridgeError, EnvPipeCallback

__all__ = ["BridgeError", "EnvPipeCallback"]
