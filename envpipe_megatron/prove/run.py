"""The command of a proof: looks at the machine, starts the ranks, and keeps what they tell."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from envpipe_megatron.console import say
from envpipe_megatron.files import clear_own_folder
from envpipe_megatron.gpu.base import FORBID_VARIABLE
from envpipe_megatron.prove.results import EMULATED, FILES, FOLDERS, Proof, line_to_paste
from envpipe_megatron.prove.settings import ARMS, Machine, ProveError, ProveSettings
from envpipe_megatron.quickstart.ranks import rank_environment, running_ranks
from envpipe_megatron.quickstart.settings import check_installed, load_text


def run_prove(
    settings: ProveSettings,
    machine: Machine,
    checks: Sequence[Mapping[str, Any]],
    console: Console,
) -> None:
    """Measure and train all rounds, and leave claims, page and data in the output folder.

    Args:
        settings: what to do.
        machine: as `settings.real_machine` or `emulated_machine` found it to be fit for it.
        checks: doctor's, for the page.
        console: for progress and the line to paste.

    Raises ProveError for arms that trained differently, or turns that are missing; EnvPipeError for
    a rank that failed, too little text, a package missing, or a folder with other files;
    KeyboardInterrupt on Ctrl-C, SIGTERM or a closed terminal. Clocks are reset, and what was
    measured until then is kept.
    """
    output, job = settings.output, settings.job
    content = load_text(Path(job.text), 100 * job.sequence_length)
    check_installed("A proof")
    clear_own_folder(output, FILES, FOLDERS, "proof")
    settings.write(output / FILES[0])
    job.text_copy.write_bytes(content)
    gpus = f"{job.num_stages} x {machine.gpu_names[0]}"
    say(console, f"Training a GPT on {gpus}: {settings.rounds} rounds of {len(ARMS)} arms")
    if machine.missing:
        say(console, f"No clock is changed: {machine.missing}")
    proof = Proof(settings, machine, checks)
    try:
        _train(proof, console)
    except KeyboardInterrupt:
        say(console, f"Interrupted: clocks are reset, what was measured is in {output}.")
        raise
    finally:
        job.text_copy.unlink(missing_ok=True)
        claims = proof.write()
    if not proof.complete:
        raise ProveError(
            "The ranks ended without reporting all turns",
            remedy=f"Look for the reason in {output / 'log.txt'}.",
        )
    say(console, line_to_paste(claims, machine, proof.turns))
    say(console, f"The page is {output / 'index.html'}, the claims are in claims.json beside it.")
    if any(claim.name.endswith("_equal") and claim.holds is False for claim in claims):
        raise ProveError(
            "Arms trained differently, which EnvPipe must never cause",
            remedy=f"Please report this with the files in {output}.",
        )


def _train(proof: Proof, console: Console) -> None:
    settings = proof.settings
    emulated, log_path = settings.output / EMULATED, settings.output / "log.txt"
    program = ["--module", "envpipe_megatron.prove.worker", str(settings.output / FILES[0])]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    environment = _environment(settings, emulated)
    with (
        Progress(*columns, console=console) as progress,
        running_ranks(settings.job.num_stages, program, environment, log_path, emulated) as events,
    ):
        turns = progress.add_task("turns", total=settings.rounds * len(ARMS))
        for event in events:
            proof.take(event)
            if event["event"] == "say":
                progress.console.print(event["text"], highlight=False, markup=False, style="dim")
            progress.update(turns, completed=len(proof.turns))


def _environment(settings: ProveSettings, emulated: Path) -> dict[str, str]:
    """The ranks': a dry run forbids what it must not do, whatever else goes wrong."""
    forbidden = {FORBID_VARIABLE: "1"} if settings.dry_run else {}
    return {
        **rank_environment(emulated),
        # What torch needs for matrix products that give the same bits each time.
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        **forbidden,
    }
