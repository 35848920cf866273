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
        Level.UNITS,
        NOT_PROVEN,
    ),
    Limit("tensor inspection", on("inspects_tensors"), Level.UNITS, NOT_PROVEN),
)
BRIDGE_REFUSED: Mapping[str, Asks] = {
    **REFUSED,
    "stages of two models (dist_train)": on("of_two_models"),
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
    named |= {
        "world_size": world_size,
        "num_experts": named.get("num_moe_experts"),
        "swiglu": named.get("gated_linear_unit"),
        "untie_embeddings_and_output_weights": not named.get("share_embeddings_and_output_weights"),
        "padded_vocab_size": named.get("vocab_size"),
        "sft": config.peft is not None or config.dataset.dataloader_type == "batch",
        "modelopt_enabled": bool(named.get("restore_modelopt_state") or named.get("kd_config")),
        "inprocess_restart": _is_on(config.inprocess_restart, "enabled"),
        "inspects_tensors": _is_on(config.tensor_inspect, "enabled"),
        "of_two_models": _is_on(named.get("dist_train"), "use_dist_train"),
    }
    return argparse.Namespace(**named)


def _is_on(part: Any, switch: str) -> bool:
    return bool(getattr(part, switch, False))
