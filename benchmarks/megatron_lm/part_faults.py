"""What must be refused at start, and how; that nothing is imported is seen in `part_equality`."""

from __future__ import annotations

from benchmarks.megatron_lm.proof_jobs import Job, Site, joined
from benchmarks.megatron_lm.proof_models import (
    NO_EVALUATION,
    PP2,
    TINY,
    TINY_ON_CPU,
    base_arguments,
    training,
)

PART = "faults"
_LENGTH = training(5)
#: Ramp-up is for training that is counted in samples.
_RAMP_UP = "--train-samples 60 --lr 1e-3 --rampup-batch-size 2 2 10"
#: Name, Megatron's flags besides a valid job's, what the log must say, and the training's length.
_REFUSED = (
    ("virtual-pipeline", "--num-layers-per-virtual-pipeline-stage 1", "virtual pipeline", _LENGTH),
    ("moe", "--num-experts 2", "mixture of experts", _LENGTH),
    (
        "mtp",
        "--mtp-num-layers 1 --position-embedding-type rope",
        "multi-token prediction",
        _LENGTH,
    ),
    ("ramp-up", "", "ramp-up", _RAMP_UP),
    ("plan-alone", "--envpipe-plan {folder}/job.json", "--envpipe-plan needs the profile", _LENGTH),
    ("no-pipeline", "--pipeline-model-parallel-size 1", "--envpipe needs a pipeline", _LENGTH),
)


def jobs(site: Site) -> list[Job]:
    """One job a fault; none of them comes to train."""
    size = TINY_ON_CPU if site.cpu else TINY
    good = [
        size.arguments(PP2),
        PP2.arguments,
        size.mock_data,
        NO_EVALUATION,
        "--bf16 --envpipe --envpipe-gpu-control {control}",
    ]

    def job(name: str, flags: str, refused: str, length: str, *, hide_package: bool = False) -> Job:
        return Job(
            name=f"{PART}/{name}",
            arguments=(*base_arguments(site.cpu), *joined([*good, length, flags])),
            num_ranks=PP2.num_ranks,
            iterations=5,
            patched=True,
            hide_package=hide_package,
            refused=refused,
            limit_s=120.0,
        )

    made = [job(*fault) for fault in _REFUSED]
    missing = "needs the package envpipe-megatron"
    return [*made, job("not-installed", "", missing, _LENGTH, hide_package=True)]
