"""Trains a small GPT by Megatron-Bridge's own `pretrain`, on GPUs, or on the CPU and gloo.

    torchrun --nproc-per-node 2 tests/megatron_bridge/bridge_run.py SETTINGS.json

Settings are those of a recipe, by their dotted names ("model.num_layers"), and under "envpipe" the
options of `EnvPipeCallback`; without these nothing of EnvPipe is imported. Transformer Engine's
classes are stood in for where Bridge imports them unasked. Without a GPU so are, beside the shims
for CUDA and Triton of `tests/megatron_lm/cpu_run.py`, which has to be importable, the version of
nvidia-resiliency-ext and Bridge's own question whether there is CUDA.
"""

import builtins
import contextlib
import faulthandler
import functools
import json
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import cpu_run  # sets TORCHDYNAMO_DISABLE before torch is imported
import torch

#: Asked before the shims answer.
HAS_GPU = torch.cuda.is_available()
ON_CPU = {
    "mixed_precision": None,
    "model.use_cpu_initialization": True,
    "dist.distributed_backend": "gloo",
}
#: What the model must be where Transformer Engine, Apex and fused kernels are not.
UNFUSED = {
    "model.masked_softmax_fusion": False,
    "model.gradient_accumulation_fusion": False,
    "model.bias_dropout_fusion": False,
    "model.bias_activation_fusion": False,
    "model.apply_rope_fusion": False,
    "model.persist_layer_norm": False,
    "model.cross_entropy_loss_fusion": False,
}
SMALL = {
    "model.num_layers": 4,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.seq_length": 32,
    "model.attention_dropout": 0.0,
    "model.hidden_dropout": 0.0,
    "dataset.seq_length": 32,
    "tokenizer.vocab_size": 64,
    "train.micro_batch_size": 1,
    "scheduler.lr_warmup_iters": 2,
    "validation.eval_iters": 2,
    "checkpoint.save": None,
    "logger.log_interval": 1,
}
#: Bridge imports Transformer Engine's classes here whether or not a model has them.
_WANTS_CLASSES = (
    "megatron.bridge.peft.lora",  # 0.5
    "megatron.bridge.peft.lora_layers",
    "megatron.bridge.models.gpt_full_te_layer_autocast_spec",
    "megatron.bridge.diffusion.models.wan.utils",  # 0.5
)


class _Classes(ModuleType):
    """A module of Transformer Engine: any class may be named, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (torch.nn.Module,), {}) if name[0].isupper() else _Classes(name)


def name_transformer_engine() -> None:
    """Let it be imported by those alone who cannot do without; others see that it is not there."""
    own = builtins.__import__

    def import_(name: str, globals: Any = None, *args: Any, **kwargs: Any) -> Any:
        importer = (globals or {}).get("__name__")
        if name.startswith("transformer_engine") and importer in _WANTS_CLASSES:
            return _Classes("transformer_engine")
        return own(name, globals, *args, **kwargs)

    builtins.__import__ = import_


def name_version() -> None:
    """Megatron-core wants 0.6 of the package for resiliency, whose wheels need another Python."""
    import nvidia_resiliency_ext

    nvidia_resiliency_ext.__version__ = "0.6.0"


def allow_no_cuda() -> None:
    """Pass Bridge's own option for machines without CUDA, which `pretrain` has no way to."""
    from megatron.bridge.training import initialize, setup

    setup.initialize_megatron = functools.partial(
        initialize.initialize_megatron, allow_no_cuda=True
    )


def make_config(settings: dict[str, Any]) -> Any:
    """The recipe `vanilla_gpt_pretrain_config`, made small and with settings."""
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.bridge.recipes.gpt.vanilla_gpt import vanilla_gpt_pretrain_config

    config = vanilla_gpt_pretrain_config()
    config.model.transformer_layer_spec = local_layer_spec
    on_cpu = {} if HAS_GPU else ON_CPU
    for name, value in {**UNFUSED, **on_cpu, **SMALL, **settings}.items():
        *path, last = name.split(".")
        setattr(functools.reduce(getattr, path, config), last, value)
    return config


def make_recorder() -> Any:
    """Prints what each step computed, to the last bit, and a digest of the weights at the end."""
    from megatron.bridge.training.callbacks import Callback

    class Recorder(Callback):
        def on_train_step_end(self, context: Any) -> None:
            losses = {name: float(loss).hex() for name, loss in context.loss_dict.items()}
            norm = float(context.grad_norm).hex()
            print(f"\nbridge_run: step {json.dumps([losses, norm, context.skipped_iter])}")

        def on_eval_end(self, context: Any) -> None:
            losses = {name: float(loss).hex() for name, loss in context.total_loss_dict.items()}
            print(f"\nbridge_run: evaluation {json.dumps(losses)}")

        def on_train_end(self, context: Any) -> None:
            operations = context.state.train_state.floating_point_operations_so_far
            print(f"\nbridge_run: operations {operations}")
            cpu_run.tell(context.model)

    return Recorder()


def main() -> None:
    """Train with the settings of the file that is named."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    options = settings.pop("envpipe", None)
    faulthandler.register(signal.SIGUSR1)  # prints the stacks of all threads
    torch.set_num_threads(1)
    if not HAS_GPU:
        cpu_run.answer_for_cuda()
        cpu_run.name_triton()
        cpu_run.name_override()
        name_version()
    name_transformer_engine()
    with contextlib.nullcontext() if HAS_GPU else cpu_run._CudaOnCpu():
        import megatron.core

        if not HAS_GPU:
            cpu_run.take_built_helpers(Path(megatron.core.__file__).parents[2])
        from megatron.bridge.training.gpt_step import forward_step
        from megatron.bridge.training.pretrain import pretrain

        if not HAS_GPU:
            allow_no_cuda()
            cpu_run.keep_what_gloo_still_sends()
        cpu_run.spawn_without_the_script()
        callbacks = [make_recorder()]
        if options is not None:
            from envpipe_megatron.integrations.megatron_bridge import EnvPipeCallback

            callbacks.append(EnvPipeCallback(**options))
        pretrain(make_config(settings), forward_step, callbacks=callbacks)


if __name__ == "__main__":
    main()
