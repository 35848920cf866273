"""What is compared: models, mappings and arms, as Megatron's and EnvPipe's arguments."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from envpipe_megatron.core import kinds
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import split_in_place, zero_bubble
from envpipe_megatron.core.orders.greedy import shortest
from envpipe_megatron.core.orders.job import OrderJob
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.policies.frequencies import envelope
from unmeasured import another_each_unit, stepped_order, write_unmeasured_plan

ROOT = Path(__file__).resolve().parents[2]
CPU_RUN = ROOT / "tests" / "megatron_lm" / "cpu_run.py"
#: Without Transformer Engine and Apex, which the machine may lack.
GPU_BASE = (
    "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-rope-fusion"
)
#: With Transformer Engine. Kernels of attention that repeat to the last bit have no dropout.
GPU_BASE_TRANSFORMER_ENGINE = (
    "--transformer-impl transformer_engine --attention-dropout 0 --hidden-dropout 0"
)
#: Modules that a setting may need; the second is the part of Apex that adds up weight gradients.
TRANSFORMER_ENGINE, APEX = "transformer_engine", "fused_weight_gradient_mlp_cuda"


@dataclass(frozen=True)
class Mapping:
    """How a job is spread over GPUs."""

    pipeline: int
    tensor: int = 1
    data: int = 1
    #: Parts of each sequence.
    context: int = 1
    #: Virtual stages of a stage.
    chunks: int = 1
    #: Which layers each has, as Megatron writes it; by default as many.
    layout: str = ""
    #: Whether a forward runs as one with a backward, to overlap what experts send with computing.
    combined: bool = False

    @property
    def num_ranks(self) -> int:
        """GPUs that it takes."""
        return self.pipeline * self.tensor * self.data * self.context

    @property
    def name(self) -> str:
        """Such as pp2tp2."""
        sizes = (
            ("pp", self.pipeline),
            ("vp", self.chunks),
            ("tp", self.tensor),
            ("cp", self.context),
            ("dp", self.data),
        )
        return "".join(f"{kind}{size}" for kind, size in sizes if size > 1)

    @property
    def arguments(self) -> str:
        """Megatron's."""
        chunks = f" --num-virtual-stages-per-pipeline-rank {self.chunks}" if self.chunks > 1 else ""
        if self.layout:
            chunks = f" --pipeline-model-parallel-layout {self.layout}"
        combined = " --overlap-moe-expert-parallel-comm" if self.combined else ""
        return (
            f"--pipeline-model-parallel-size {self.pipeline} "
            f"--tensor-model-parallel-size {self.tensor} "
            f"--context-parallel-size {self.context}{chunks}{combined}"
        )

    @property
    def environment(self) -> dict[str, str | None]:
        """Before Blackwell, Megatron demands one hardware queue where a layer is split."""
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if self.tensor * self.context > 1 else {}

    @property
    def expert_parallel(self) -> str:
        """What spreads experts over the replicas of a stage."""
        return f"--expert-model-parallel-size {self.data}"

    def distributed_optimizer(self) -> str:
        """Its flags, with the overlaps where there are replicas to overlap with."""
        overlaps = "--overlap-grad-reduce --overlap-param-gather" if self.data > 1 else ""
        return f"--use-distributed-optimizer {overlaps}"


