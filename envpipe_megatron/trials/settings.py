"""Settings of a small training, the arms that train it, and its text. Free of torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from envpipe_megatron.core.plan import Plan, one_clock_plans
from envpipe_megatron.errors import EnvPipeError


@dataclass(frozen=True)
class Arm:
    """One way to train the same model on the same data.

    Args:
        says: what it does, for people.
        policy: as `PlanRequest` takes it, with `schedule`.
        relock: whether the clock is asked for at every unit, even if it stays: what calls cost.
        changes_clock: without, the GPU is opened for reading only.
        by_framework: whether megatron-core's own function runs its units, on GPUs.
    """

    name: str
    says: str
    policy: str = "baseline"
    schedule: str = "1f1b"
    relock: bool = False
    changes_clock: bool = True
    by_framework: bool = False


BASELINE = Arm("baseline", "1F1B at the highest clock")
ENVPIPE = Arm("envpipe", "order and clocks in a closed loop", policy="optimal", schedule="auto")
#: The arms of a quickstart.
RUNS = (BASELINE, ENVPIPE)

STOCK = Arm(
    "stock", "1F1B by EnvPipe's interpreter, and no call that sets a clock", changes_clock=False
)
RELOCK = Arm(
    "relock",
    "as stock, with the highest clock locked again at every unit: what only the calls cost",
    relock=True,
)
CONSTANT = Arm(
    "constant",
    "1F1B at the one lower clock that should take as much energy as optimal: what any operator "
    "could do",
    policy="uniform",
)
ENVELOPE = Arm(
    "envelope",
    "EnvPipe's own: type envelope, scheduling ours, reconfigure default",
    policy="envelope",
    schedule="ours",
)
OPTIMAL = Arm("optimal", "order and clocks planned together", policy="optimal", schedule="auto")
#: Arms of a proof, in the order of a round. No power profile of the vendor: EnvPipe changes none.
ARMS = (STOCK, RELOCK, CONSTANT, ENVELOPE, OPTIMAL)

WHOLE = replace(
    OPTIMAL, name="whole", says="the shortest order of whole backwards", changes_clock=False
)
SPLIT = replace(WHOLE, name="split", says="the shortest order, backwards split where that pays")
#: The arms of a proof that leaves clocks as they are.
ORDER_ARMS = (
    replace(STOCK, says="megatron-core's own 1F1B; on emulated GPUs as 1f1b", by_framework=True),
    replace(STOCK, name="1f1b", says="the same order by EnvPipe's interpreter"),
    WHOLE,
    SPLIT,
)


def constant_plan(optimal: Plan) -> Plan:
    """Return the framework's own order at one clock, whose energy is nearest to that of a plan.

    Among the clocks that all stages were profiled at, below the highest and down to that of least
    energy: a lower one would be slower and take more.
    """
    _, *plans = one_clock_plans(optimal.baseline)
    least = min(range(len(plans)), key=lambda at: (plans[at].cost.energy_j, -at))
    wanted_j = optimal.cost.energy_j
    # The first of those that are as near: the faster one is the harder rival.
    return min(plans[: least + 1], key=lambda plan: abs(plan.cost.energy_j - wanted_j))


_SUFFIXES, _MOST_BYTES = (".py", ".txt", ".md", ".rst"), 20_000_000


@dataclass(frozen=True)
class Settings:
    """A quickstart or a proof. Handed from the command to its ranks as a JSON file.

    Args:
        text: a file or folder to train on.
        preset: preset of the emulated GPUs; None for this machine's own.
        vocabulary: of the model, whose tokens are bytes.
        forward_time_s: emulated time at the maximum clock of a forward of the first stage; a
            backward takes twice as long.
        warmup_iterations: of each turn, in 1F1B at the highest clock.
        settle_iterations: steady ones after these, in which clocks settle; not measured.
        steady_iterations: measured ones of each turn; None for as many as last `worker.TURN_S`.
        proof: whether it is one: its arms start from a profile, which is measured first.
        rounds: of all arms.
        changes_clocks: whether a proof does; its arms are those of orders otherwise.
    """

    output_dir: str
    text: str
    preset: str | None = "a100-sxm"
    num_stages: int = 4
    num_layers: int = 8
    hidden_size: int = 64
    num_attention_heads: int = 4
    sequence_length: int = 64
    vocabulary: int = 256
    microbatch_size: int = 2
    num_microbatches: int = 8
    learning_rate: float = 3e-3
    forward_time_s: float = 0.030
    warmup_iterations: int = 3
    settle_iterations: int = 1
    steady_iterations: int | None = 20
    proof: bool = False
    rounds: int = 1
    changes_clocks: bool = True

    @property
    def command(self) -> str:
        """The subcommand of `envpipe` whose trial it is."""
        return "prove" if self.proof else "quickstart"

    @property
    def output(self) -> Path:
        """Folder that all is left in."""
        return Path(self.output_dir)

    @property
    def file(self) -> Path:
        """These settings, for the ranks; they mark the folder as one of the command's."""
        return self.output / ("prove.json" if self.proof else "settings.json")

    @property
    def profile_folder(self) -> Path:
        """Folder of the profile that prices the arms' plans."""
        return self.output / "profile" if self.proof else self.output

    def output_of(self, arm: Arm) -> Path:
        """Folder of what an arm records: a run's, which `envpipe report` reads."""
        return self.output if arm == ENVPIPE else self.output / "arms" / arm.name

    @property
    def text_copy(self) -> Path:
        """The text that every rank reads, while the job runs."""
        return self.output / "text.bin"

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The arms of a round, in their order."""
        if not self.proof:
            return RUNS
        return ARMS if self.changes_clocks else ORDER_ARMS

    @property
    def turns(self) -> list[tuple[int, Arm]]:
        """Round, from 0, and arm: every other round goes backwards, so that a drift cancels."""
        arms = self.arms
        return [(n, arm) for n in range(self.rounds) for arm in (arms, arms[::-1])[n % 2]]

    @property
    def forward_times_s(self) -> list[float]:
        """For each stage, the emulated time of a forward at the maximum clock.

        In proportion to the floating-point operations of the model's layers and output layer
        (Narayanan et al., SC'21, appendix), so that the last stage is as much slower as it is.
        """
        layers = self.num_layers // self.num_stages
        width, length = self.hidden_size, self.sequence_length
        stage = layers * (24 * width**2 + 4 * width * length)
        output_layer = 2 * width * self.vocabulary
        work = [stage] * (self.num_stages - 1) + [stage + output_layer]
        return [self.forward_time_s * operations / stage for operations in work]

    def as_proof(self, rounds: int, iterations: int | None, *, changes_clocks: bool) -> Settings:
        """Return a proof with this model, of `iterations` measured ones a turn."""
        return replace(
            self, proof=True, rounds=rounds, changes_clocks=changes_clocks, warmup_iterations=2,
            steady_iterations=iterations,
        )  # fmt: skip

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Read the JSON file, which has all fields by name."""
        return cls(**json.loads(path.read_text()))


def gpt_for_gpus(output_dir: str, text: str, num_stages: int) -> Settings:
    """Return a GPT whose units last longer than clocks settle: tens of ms on a large GPU.

    On two GPUs an iteration takes 1.7 s of H200s.
    """
    return Settings(
        output_dir,
        text,
        preset=None,
        num_stages=num_stages,
        num_layers=4 * num_stages,
        hidden_size=4096,
        num_attention_heads=32,
        sequence_length=1024,
        microbatch_size=max(4, 16 // num_stages),  # as few as deep pipelines have memory for
        num_microbatches=4 * num_stages,
        learning_rate=1e-4,
    )


def load_text(path: Path, least_bytes: int) -> bytes:
    """Return the bytes of a file, or of all text files below a folder by name; refuse too few."""
    parts: list[bytes] = []
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        wanted = file == path or file.suffix in _SUFFIXES
        if not (wanted and file.is_file()) or sum(map(len, parts)) > _MOST_BYTES:
            continue
        try:
            parts.append(file.read_bytes())
        except OSError as error:
            if file == path:
                raise EnvPipeError(f"Cannot read {path}: {error.strerror}") from error
            continue  # one unreadable file of many
    text = b"\n".join(parts)
    if len(text) < least_bytes:
        raise EnvPipeError(
            f"Too little text to train on in {path}: {len(text)} bytes",
            remedy=f"Give a file, or a folder of text or Python files, of {least_bytes} bytes.",
        )
    return text
