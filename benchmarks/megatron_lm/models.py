"""What is compared: models, mappings and arms, as Megatron's and EnvPipe's arguments."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.unmeasured import stepped_order, write_unmeasured_plan
from envpipe_megatron.core import builders
from envpipe_megatron.core.schedule import Schedule

ROOT = Path(__file__).resolve().parents[2]
CPU_RUN = ROOT / "tests" / "megatron_lm" / "cpu_run.py"
#: Without Transformer Engine and Apex, which the machine may lack.
GPU_BASE = (
    "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-rope-fusion"
)


@dataclass(frozen=True)
class Mapping:
    """How a job is spread over GPUs."""

    pipeline: int
    tensor: int = 1
    data: int = 1

    @property
    def num_ranks(self) -> int:
        """GPUs that it takes."""
        return self.pipeline * self.tensor * self.data

    @property
    def name(self) -> str:
        """Such as pp2tp2."""
        sizes = (("pp", self.pipeline), ("tp", self.tensor), ("dp", self.data))
        return "".join(f"{kind}{size}" for kind, size in sizes if size > 1)

    @property
    def arguments(self) -> str:
        """Megatron's."""
        return (
            f"--pipeline-model-parallel-size {self.pipeline} "
            f"--tensor-model-parallel-size {self.tensor}"
        )

    @property
    def environment(self) -> dict[str, str | None]:
        """Megatron demands one hardware queue for tensor parallelism before Blackwell."""
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if self.tensor > 1 else {}

    def distributed_optimizer(self) -> str:
        """Its flags, with the overlaps where there are replicas to overlap with."""
        overlaps = "--overlap-grad-reduce --overlap-param-gather" if self.data > 1 else ""
        return f"--use-distributed-optimizer {overlaps}"


PP2, PP4, PP2TP2, PP2DP2 = Mapping(2), Mapping(4), Mapping(2, tensor=2), Mapping(2, data=2)
PP8, PP4TP2, PP2TP2DP2 = Mapping(8), Mapping(4, tensor=2), Mapping(2, tensor=2, data=2)
MAPPINGS = (PP4, PP2TP2, PP2DP2, PP2, PP8, PP4TP2, PP2TP2DP2)


@dataclass(frozen=True)
class Size:
    """How large a model and its batch are; heads are 64 wide, or 8 in a model of less than 128."""

    layers: int
    hidden: int
    sequence: int
    vocabulary: int
    microbatch: int
    microbatches: int

    def arguments(self, mapping: Mapping) -> str:
        """Megatron's."""
        heads = self.hidden // (64 if self.hidden >= 128 else 8)
        batch = self.microbatch * self.microbatches * mapping.data
        return (
            f"--num-layers {self.layers} --hidden-size {self.hidden} "
            f"--num-attention-heads {heads} --seq-length {self.sequence} "
            f"--max-position-embeddings {self.sequence} --micro-batch-size {self.microbatch} "
            f"--global-batch-size {batch}"
        )

    @property
    def llama(self) -> str:
        """What makes the model one of Llama's kind."""
        groups = self.hidden // (64 if self.hidden >= 128 else 8) // 2
        return (
            "--swiglu --normalization RMSNorm --group-query-attention "
            f"--num-query-groups {groups} --position-embedding-type rope --disable-bias-linear "
            "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
        )

    @property
    def mock_data(self) -> str:
        """Megatron's own mock data."""
        return f"--mock-data --tokenizer-type NullTokenizer --vocab-size {self.vocabulary}"


GPT_1_3B = Size(24, 2048, 2048, 32000, microbatch=1, microbatches=14)
TINY = Size(8, 256, 256, 8192, microbatch=2, microbatches=8)
TINY_ON_CPU = Size(4, 32, 32, 64, microbatch=1, microbatches=6)
#: Launches alone, so that delays and orders make the time.
LEAST = Size(4, 64, 64, 1024, microbatch=1, microbatches=8)
LEAST_ON_CPU = Size(4, 32, 32, 64, microbatch=1, microbatches=6)


def training(iterations: int, *, log_interval: int = 1) -> str:
    """Megatron's arguments of optimizer and length."""
    return (
        f"--train-iters {iterations} --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine "
        "--lr-warmup-iters 5 --lr-decay-iters 100 --weight-decay 0.1 --clip-grad 1.0 --seed 1234 "
        f"--log-interval {log_interval} --distributed-timeout-minutes 5"
    )


NO_EVALUATION = "--eval-interval 100000 --eval-iters 0"


def joined(parts: Iterable[str]) -> tuple[str, ...]:
    """Arguments from pieces of a command line; no piece holds a path with blanks."""
    return tuple(argument for part in parts for argument in part.split())


def base_arguments(cpu: bool) -> tuple[str, ...]:
    """What every run gets."""
    if not cpu:
        return joined([GPU_BASE])
    sys.path.append(str(CPU_RUN.parent))
    from lm_runs import CPU_ARGS  # type: ignore[import-not-found]  # a helper of the tests

    return joined([CPU_ARGS])


def job_arguments(cpu: bool, size: Size, mapping: Mapping, *parts: str) -> tuple[str, ...]:
    """What every run gets, a model spread over GPUs, and pieces of a command line."""
    model = size.arguments(mapping), mapping.arguments
    return (*base_arguments(cpu), *joined([*model, *parts]))


def corpus_data() -> str:
    """Megatron's arguments of the real corpus; each job builds its indices for itself."""
    sys.path.append(str(CPU_RUN.parent))
    from make_corpus import corpus_args  # type: ignore[import-not-found]  # likewise

    folder = Path("/folder-of-the-corpus")  # known when a job starts
    arguments: str = corpus_args(folder).replace(str(folder), "{corpus}")
    return f"{arguments} --data-cache-path {{folder}}/cache"


#: The arms of a comparison: unmodified Megatron-LM, and the patched one in its ways.
STOCK, OFF, ONE_F_ONE_B, ENVPIPE = "stock", "off", "1f1b", "envpipe"
ARMS = (STOCK, OFF, ONE_F_ONE_B, ENVPIPE)


@dataclass(frozen=True)
class Planned:
    """The order that an arm runs by file."""

    mapping: Mapping
    num_microbatches: int
    arm: str

    @property
    def schedule(self) -> Schedule:
        """1F1B, or EnvPipe's with one extra forward more than the next stage's."""
        p, m = self.mapping.pipeline, self.num_microbatches
        if self.arm == ONE_F_ONE_B:
            return builders.one_f_one_b(p, m)
        return stepped_order(p, m, capacity=1 if self.mapping.environment else None)

    def arguments(self, warmup_iterations: int) -> str:
        """EnvPipe's flags; `{folder}` and `{control}` are filled in when the job starts."""
        scheduling = "1f1b" if self.arm == ONE_F_ONE_B else "ours"
        return (
            f"--envpipe --envpipe-type envelope --envpipe-scheduling {scheduling} "
            f"--envpipe-reconfigure default --envpipe-baseline-steps {warmup_iterations} "
            "--envpipe-profile {folder}/profile.csv --envpipe-plan {folder}/plan.json "
            "--envpipe-gpu-control {control} --envpipe-output {folder}/envpipe"
        )

    def write(self, folder: Path) -> None:
        """Write the files that `arguments` names."""
        write_unmeasured_plan(self.schedule, folder)


def planned(mapping: Mapping, size: Size, arm: str) -> Planned | None:
    """The order of an arm; None where the framework's own function runs."""
    return Planned(mapping, size.microbatches, arm) if arm in (ONE_F_ONE_B, ENVPIPE) else None