PP2, PP4, PP2TP2, PP2DP2 = Mapping(2), Mapping(4), Mapping(2, tensor=2), Mapping(2, data=2)
PP2CP2 = Mapping(2, context=2)
PP8, PP4TP2, PP2TP2DP2 = Mapping(8), Mapping(4, tensor=2), Mapping(2, tensor=2, data=2)
PP4DP2, PP2DP4 = Mapping(4, data=2), Mapping(2, data=4)
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

    def fitting(self, mapping: Mapping) -> Size:
        """The same with as many layers for each stage or chunk; of chunks, in whole groups.

        Megatron refuses a last group of less than a microbatch a stage.
        """
        layers = mapping.pipeline * mapping.chunks
        group = mapping.pipeline if mapping.chunks > 1 else 1
        return replace(
            self,
            layers=-(-self.layers // layers) * layers,
            microbatches=-(-self.microbatches // group) * group,
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
#: A few layers as wide as those of a model of 8B: the GPU has more to do in one than a slow host,
#: which took 4 ms to launch a forward through Transformer Engine.
WIDE = Size(4, 4096, 2048, 32000, microbatch=3, microbatches=14)
#: As NVIDIA's recipe of Llama-3 405B: two layers in each of four virtual stages, each as much work
#: as a GPU has of one of 405B's, so that launching it takes far less. A GPU holds one such job.
LONG = Size(8, 6144, 4096, 32000, microbatch=2, microbatches=14)
GPT_2_7B = replace(GPT_1_3B, layers=32, hidden=2560, microbatches=16)
#: By name. Those of 1.3B have microbatches of four sequences, so that such a host can follow.
SIZES = {
    "gpt-1.3b": replace(GPT_1_3B, microbatch=4),
    "gpt-2.7b": GPT_2_7B,
    "wide": WIDE,
    "long": LONG,
}
TINY = Size(8, 256, 256, 8192, microbatch=2, microbatches=8)
TINY_ON_CPU = Size(4, 32, 32, 64, microbatch=1, microbatches=6)
#: Launches alone, so that delays and orders make the time.
LEAST = Size(4, 64, 64, 1024, microbatch=1, microbatches=8)
LEAST_ON_CPU = Size(4, 32, 32, 64, microbatch=1, microbatches=6)

#: Experts of Megatron's own, one after another, which need no Transformer Engine.
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --disable-bias-linear"
)


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


def base_arguments(cpu: bool, needs: Collection[str] = ()) -> tuple[str, ...]:
    """What every run gets, with modules that it needs; there are none of these for the CPU."""
    if not cpu and TRANSFORMER_ENGINE in needs:
        fusion = "" if APEX in needs else "--no-gradient-accumulation-fusion"
        return joined([GPU_BASE_TRANSFORMER_ENGINE, fusion])
    if not cpu:
        return joined([GPU_BASE])
    from lm_runs import CPU_ARGS  # type: ignore[import-not-found]  # a helper of the tests

    return joined([CPU_ARGS])


def job_arguments(
    cpu: bool, size: Size, mapping: Mapping, *parts: str, needs: Collection[str] = ()
) -> tuple[str, ...]:
    """What every run gets, a model spread over GPUs, and pieces of a command line."""
    base = base_arguments(cpu, needs)
    return (*base, *joined([size.arguments(mapping), mapping.arguments, *parts]))


def corpus_data() -> str:
    """Megatron's arguments of the real corpus; each job builds its indices for itself."""
    from make_corpus import corpus_args  # type: ignore[import-not-found]  # likewise

    folder = Path("/folder-of-the-corpus")  # known when a job starts
    arguments: str = corpus_args(folder).replace(str(folder), "{corpus}")
    return f"{arguments} --data-cache-path {{folder}}/cache"


#: The arms of a comparison: unmodified Megatron-LM, and the patched one in its ways. UNITS runs
#: Megatron's own function and order, at level `units`; LOOP what is planned meanwhile. SERIAL is
#: unmodified as well, with chunks whose messages do not overlap what is computed.
STOCK, OFF, ONE_F_ONE_B, ENVPIPE, UNITS = "stock", "off", "1f1b", "envpipe", "units"
LOOP, SERIAL = "loop", "stock-serial"
#: Each backward in two parts: weight gradients lag, or come at once.
SPLIT, IN_PLACE = "split", "in-place"
UNMODIFIED = (STOCK, SERIAL)
#: Those of jobs that may run in another order than Megatron's, and of those that may not.
ORDER_ARMS, KEPT_ARMS = (STOCK, ONE_F_ONE_B, ENVPIPE), (STOCK, UNITS)
WHOLE_ARMS = (*ORDER_ARMS, UNITS)
ALL_ARMS = (*WHOLE_ARMS, SPLIT, IN_PLACE)


@dataclass(frozen=True)
class Planned:
    """The order that an arm runs by file; LOOP has no file, and starts from Megatron's."""

    mapping: Mapping
    num_microbatches: int
    arm: str

    @property
    def schedule(self) -> Schedule:
        """Megatron's, or EnvPipe's with one extra forward more than the next stage's.

        With chunks, one extra forward of a chunk on all stages but the last. Split: ZB-H1, or with
        chunks the shortest order for units that all take as long; in place, Megatron's.
        """
        p, m, chunks = self.mapping.pipeline, self.num_microbatches, self.mapping.chunks
        if self.arm == IN_PLACE:
            return split_in_place(builders.framework_order(p, m, chunks), m * chunks)
        if self.arm == SPLIT and chunks > 1:
            times_s = dict.fromkeys(kinds.SPLIT, np.ones((p, chunks, m)))
            return shortest(OrderJob(times_s, limits=[2 * p * chunks] * p))
        if self.arm == SPLIT:
            return zero_bubble(p, m)
        if chunks > 1:
            more = [1] * (p - 1) + [0] if self.arm == ENVPIPE else ()
            combined = self.mapping.combined
            return builders.interleaved(p, m, chunks, combined=combined, extra_warmup=more)
        if self.arm == ENVPIPE:
            return stepped_order(p, m, capacity=1 if self.mapping.environment else None)
        return builders.one_f_one_b(p, m)

    def arguments(self, warmup_iterations: int) -> str:
        """EnvPipe's flags; `{folder}` and `{control}` are filled in when the job starts."""
        if self.arm == LOOP:
            return (
                f"--envpipe --envpipe-baseline-steps {warmup_iterations} "
                "--envpipe-gpu-control {control} --envpipe-output {folder}/envpipe"
            )
        level = "units" if self.arm == UNITS else "order"
        scheduling = "ours" if self.arm == ENVPIPE else "1f1b"
        return (
            f"--envpipe --envpipe-level {level} "
            f"--envpipe-type envelope --envpipe-scheduling {scheduling} "
            f"--envpipe-reconfigure default --envpipe-baseline-steps {warmup_iterations} "
            "--envpipe-profile {folder}/profile.csv --envpipe-plan {folder}/plan.json "
            "--envpipe-gpu-control {control} --envpipe-output {folder}/envpipe"
        )

    def write(self, folder: Path) -> None:
        """Write the files that `arguments` names."""
        if self.arm == LOOP:
            return
        frequencies = another_each_unit if self.arm == UNITS else envelope
        write_unmeasured_plan(self.schedule, folder, frequencies)


def planned(mapping: Mapping, size: Size, arm: str) -> Planned | None:
    """The order of an arm; None where EnvPipe does nothing."""
    return None if arm in (*UNMODIFIED, OFF) else Planned(mapping, size.microbatches, arm)
