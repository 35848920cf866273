"""Every figure and measurement that needs no GPU, one after another, and one table of claims.

    python benchmarks/all.py                      # all, under an hour on two cores
    python benchmarks/all.py fig9_a ablation      # some

A part that fails is told at the end, and the others run all the same. Figures take over the runs
that another figure has already made in the same folder; give a new folder to make all anew.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.claims import CLAIMS_FILE, Claim, read_claims
from benchmarks.figures.experiments import EXPERIMENTS
from envpipe_megatron.quickstart.ranks import ended_like_ctrl_c

_HERE = Path(__file__).resolve().parent
_VERDICTS = {True: "yes", False: "**no**", None: ""}


@dataclass(frozen=True)
class Part:
    """One script.

    Args:
        own_folder: whether it is given its folder, else that of all parts, where it finds its own.
    """

    name: str
    script: str
    options: tuple[str, ...] = ()
    own_folder: bool = True

    def command(self, output: Path) -> list[str]:
        """What runs it, for a folder of all parts."""
        folder = output / self.name if self.own_folder else output
        script = str(_HERE / self.script)
        return [sys.executable, script, *self.options, "--output", str(folder)]


PARTS = (
    *(Part(name, "figures/figure.py", (name,), own_folder=False) for name in EXPERIMENTS),
    Part("ablation", "ablation/ablation.py"),
    Part("overhead", "overhead/overhead.py"),
    Part("planner_compare", "planner/compare.py", ("--lowtime-limit", "0")),
    Part("planner_validation", "planner/validation.py"),
    Part("h200_validation", "planner/h200_validation.py"),
)


@dataclass(frozen=True)
class Ended:
    """How a part ended."""

    part: Part
    seconds: float
    exit_code: int


@click.command()
@click.argument(
    "names", nargs=-1, type=click.Choice([part.name for part in PARTS]), metavar="[PART]..."
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/benchmarks"),
    show_default=True,
    help="Folder for all parts and claims.md.",
)
def main(names: tuple[str, ...], output: Path) -> None:
    """Run all parts, or those named, and collect their claims."""
    console = Console()
    chosen = [part for part in PARTS if not names or part.name in names]
    ended = run(chosen, output, console)
    claims = collect_claims(output, [part.name for part in PARTS])
    (output / "claims.md").write_text(claims_table(claims), encoding="utf-8")
    console.print(_summary(ended))
    console.print(f"{len(claims)} claims are in {output / 'claims.md'}", highlight=False)
    failed = [end.part.name for end in ended if end.exit_code]
    if failed:
        raise click.ClickException(f"Failed: {', '.join(failed)}")


def run(parts: Sequence[Part], output: Path, console: Console) -> list[Ended]:
    """Run parts one after another, whatever becomes of each."""
    output.mkdir(parents=True, exist_ok=True)
    ended = []
    for number, part in enumerate(parts, 1):
        console.rule(f"{part.name} ({number} of {len(parts)})")
        # What an earlier run has claimed is not this one's.
        (output / part.name / CLAIMS_FILE).unlink(missing_ok=True)
        begin_s = time.monotonic()
        code = _exit_code(part.command(output))
        ended.append(Ended(part, time.monotonic() - begin_s, code))
    return ended


def _exit_code(command: list[str]) -> int:
    """Run a command to its end; if this one is interrupted, let it stop what it has started."""
    # A session of its own: Ctrl-C reaches this process alone, which passes it on once.
    with ended_like_ctrl_c(signal.SIGTERM, signal.SIGHUP):
        process = subprocess.Popen(command, start_new_session=True)
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise


def collect_claims(output: Path, names: Iterable[str]) -> list[Claim]:
    """The claims that parts have left, in the order of the parts."""
    paths = [output / name / CLAIMS_FILE for name in names]
    return [claim for path in paths if path.is_file() for claim in read_claims(path)]


def claims_table(claims: Iterable[Claim]) -> str:
    """A Markdown table of all claims, with the command beside each."""
    head = ("part", "seen", "on", "the paper or a rival", "agrees", "command")
    lines = [_line(head), _line(["---"] * len(head))]
    for claim in claims:
        seen = f"{claim.claim}. {claim.why}".rstrip()
        verdict = _VERDICTS[claim.agrees]
        lines.append(
            _line((claim.figure, seen, claim.basis, claim.paper, verdict, f"`{claim.command}`"))
        )
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _summary(ended: Iterable[Ended]) -> Table:
    table = Table(title="Parts")
    table.add_column("part")
    table.add_column("minutes", justify="right")
    table.add_column("ended")
    for end in ended:
        verdict = f"failed (exit code {end.exit_code})" if end.exit_code else "done"
        table.add_row(end.part.name, f"{end.seconds / 60:.1f}", verdict)
    return table


if __name__ == "__main__":
    main()
