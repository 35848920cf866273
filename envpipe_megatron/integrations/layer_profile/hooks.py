"""Changes Megatron-LM in memory, so that it measures layers in place of training.

Parsed arguments get one stage, the job's sizes, and nothing that a measurement of single layers has
no use for. Transformer blocks build a few layers of each kind. After the set-up of model and
optimizer come the measurement and the job's end.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.hooking import refusals
from envpipe_megatron.integrations.layer_profile.job import measure_model
from envpipe_megatron.integrations.layer_profile.model import build_rows
from envpipe_megatron.search.layer_jobs import JOB_VARIABLE, LayerJob

#: Arguments of a job without stages, data parallelism, recomputation, checkpoints and logs.
_PLAIN: Mapping[str, Any] = {
    "pipeline_model_parallel_size": 1,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "overlap_param_gather_with_optimizer_step": False,
    # Context parallel ranks and experts' would share its state: a parameter's bytes are the whole.
    "use_distributed_optimizer": False,
    "num_distributed_optimizer_instances": 1,
    "recompute_activations": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "distribute_saved_activations": False,
    "micro_batch_size": 1,
    "global_batch_size": None,
    "rampup_batch_size": None,
    "load": None,
    "save": None,
    "tensorboard_dir": None,
    "wandb_project": "",
    "envpipe": False,
    # Else what checks gradients asserts that a training step runs.
    "rerun_mode": "disabled",
}

#: Arguments that Megatron takes only with its distributed optimizer.
_WITH_DISTRIBUTED_OPTIMIZER = (
    "use_precision_aware_optimizer",
    "fp8_param_gather",
    "fp4_param_gather",
    "reuse_grad_buf_for_mxfp8_param_ag",
)

#: Arguments under which layers differ by more than their specification, or are shared out.
_REFUSED: Mapping[str, str] = {
    "mtp_num_layers": "layers that predict more tokens",
    "heterogeneous_layers_config_path": "layers with configurations of their own",
    "window_attn_skip_freq": "windows of attention that differ by layer",
    "use_torch_fsdp2": "FSDP",
    "use_megatron_fsdp": "FSDP",
}


class _Changes(MetaPathFinder):
    """Changes Megatron-LM's modules when they have been imported."""

    def __init__(self, job: LayerJob) -> None:
        self._changes: dict[str, Callable[[Any], None]] = {
            "megatron.training.arguments": partial(_change_arguments, job=job),
            "megatron.core.transformer.transformer_block": build_rows,
            "megatron.training.training": partial(_measure_and_end, job=job),
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = self._changes.pop(fullname, None)
        spec = None if change is None else importlib.util.find_spec(fullname)
        if change is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def _change_arguments(module: Any, job: LayerJob) -> None:
    parse = module.parse_args

    @refusals()
    def parse_and_change(*args: Any, **kwargs: Any) -> argparse.Namespace:
        parsed: argparse.Namespace = parse(*args, **kwargs)
        sizes = job.sizes[0]
        changed = {
            **_PLAIN,
            "tensor_model_parallel_size": sizes.tensor_parallel,
            "context_parallel_size": sizes.context_parallel,
            "expert_model_parallel_size": sizes.expert_parallel,
        }
        if any(getattr(parsed, name, False) for name in _WITH_DISTRIBUTED_OPTIMIZER):
            del changed["use_distributed_optimizer"]
        for name, value in changed.items():
            if hasattr(parsed, name):
                setattr(parsed, name, value)
        if sizes.tensor_parallel == 1 and hasattr(parsed, "tp_comm_overlap"):
            parsed.tp_comm_overlap = False
        for name, what in _REFUSED.items():
            if getattr(parsed, name, None):
                raise EnvPipeError(
                    f"Layers cannot be measured one by one with {what}",
                    value=f"--{name.replace('_', '-')}",
                    remedy="Profile the model without it, or search by another profile.",
                )
        return parsed

    module.parse_args = parse_and_change


def _measure_and_end(module: Any, job: LayerJob) -> None:
    pretrain, set_up = module.pretrain, module.setup_model_and_optimizer
    given: dict[str, Any] = {}

    def pretrain_up_to_there(*args: Any, **kwargs: Any) -> None:
        given.update(inspect.signature(pretrain).bind(*args, **kwargs).arguments)
        pretrain(*args, **kwargs)

    def set_up_and_measure(*args: Any, **kwargs: Any) -> None:
        model, optimizer, _ = set_up(*args, **kwargs)
        measure_model(
            model[0],
            module.unwrap_model(model)[0],
            optimizer,
            module.get_args(),
            given["forward_step_func"],
            job,
        )
        dist.barrier()
        dist.destroy_process_group()
        sys.exit(0)

    module.pretrain = pretrain_up_to_there
    module.setup_model_and_optimizer = set_up_and_measure


def main() -> None:
    """Run the script with its arguments; what it imports of Megatron-LM is changed."""
    sys.argv = sys.argv[1:]
    if not sys.flags.safe_path:  # else Python puts no folder there
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    sys.meta_path.insert(0, _Changes(LayerJob.of_text(os.environ[JOB_VARIABLE])))
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit(f"{sys.argv[0]} ended before it set up a model: its layers were not measured")


if __name__ == "__main__":
    main()
