"""EnvPipe for pipelines of torch.distributed.pipelining; enter by `attach`."""

from envpipe_megatron.integrations.torch_pipelining.attached import AttachedPipeline, attach

__all__ = ["AttachedPipeline", "attach"]
