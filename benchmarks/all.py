"""Every figure and measurement that claims something without a GPU, and one table of claims.

    python benchmarks/all.py                      # all, under an hour on two cores
    python benchmarks/all.py fig9_a overhead      # some
    python -m benchmarks.all --list               # all commands, those on GPUs too

If a part fails, the others still run, and its name is printed at the end. Figures take over the
runs that another figure has already made in the same folder; give a new folder to make all anew.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
from rich.console import Console

from benchmarks.figures.experiments import EXPERIMENTS
from benchmarks.outputs import CLAIMS_FILE, Claim, make_table, markdown_table, read_claims
from envpipe_megatron.launch.signals import Signals

_HERE = Path(__file__).resolve().parent
_VERDICTS = {True: "yes", False: "**no**", None: ""}

#: Each part's name, which is its folder's, with its script and options.
PARTS: dict[str, tuple[str, ...]] = {
    **{name: ("figures/figure.py", name) for name in EXPERIMENTS},
    "overhead": ("overhead/overhead.py",),
    "schedules": ("schedules/pictures.py",),
    "families": ("schedules/families.py",),
    "planner_compare": ("planner/compare.py", "--lowtime-limit", "0"),
    "power_caps": ("planner/power_caps.py",),
    "planner_validation": ("planner/validation.py",),
    "h200_validation": ("planner/h200_validation.py",),
    "search_aceso": ("search/aceso.py",),
    "search_sailor": ("search/sailor.py",),
    "search_scale": ("search/scale.py",),
}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(PARTS)), metavar="[PART]...")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/benchmarks"),
    show_default=True,
    help="Folder for all parts and claims.md.",
)
@click.option("--list", "listed", is_flag=True, help="Only list all commands, with what they show.")
def main(names: tuple[str, ...], output: Path, listed: bool) -> None:
    """Run all parts, or those named, and collect their claims."""
    console = Console()
    if listed:
        console.print("\n".join(commands()), highlight=False, markup=False, soft_wrap=True)
        return
    output.mkdir(parents=True, exist_ok=True)
    ended = []
    for name in names or PARTS:
        console.rule(name)
        # What an earlier run has claimed is not this one's.
        (output / name / CLAIMS_FILE).unlink(missing_ok=True)
        begin_s = time.monotonic()
        code = _exit_code(command_of(name, output))
        minutes = (time.monotonic() - begin_s) / 60
        ended.append({"part": name, "minutes": round(minutes, 1), "exit code": code})
    claims = collect_claims(output, PARTS)
    (output / "claims.md").write_text(claims_table(claims), encoding="utf-8")
    console.print(make_table("Parts", ended))
    console.print(f"{len(claims)} claims are in {output / 'claims.md'}", highlight=False)
    failed = [str(end["part"]) for end in ended if end["exit code"]]
    if failed:
        raise click.ClickException(f"Failed: {', '.join(failed)}")


def commands() -> Iterator[str]:
    """Return each command below benchmarks/, those that others start too, by its first line."""
    for path in sorted(_HERE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if "__main__" in ast.unparse(tree.body[-1]):
            module = ".".join(path.relative_to(_HERE.parent).with_suffix("").parts)
            yield f"python -m {module}: {(ast.get_docstring(tree) or '').partition(chr(10))[0]}"


def command_of(name: str, output: Path) -> list[str]:
    """What runs a part, for a folder of all parts, in which figures find each other's runs."""
    script, *options = PARTS[name]
    folder = output if name in EXPERIMENTS else output / name
    return [sys.executable, str(_HERE / script), *options, "--output", str(folder)]


def _exit_code(command: list[str]) -> int:
    """Run a command to its end; if this one is interrupted, let it stop what it has started."""
    # In another session: Ctrl-C reaches this process only, which passes it on once.
    with Signals() as signals:
        process = subprocess.Popen(command, start_new_session=True)
        signals.call(process.terminate, process.kill)
        code = process.wait()
    if signals.arrived:
        raise KeyboardInterrupt
    return code


def collect_claims(output: Path, names: Iterable[str]) -> list[Claim]:
    """The claims that parts have left, in the order of the parts."""
    return [claim for name in names for claim in read_claims(output / name)]


def claims_table(claims: Iterable[Claim]) -> str:
    """A Markdown table of all claims, with the command beside each."""
    head = ("part", "seen", "on", "the paper or a rival", "agrees", "command")
    rows = (
        (
            claim.figure,
            f"{claim.claim}. {claim.why}".rstrip(),
            claim.basis,
            claim.paper,
            _VERDICTS[claim.agrees],
            f"`{claim.command}`",
        )
        for claim in claims
    )
    return markdown_table(head, rows) + "\n"


if __name__ == "__main__":
    main()
