"""Starts Megatron-LM's pretrain_gpt.py on the CPU, and reads its log."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

CPU_RUN = Path(__file__).with_name("cpu_run.py")

# What a run on the CPU needs: gloo, weights made on the CPU, and nothing of Transformer Engine,
# Apex or fused CUDA kernels.
CPU_ARGS = (
    "--distributed-backend gloo --use-cpu-initialization --transformer-impl local "
    "--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-rope-fusion --no-bias-swiglu-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion"
)
MOCK_DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 64"
GPT = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --attention-dropout 0 --hidden-dropout 0"
)
LLAMA = (
    f"{GPT} --swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights"
)
OPTIMIZER = "--lr 1e-3 --min-lr 1e-4 --lr-decay-iters 100 --micro-batch-size 1"

# The variable by which everything that a run started is found again.
_MARK = "ENVPIPE_LM_RUN"


@dataclass(frozen=True)
class Iteration:
    """What Megatron-LM prints of an iteration; what is compared is kept as it was printed.

    Attributes:
        number: From 1.
        loss: None where no loss was printed: the iteration was skipped.
        skipped: Skipped iterations since the last line.
        elapsed_ms: A mean over the log interval.
        energy_j: A GPU's mean energy, with `--log-energy`.
    """

    number: int
    loss: str | None
    grad_norm: str | None
    loss_scale: str
    learning_rate: str
    skipped: int
    nan: int
    elapsed_ms: float
    energy_j: float | None

    @property
    def digits(self) -> tuple[object, ...]:
        """All that must be the same in a run that computes the same."""
        return (
            self.number,
            self.loss,
            self.grad_norm,
            self.loss_scale,
            self.learning_rate,
            self.skipped,
            self.nan,
        )


@dataclass(frozen=True)
class Run:
    """A run that has ended.

    Attributes:
        returncode: Of torchrun; None when the run was ended since it took too long. The stacks of
            all threads of all ranks are then in `outputs`.
        iterations: Those whose line was printed.
        evaluations: What was evaluated, e.g. `iteration 5`, and the loss as it was printed.
        outputs: What each rank printed, to stdout and stderr.
        torchrun: What torchrun printed.
    """

    returncode: int | None
    iterations: tuple[Iteration, ...]
    evaluations: tuple[tuple[str, str], ...]
    outputs: tuple[str, ...]
    torchrun: str

    @property
    def digits(self) -> tuple[object, ...]:
        """All printed results, for comparison with another run's."""
        return *(iteration.digits for iteration in self.iterations), *self.evaluations

    def require_success(self) -> Run:
        """The run itself; an AssertionError with what the ranks said where it failed."""
        if self.returncode != 0:
            ended = "took too long" if self.returncode is None else f"exit {self.returncode}"
            tails = [
                f"--- rank {rank}\n{output[-2500:]}" for rank, output in enumerate(self.outputs)
            ]
            raise AssertionError("\n".join([ended, *tails, "--- torchrun", self.torchrun[-1000:]]))
        return self


def run_pretrain(
    checkout: Path,
    args: str,
    folder: Path,
    *,
    nproc: int = 4,
    env: Mapping[str, str] | None = None,
    script: str = "pretrain_gpt.py",
    timeout_s: float = 180,
) -> Run:
    """Run a checkout's training script under torchrun on the CPU, until it ends.

    Args:
        checkout: The checkout; it is not written to.
        args: What goes after the script, besides `CPU_ARGS`.
        folder: A new folder for the logs; also the working directory.
        nproc: Number of ranks.
        env: Environment variables on top of this process's.
        script: The entry script.
        timeout_s: After this time the ranks print their stacks, and all are killed.
    """
    folder.mkdir(parents=True)
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(nproc), "--redirects", "3", "--log-dir", "logs"]
    command += [str(CPU_RUN), str(checkout.resolve() / script), *shlex.split(f"{CPU_ARGS} {args}")]
    environment = {
        **os.environ,
        # Megatron-LM insists on it for tensor parallelism.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPYCACHEPREFIX": str(folder.parent / "pycache"),
        **(env or {}),
        _MARK: mark,
    }
    torchrun = folder / "torchrun.txt"
    with torchrun.open("w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        returncode: int | None = None
        try:
            returncode = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _print_stacks(mark, folder)
        finally:
            _kill(process, mark)
    outputs = tuple(_output(folder, rank) for rank in range(nproc))
    return Run(
        returncode,
        tuple(iterations_in("\n".join(outputs))),
        tuple(evaluations_in("\n".join(outputs))),
        outputs,
        torchrun.read_text(errors="replace"),
    )


def iterations_in(output: str) -> Iterable[Iteration]:
    """The iterations whose lines are in what the ranks printed."""
    for number, rest in re.findall(r"\] iteration +(\d+)/ +\d+ \|(.*)", output):
        fields = {}
        for field in rest.split("|"):
            name, _, value = field.rpartition(":")
            fields[name.strip()] = value.strip()
        energy = fields.get("energy per GPU (J/iter/GPU)")
        yield Iteration(
            int(number),
            fields.get("lm loss"),
            fields.get("grad norm"),
            fields["loss scale"],
            fields["learning rate"],
            int(fields["number of skipped iterations"]),
            int(fields["number of nan iterations"]),
            float(fields["elapsed time per iteration (ms)"]),
            None if energy is None else float(energy),
        )


def evaluations_in(output: str) -> list[tuple[str, str]]:
    """What was evaluated, and its loss."""
    return re.findall(r"validation loss at (.*?) \| lm loss value: (\S+)", output)


def _output(folder: Path, rank: int) -> str:
    found = sorted(folder.glob(f"logs/*/attempt_0/{rank}/std*.log"), reverse=True)
    return "\n".join(file.read_text(errors="replace") for file in found)


def _started_by(mark: str) -> list[int]:
    """All processes of a run; no process group holds them: torchrun's ranks lead their own."""
    pids = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{_MARK}={mark}".encode() in environ.read_bytes().split(b"\0"):
                pids.append(int(environ.parent.name))
    return pids


def _print_stacks(mark: str, folder: Path) -> None:
    """Let each rank print the stacks of its threads, which `cpu_run` does on SIGUSR1."""
    ranks = list(folder.glob("logs/*/attempt_0/*/stderr.log"))
    for pid in _started_by(mark):
        with contextlib.suppress(OSError):
            if str(CPU_RUN).encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:3]:
                os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and not all("Current thread" in r.read_text() for r in ranks):
        time.sleep(0.1)


def _kill(process: subprocess.Popen[bytes], mark: str) -> None:
    while pids := [
        pid for pid in _started_by(mark) if process.poll() is None or pid != process.pid
    ]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
    process.wait()
