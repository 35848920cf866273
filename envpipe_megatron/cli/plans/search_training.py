"""`envpipe search --train`: the first iterations of what was found, beside what was predicted."""

from __future__ import annotations

import re
import shlex
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envpipe_megatron.console import show_table
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.launch.signals import Signals
from envpipe_megatron.launch.torchrun import ranks_of_node, read, run_torchrun, split
from envpipe_megatron.search.candidates import Candidate
from envpipe_megatron.search.configuration import Configuration

#: Iterations that are trained, and those at first that take longer and are left out.
ITERATIONS, WARM_UP = 30, 10
#: A line of Megatron's log is for so many: each takes it milliseconds, and waits of all ranks.
LOG_INTERVAL = 5
_GIB, _MIB = 2.0**30, 2**20
#: Megatron's arguments that a configuration or this run sets, by how they begin.
_SET_ASIDE = re.compile(
    r"--(tensor-model-parallel-size|pipeline-model-parallel|context-parallel-size|expert-model-parallel"
    r"|num-layers-per-virtual|num-virtual-stages|decoder-(first|last)-pipeline|account-for-"
    r"|micro-batch-size|global-batch-size|rampup-batch-size|use-distributed-optimizer|recompute-"
    r"|train-(iters|samples)|lr-(decay|warmup)-(iters|samples)|lr-decay-style|lr-wsd-|exit-|save|load"
    r"|log-(interval|memory)|envpipe)"
)
#: Those that Megatron refuses without tensor parallelism, and without the distributed optimizer.
_WITH_TENSOR_PARALLELISM = re.compile("--tp-comm-overlap")
_WITH_DISTRIBUTED_OPTIMIZER = re.compile("--overlap-param-gather")


@dataclass(frozen=True)
class Measured:
    """Figures of a training: times (s) after the warm-up, each a mean of a few iterations.

    Peaks (bytes) are by rank.
    """

    iteration_s: tuple[float, ...]
    peak_bytes: dict[int, float]


def train(command: Sequence[str], candidate: Candidate, flags: Sequence[str]) -> None:
    """Train a configuration's first iterations, and print them beside what was predicted.

    Args:
        command: what follows `torchrun`, which `check_ranks` let pass; arguments that the flags
            set are set aside.
        flags: Megatron's.

    EnvPipeError: the training failed, or its log has no times.
    """
    parts = split(command)
    with tempfile.TemporaryDirectory() as folder:
        words = [*parts.options, "--log-dir", folder, "--tee", "3", parts.script[0]]
        words += without_set(parts.script[1:], candidate.configuration) + arguments(flags)
        with Signals() as signals:
            code = run_torchrun(words, {"PYTHONUNBUFFERED": "1"}, signals)
        logs = [path.read_text(errors="replace") for path in Path(folder).rglob("stdout.log")]
    measured = read_log("\n".join(logs))
    if code or not measured.iteration_s:
        raise EnvPipeError(
            "The training of the configuration failed, or logged no iteration",
            value=code,
            remedy="Its own message is above; the script must be Megatron-LM's.",
        )
    _compare(candidate, measured)


def check_ranks(command: Sequence[str], num_gpus: int) -> None:
    """Refuse (EnvPipeError) a command that is not of a training with a rank for each GPU."""
    options = read(command)
    least, _, most = options.nnodes.partition(":")
    ranks = ranks_of_node(options) * int(least) if (most or least) == least else None
    if ranks != num_gpus:
        raise EnvPipeError(
            f"The command's ranks are not the {num_gpus} GPUs of the job",
            value="a number that changes" if ranks is None else ranks,
            remedy="Give torchrun's --nproc-per-node and --nnodes that make as many, or --gpus.",
        )


def without_set(words: Sequence[str], configuration: Configuration) -> list[str]:
    """A script's arguments without those that are set anew or do not go with the configuration."""
    patterns = [_SET_ASIDE]
    if all(stage.sizes.tensor_parallel == 1 for stage in configuration.stages):
        patterns.append(_WITH_TENSOR_PARALLELISM)
    if not configuration.distributed_optimizer:
        patterns.append(_WITH_DISTRIBUTED_OPTIMIZER)
    kept, aside = [], False
    for word in words:
        if word.startswith("--"):
            aside = any(pattern.match(word) for pattern in patterns)
        if not aside:
            kept.append(word)
    return kept


def arguments(flags: Sequence[str]) -> list[str]:
    """Arguments of the run: a configuration's flags, and a log of every few iterations.

    Recomputation by stage is EnvPipe's: it only observes here.
    """
    own = "--envpipe --envpipe-level observe" if "--envpipe-" in " ".join(flags) else ""
    log = f"--log-interval {LOG_INTERVAL} --log-memory-interval {WARM_UP}"
    return shlex.split(" ".join([*flags, f"--train-iters {ITERATIONS}", log, own]))


def read_log(text: str) -> Measured:
    """Times after the warm-up, and each rank's last peak, of Megatron's log."""
    times_ms = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", text)
    peaks = re.findall(r"\[Rank (\d+)\].*\| max allocated: ([\d.]+)", text)
    return Measured(
        tuple(float(time_ms) / 1e3 for time_ms in times_ms[WARM_UP // LOG_INTERVAL :]),
        {int(rank): float(mib) * _MIB for rank, mib in peaks},
    )


def _compare(candidate: Candidate, measured: Measured) -> None:
    """Print predicted beside measured: Megatron's own order at the highest clocks."""
    predicted_s, measured_s = candidate.iteration_time_s, statistics.median(measured.iteration_s)
    rows = [_row("iteration time (s)", predicted_s, measured_s, 4)]
    first_rank = 0
    for stage, layout in enumerate(candidate.configuration.stages):
        ranks = range(first_rank, first_rank + layout.num_gpus)
        peaks = [measured.peak_bytes[rank] for rank in ranks if rank in measured.peak_bytes]
        if peaks:
            predicted_gib = candidate.peak_bytes[stage] / _GIB
            rows.append(_row(f"peak of stage {stage} (GiB)", predicted_gib, max(peaks) / _GIB, 2))
        first_rank += layout.num_gpus
    columns = ("", "predicted", "measured", "off (%)")
    show_table(f"{ITERATIONS} iterations, the first {WARM_UP} left out", columns, rows)


def _row(name: str, predicted: float, measured: float, digits: int) -> tuple[str, ...]:
    off = f"{100 * (predicted / measured - 1):+.1f}" if measured else "-"
    return name, f"{predicted:.{digits}f}", f"{measured:.{digits}f}", off
