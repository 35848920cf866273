"""Random orders under random delays, through Megatron's own training: does anything hang?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.megatron_lm.proof_jobs import Job, Site, joined
from benchmarks.megatron_lm.proof_models import (
    LEAST,
    LEAST_ON_CPU,
    NO_EVALUATION,
    PP2DP2,
    PP2TP2,
    PP4,
    Mapping,
    base_arguments,
    training,
)
from benchmarks.megatron_lm.proof_state import State

PART = "stress"


@dataclass(frozen=True)
class Setting:
    """A mapping with its number of hardware queues; None leaves the driver's own.

    With `loads_all`, CUDA loads all kernels when it starts, so that one may be used for the first
    time beside a posted receive.
    """

    name: str
    mapping: Mapping
    connections: str | None
    features: str = ""
    loads_all: bool = False


SETTINGS = (
    Setting("pp4", PP4, None),
    Setting("pp4-1-connection", PP4, "1"),
    Setting("pp2tp2-1-connection", PP2TP2, "1"),
    Setting("pp2dp2-overlap", PP2DP2, None, PP2DP2.distributed_optimizer()),
    Setting("pp4-all-kernels-loaded", PP4, None, loads_all=True),
)


def jobs(site: Site, iterations: int, delay_s: float) -> list[Job]:
    """One job a setting; each is one turn."""
    size = LEAST_ON_CPU if site.cpu else LEAST
    made = []
    for setting in SETTINGS:
        parts = [
            size.arguments(setting.mapping),
            setting.mapping.arguments,
            size.mock_data,
            training(iterations, log_interval=100),
            NO_EVALUATION,
            "--bf16",
            setting.features,
            "--envpipe --envpipe-type baseline --envpipe-gpu-control {control}",
        ]
        made.append(
            Job(
                name=f"{PART}/{setting.name}",
                arguments=(*base_arguments(site.cpu), *joined(parts)),
                num_ranks=setting.mapping.num_ranks,
                iterations=iterations,
                patched=True,
                environment={
                    "CUDA_DEVICE_MAX_CONNECTIONS": setting.connections,
                    "CUDA_MODULE_LOADING": "EAGER" if setting.loads_all else None,
                },
                stress={"seed": 20, "delay_s": delay_s, "load_first": not setting.loads_all},
                limit_s=3600.0,
            )
        )
    return [job for job in made if job.num_ranks <= site.num_gpus]


def told(run: dict[str, Any]) -> str:
    """How far a run came, and where each rank stood if it did not end well."""
    if run["status"] == "ok":
        done = min((sum(rank["orders"].values()) for rank in run["ranks"]), default=0)
        different = max((rank["different_orders"] for rank in run["ranks"]), default=0)
        return f"{done} iterations in {run['wall_s']:.0f} s, {different} different orders"
    stood = "; ".join(f"rank {r}: iteration {i}, {u}" for r, (i, u) in run["stood_at"].items())
    return f"{run['status']}. {stood}"


def outcomes(state: State) -> dict[str, dict[str, Any]]:
    """The runs so far."""
    return {n.split("/")[1]: r for n, r in state.runs.items() if n.startswith(f"{PART}/")}
