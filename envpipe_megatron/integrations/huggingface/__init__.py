"""Models of Hugging Face's transformers as pipeline stages; `split_model` is the way in.

For DeepSpeed's engine `deepspeed_stages.pipeline_module` follows, for torch.distributed.pipelining
`torch_stages.pipeline_stage`.
"""

from envpipe_megatron.integrations.huggingface.split import SplitModel, split_model, weights_of

__all__ = ["SplitModel", "split_model", "weights_of"]
