"""Starts Megatron-LM's pretrain_gpt.py on the CPU, and reads its log."""

import importlib.util
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torchrun_ranks import Ended, run_ranks

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
OPTIMIZER = "--lr 1e-3 --min-lr 1e-4 --micro-batch-size 1"

_COMPUTED = (
    "lm loss",
    "grad norm",
    "loss scale",
    "learning rate",
    "number of skipped iterations",
    "number of nan iterations",
)


@dataclass(frozen=True)
class Iteration:
    """An iteration as Megatron-LM prints it.

    Attributes:
        number: From 1.
        fields: All of the line, as it was printed.
    """

    number: int
    fields: Mapping[str, str]

    @property
    def loss(self) -> str | None:
        """As it was printed; None where the iteration was skipped."""
        return self.fields.get("lm loss")

    @property
    def skipped(self) -> bool:
        """Return True if the gradients overflowed, and no weight was changed."""
        return self.fields["number of skipped iterations"] != "0"

    @property
    def phase(self) -> str | None:
        """EnvPipe's, with `--envpipe`."""
        return self.fields.get("envpipe phase")

    @property
    def digits(self) -> tuple[object, ...]:
        """All that must be the same in a run that computes the same."""
        return self.number, *(self.fields.get(name) for name in _COMPUTED)


class Run(Ended):
    """Facts read from what the ranks of a Megatron printed."""

    @property
    def output(self) -> str:
        """Of all ranks."""
        return "\n".join(self.outputs)

    @property
    def iterations(self) -> tuple[Iteration, ...]:
        """Those whose line was printed."""
        return tuple(iterations_in(self.output))

    @property
    def evaluations(self) -> list[tuple[str, str]]:
        """Return what was evaluated, e.g. `iteration 5`, and the loss as it was printed."""
        return evaluations_in(self.output)

    @property
    def weights(self) -> tuple[str | None, ...]:
        """A digest of each rank's weights at the end; None of a rank that did not get there."""
        found = [re.search(r"^cpu_run: weights (\w+)$", each, re.M) for each in self.outputs]
        return tuple(digest and digest[1] for digest in found)

    @property
    def imported(self) -> bool:
        """Return True if EnvPipe was imported by any rank."""
        return "cpu_run: envpipe imported" in self.output

    @property
    def phases(self) -> list[str | None]:
        """EnvPipe's, by iteration."""
        return [iteration.phase for iteration in self.iterations]

    @property
    def digits(self) -> tuple[object, ...]:
        """All printed results, for comparison with another run's."""
        return *(iteration.digits for iteration in self.iterations), *self.evaluations

    @property
    def result(self) -> tuple[object, ...]:
        """All that must be the same in a run that computes the same."""
        return self.digits, self.weights


def missing_modules() -> list[str]:
    """Return what Megatron-LM's scripts import unasked and is not installed.

    Its checkpoints wait for ever without psutil. Triton is not among them: `cpu_run` stands in.
    """
    needed = ("torch", "regex", "six", "yaml", "pydantic", "packaging", "psutil")
    return [name for name in needed if importlib.util.find_spec(name) is None]


def run_pretrain(
    checkout: Path,
    args: str,
    folder: Path,
    *,
    nproc: int = 4,
    env: Mapping[str, str] | None = None,
    script: str = "pretrain_gpt.py",
    attached: bool = False,
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
        attached: Run it by `envpipe_megatron.attach`, as in an unpatched checkout.
        timeout_s: After this time the ranks print their stacks, and all are killed.
    """
    program = ["-m", "envpipe_megatron.attach"] if attached else []
    program += [
        str(CPU_RUN),
        str(checkout.resolve() / script),
        *shlex.split(f"{CPU_ARGS} {args}"),
    ]
    imports = [os.environ.get("PYTHONPATH", "")]
    if attached:  # cpu_run, which is the script there, lies elsewhere
        imports.insert(0, str(checkout.resolve()))
    ended = run_ranks(
        program,
        CPU_RUN,
        folder,
        nproc=nproc,
        env={"PYTHONPATH": os.pathsep.join(filter(None, imports)), **(env or {})},
        timeout_s=timeout_s,
    )
    return Run(**vars(ended))


def iterations_in(output: str) -> Iterable[Iteration]:
    """The iterations whose lines are in what the ranks printed."""
    for number, rest in re.findall(r"(?:^|\]) iteration +(\d+)/ +\d+ \|(.*)", output, re.M):
        fields = {}
        for field in rest.split("|"):
            name, _, value = field.partition(":")
            fields[name.strip()] = value.strip()
        yield Iteration(int(number), fields)


def evaluations_in(output: str) -> list[tuple[str, str]]:
    """Return what was evaluated, and its loss."""
    return re.findall(r"validation loss at (.*?) \| lm loss value: (\S+)", output)
