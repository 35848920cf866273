"""EnvPipe for Megatron: saves energy in pipeline-parallel training without slowing it down."""

__version__ = "0.2.0"
