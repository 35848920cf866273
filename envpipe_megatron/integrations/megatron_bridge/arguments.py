"""A job of Megatron-Bridge by Megatron-LM's names of arguments, and its limits; no framework."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from envpipe_megatron.integrations.levels import Asks, Level, Limit, on
from envpipe_megatron.integrations.megatron.limits import LIMITS, NOT_PROVEN, REFUSED

BRIDGE_LIMITS = (
    *LIMITS,
    Limit(
        "process groups of the model's own (use_decentralized_pg)",
        on("use_decentralized_pg"),
        Level.ORDER,
        NOT_PROVEN,
    ),
    Limit("tensor inspection", on("inspects_tensors"), Level.UNITS, "it counts Megatron's calls"),
)
BRIDGE_REFUSED: Mapping[str, Asks] = {
    **REFUSED,
    "stages of two models (dist_train)": on("of_two_models"),
}

#: Megatron-LM's names of arguments, and what the fields of these are called here.
_RENAMED = {
    "num_experts": "num_moe_experts",
    "swiglu": "gated_linear_unit",
    "padded_vocab_size": "vocab_size",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "heterogeneous_layers_config_path": "heterogeneous_block_specs",
    "te_precision_config_file": "quant_recipe",
    "kitchen_recipe_number": "use_kitchen",
}


def arguments_of(config: Any, world_size: int) -> argparse.Namespace:
    """What `limits` and `job` ask of arguments, from a validated ConfigContainer.

    Most of Bridge's fields have the names of Megatron-LM's arguments; these are the others. Of
    fields of one name in several parts, the model's counts.
    """
    model = config.model
    parts = (
        config,
        config.logger,
        config.rerun_state_machine,
        config.checkpoint,
        config.dist,
        config.ddp,
        config.validation,
        config.train,
        config.optimizer,
        config.ft,
        getattr(model, "transformer", None),
        model,
    )
    named: dict[str, Any] = {}
    for part in parts:
        named |= {} if part is None else vars(part)
    named |= {name: named.get(field) for name, field in _RENAMED.items()}
    tuned = config.peft is not None or config.dataset.dataloader_type == "batch"
    named |= {
        "world_size": world_size,
        "untie_embeddings_and_output_weights": not named.get("share_embeddings_and_output_weights"),
        "sft": tuned or _is_on(config.dataset, "enable_in_batch_packing"),
        "modelopt_enabled": bool(named.get("restore_modelopt_state") or named.get("kd_config")),
        "inprocess_restart": _is_on(config.inprocess_restart, "enabled"),
        "inspects_tensors": _is_on(config.tensor_inspect, "enabled"),
        "of_two_models": _is_on(named.get("dist_train"), "use_dist_train"),
    }
    return argparse.Namespace(**named)


def _is_on(part: Any, switch: str) -> bool:
    return bool(getattr(part, switch, False))
