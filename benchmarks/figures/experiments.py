"""What EnvPipe's figures compare: models, sizes and settings of its scripts, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum


class Family(StrEnum):
    """What a model is built of."""

    BERT = "encoder layers without embedding and head"
    GPT = "decoder layers with cross-attention, without embedding and head"
    MEGATRON = "GPT layers between an embedding and a vocabulary head"
    RESNET = "bottleneck blocks between a stem and a head"


class Precision(StrEnum):
    """What a model computes in."""

    FP32 = "fp32"
    FP16 = "fp16"


@dataclass(frozen=True)
class Model:
    """A model at its full size, or at a reduced one, by the name that EnvPipe's scripts give it.

    Args:
        layers: transformer layers, or for a ResNet the blocks of its four groups.
        width: of a token, or channels of a ResNet's first group.
        length: tokens of a sequence, or pixels of an image's side.
        outputs: vocabulary of the head, or classes of a ResNet; 0 where there is neither.
        split: layers (stem, embedding and head counted) of each of four stages, as EnvPipe's.
    """

    name: str
    label: str
    family: Family
    layers: tuple[int, ...]
    width: int
    heads: int
    length: int
    outputs: int = 0
    precision: Precision = Precision.FP32
    split: tuple[int, ...] | None = None


#: GPT-2's 50257 tokens, filled up to a multiple of 128 as Megatron does.
_VOCABULARY = 50304


def _bert(size: str, layers: int, width: int, heads: int) -> Model:
    return Model(f"bert_{size}", f"BERT-{size}", Family.BERT, (layers,), width, heads, 512)


def _gpt(size: str, layers: int, width: int, heads: int) -> Model:
    return Model(f"gpt_{size}", f"GPT-{size}", Family.GPT, (layers,), width, heads, 2048)


def _megatron(size: str, layers: int, width: int, heads: int) -> Model:
    return Model(
        f"megatron_{size}", f"Megatron-{size}", Family.MEGATRON, (layers,), width, heads, 2048,
        _VOCABULARY, Precision.FP16,
    )  # fmt: skip


MODELS = {
    model.name: model
    for model in (
        _bert("336M", 24, 1024, 16),
        _bert("1.3B", 24, 2048, 32),
        _bert("3.9B", 48, 2560, 40),
        _gpt("125M", 12, 768, 12),
        _gpt("350M", 24, 1024, 16),
        _megatron("125M", 12, 768, 12),
        _megatron("350M", 24, 1024, 16),
        _megatron("760M", 24, 1536, 16),
        _megatron("1.3B", 24, 2048, 16),
        Model(
            "resnet_152", "ResNet-152", Family.RESNET, (3, 8, 36, 3), 64, 1, 224, 100,
            split=(8, 12, 15, 17),
        ),
    )
}  # fmt: skip


def reduced(model: Model, stages: int) -> Model:
    """A model of one narrow layer or block a stage, which a CPU trains in a millisecond a unit."""
    if model.family is Family.RESNET:
        return replace(model, layers=(1, stages - 2, 0, 1), width=4, length=4, split=None)
    return replace(
        model, layers=(stages,), width=16, heads=2, length=8, outputs=64 if model.outputs else 0
    )


@dataclass(frozen=True)
class Setting:
    """How a job is trained, in EnvPipe's words."""

    type: str
    scheduling: str
    reconfigure: str


BASELINE = Setting("baseline", "1f1b", "default")
UNIFORM = Setting("uniform", "1f1b", "default")
ENVELOPE = Setting("envelope", "ours", "default")
GREEDY = Setting("envelope", "ours", "greedy")
BALANCED = Setting("envelope", "ours", "balanced")


@dataclass(frozen=True)
class Job:
    """What is trained on what; sizes in samples."""

    model: str
    gpu: str
    microbatch_size: int
    minibatch_size: int
    stages: int = 4
    replicas: int = 1

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one pipeline in one iteration."""
        return self.minibatch_size // (self.microbatch_size * self.replicas)


@dataclass(frozen=True)
class Experiment:
    """One figure, by the name of EnvPipe's script; each job is trained in each setting."""

    name: str
    title: str
    jobs: tuple[Job, ...]
    settings: tuple[Setting, ...]

    def runs(self) -> Iterator[tuple[Job, Setting]]:
        """All that is trained."""
        for job in self.jobs:
            for setting in self.settings:
                yield job, setting


_V100_JOBS = (
    Job("bert_336M", "v100", 4, 64),
    Job("gpt_125M", "v100", 2, 32),
    Job("megatron_125M", "v100", 4, 64),
    Job("resnet_152", "v100", 2, 32),
)
_RTX_3090_JOBS = (
    Job("bert_1.3B", "rtx3090", 4, 64),
    Job("bert_3.9B", "rtx3090", 2, 32),
    Job("gpt_350M", "rtx3090", 4, 64),
    Job("megatron_350M", "rtx3090", 4, 64),
    Job("megatron_760M", "rtx3090", 4, 64),
)

EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment("fig9_a", "One node of four V100", _V100_JOBS, (BASELINE, BALANCED)),
        Experiment("fig9_b", "One node of four RTX 3090", _RTX_3090_JOBS, (BASELINE, BALANCED)),
        Experiment(
            "fig10",
            "What each part of EnvPipe does, RTX 3090",
            (_RTX_3090_JOBS[0], _RTX_3090_JOBS[2]),
            (BASELINE, UNIFORM, ENVELOPE, BALANCED),
        ),
        Experiment(
            "fig11", "Greedy and balanced reconfiguring, V100", _V100_JOBS,
            (BASELINE, GREEDY, BALANCED),
        ),
        Experiment(
            "fig12",
            "Two nodes of eight V100",
            (
                Job("megatron_1.3B", "v100", 2, 512, stages=8, replicas=2),
                Job("megatron_1.3B", "v100", 2, 512, stages=4, replicas=4),
            ),
            (BASELINE, BALANCED),
        ),
        Experiment(
            "fig13",
            "Microbatches M in relation to stages K, V100",
            tuple(
                replace(job, minibatch_size=per_stage * job.stages * job.microbatch_size)
                for job in _V100_JOBS
                for per_stage in (1, 2, 4)
            ),
            (BASELINE, BALANCED),
        ),
    )
}  # fmt: skip
