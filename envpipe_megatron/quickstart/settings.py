"""Settings of the quickstart's job. Free of torch: the command imports it."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import replace_files


class QuickstartError(EnvPipeError):
    """A quickstart that cannot start or did not finish."""


@dataclass(frozen=True)
class Settings:
    """The job. Handed from the command to its ranks as a JSON file.

    Args:
        text: a file or folder to train on.
        preset: preset of the emulated GPUs.
        forward_time_s: emulated time at the maximum clock of a forward of the first stage.
        backward_ratio: time of a backward over that of a forward.
        steady_iterations: compared iterations of each run.
    """

    output_dir: str
    text: str
    preset: str = "a100-sxm"
    num_stages: int = 4
    num_layers: int = 8
    hidden_size: int = 64
    num_attention_heads: int = 4
    sequence_length: int = 64
    microbatch_size: int = 2
    num_microbatches: int = 8
    learning_rate: float = 3e-3
    forward_time_s: float = 0.030
    backward_ratio: float = 2.0
    steady_iterations: int = 20
    warmup_iterations: int = 3

    @property
    def model_name(self) -> str:
        """Name of the model in the results."""
        return f"quickstart GPT ({self.num_layers} layers, width {self.hidden_size})"

    @property
    def text_copy(self) -> Path:
        """The text that every rank reads, while the job runs."""
        return Path(self.output_dir) / "text.bin"

    @property
    def minibatch_size(self) -> int:
        """Samples of one iteration."""
        return self.microbatch_size * self.num_microbatches

    @property
    def baseline_iterations(self) -> int:
        """Iterations that the baseline run makes."""
        return self.warmup_iterations + self.steady_iterations

    @property
    def forward_times_s(self) -> list[float]:
        """For each stage, the emulated time of a forward at the maximum clock.

        In proportion to the floating-point operations of the model's layers and output layer
        (Narayanan et al., SC'21, appendix), so that the last stage is as much slower as it is.
        """
        layers = self.num_layers // self.num_stages
        width, length = self.hidden_size, self.sequence_length
        stage = layers * (24 * width**2 + 4 * width * length)
        output_layer = 2 * width * VOCABULARY
        work = [stage] * (self.num_stages - 1) + [stage + output_layer]
        return [self.forward_time_s * operations / stage for operations in work]

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        replace_files({path: [json.dumps(asdict(self), indent=1), "\n"]})

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Read the JSON file."""
        return cls(**json.loads(path.read_text()))


#: Bytes.
VOCABULARY = 256

#: The two runs, as (name, type, scheduling, reconfiguring) in EnvPipe's words.
RUNS = (
    ("baseline", "baseline", "1f1b", "default"),
    ("envpipe", "optimal", "auto", "default"),
)


def check_installed(who: str) -> None:
    """Refuse by a QuickstartError if a package is missing that training needs."""
    for module, package in (("torch", "torch"), ("megatron", "megatron-core")):
        if importlib.util.find_spec(module) is None:
            raise QuickstartError(
                f"{who} needs {package}, which is not installed",
                remedy="pip install 'torch>=2.11' megatron-core==0.16.1, or use make quickstart.",
            )


def load_text(path: Path, least_bytes: int) -> bytes:
    """The bytes of a file, or of all text files below a folder by name; refuse too few."""
    if path.is_dir():
        files = sorted(
            f for f in path.rglob("*") if f.suffix in (".py", ".txt", ".md", ".rst") and f.is_file()
        )
    else:
        files = [path] if path.is_file() else []
    parts: list[bytes] = []
    size = 0
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            if path.is_dir():
                continue  # one unreadable file of many
            raise QuickstartError(f"Cannot read {path}: {error.strerror}") from error
        parts.append(content)
        size += len(content)
        if size > _MOST_BYTES:
            break
    text = b"\n".join(parts)
    if len(text) < least_bytes:
        raise QuickstartError(
            f"Too little text to train on in {path}: {len(text)} bytes",
            remedy=f"Give a file, or a folder of text or Python files, of {least_bytes} bytes.",
        )
    return text


_MOST_BYTES = 20_000_000
