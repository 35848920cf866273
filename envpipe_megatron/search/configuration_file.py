"""The file of a configuration, `envpipe-configuration/1`: what a search chose, for scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from envpipe_megatron.search.configuration import Configuration, Job, StageLayout
from envpipe_megatron.search.layer_profile import LayerProfile

CONFIGURATION_FORMAT = "envpipe-configuration/1"


def configuration_text(
    profile: LayerProfile,
    configuration: Configuration,
    job: Job,
    *,
    flags: Sequence[str],
    predicted: dict[str, Any],
) -> str:
    """The file's text.

    Args:
        flags: of Megatron-LM, if it can train the configuration.
        predicted: what is said of it: `iteration_time_s`, `energy_j`, `peak_bytes` by stage.
    """
    known = {
        "format": CONFIGURATION_FORMAT,
        "profile": profile.source,
        "gpus": job.num_gpus,
        "gpus_per_node": job.gpus_per_node,
        "global_batch": job.global_batch,
        "num_microbatches": configuration.num_microbatches,
        "distributed_optimizer": configuration.distributed_optimizer,
        "stages": [_stage_entry(profile, stage) for stage in configuration.stages],
        "megatron_flags": list(flags),
        "predicted": predicted,
    }
    return json.dumps(known, indent=1) + "\n"


def _stage_entry(profile: LayerProfile, stage: StageLayout) -> dict[str, Any]:
    return {
        "pieces": [list(chunk) for chunk in stage.chunks],
        "names": [list(profile.pieces[first:end]) for first, end in stage.chunks],
        **asdict(stage.sizes),
        "data_parallel": stage.data_parallel,
        "recomputed": list(stage.recomputed),
    }
