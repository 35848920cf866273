"""Every figure and measurement that needs no GPU; each leaves its rows of evidence.

    python benchmarks/all.py                      # all, under an hour on two cores
    python benchmarks/all.py fig9_a overhead      # some

If a part fails, the others still run, and its name is printed at the end. Figures take over the
runs that another figure has already made in the same folder; give a new folder to make all anew.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import click
from rich.console import Console

from benchmarks.figures.experiments import EXPERIMENTS
from benchmarks.outputs import ROWS_FILE, make_table
from envpipe_megatron.child import Signals

_HERE = Path(__file__).resolve().parent

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
    help="Folder for all parts.",
)
def main(names: tuple[str, ...], output: Path) -> None:
    """Run all parts, or those named."""
    console = Console()
    output.mkdir(parents=True, exist_ok=True)
    ended = []
    for name in names or PARTS:
        console.rule(name)
        # The rows of an earlier run are not this one's.
        (output / name / ROWS_FILE).unlink(missing_ok=True)
        begin_s = time.monotonic()
        code = _exit_code(command_of(name, output))
        minutes = (time.monotonic() - begin_s) / 60
        ended.append({"part": name, "minutes": round(minutes, 1), "exit code": code})
    console.print(make_table("Parts", ended))
    failed = [str(end["part"]) for end in ended if end["exit code"]]
    if failed:
        raise click.ClickException(f"Failed: {', '.join(failed)}")


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


if __name__ == "__main__":
    main()
