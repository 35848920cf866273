"""`envpipe patch`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from envpipe_megatron.cli.common import say
from envpipe_megatron.patching.catalog import patch_file
from envpipe_megatron.patching.checkout import TreeState
from envpipe_megatron.patching.liveness import Answer, Outcome, ask_hooks
from envpipe_megatron.patching.operations import Status, apply_patch, revert_patch, status

FORMAT = "envpipe-patch-check/1"
_CHECKOUT = click.argument(
    "directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
#: The patch is in, but a dependency of the framework is missing, so its hooks could not be asked.
_NOT_PROVEN = 3
_MEANING = {
    TreeState.STOCK: "stock: the patch is not applied; run `envpipe patch apply {directory}`",
    TreeState.PATCHED: "patched",
    TreeState.HALF_PATCHED: (
        "half-patched: some files are stock, others patched. "
        "`envpipe patch apply {directory}` or `revert` completes it"
    ),
    TreeState.CHANGED_AFTER: "changed-after: the patch is in, and files differ from what it makes",
    TreeState.DIRTY: "dirty: not patched, and files differ from the released ones",
}

_WORDS = {
    Outcome.LIVE: "live",
    Outcome.NOT_LIVE: "NOT LIVE",
    Outcome.ELSEWHERE: "NOT LIVE, comes from elsewhere",
    Outcome.DEPENDENCY: "not proven, the framework needs a package",
    Outcome.IMPORT_FAILED: "NOT LIVE, import failed",
}


@click.group()
def patch() -> None:
    """Patch a checkout of Megatron-LM or Megatron-DeepSpeed, prove it, and take it back.

    Example:

      envpipe patch apply ~/Megatron-LM
    """


@patch.command()
@_CHECKOUT
def apply(directory: Path) -> None:
    """Apply the patch for the checkout's version.

    DIR is the root of the checkout, a git clone or an unpacked archive. A version without a patch
    is refused with the list of those that have one, and so is a checkout with changes of its own.
    It needs no git; `git apply` with the patch file gives the same bytes. What was done is written
    to DIR/.envpipe-patch.json. Applying twice is no error: the second time does nothing, exits 0.

    Example:

      envpipe patch apply ~/Megatron-LM
    """
    outcome = apply_patch(directory)
    console = Console()
    if not outcome.files:
        say(console, f"{directory} is patched already ({outcome.patch.name}). Nothing was done.")
        return
    completed = outcome.before is TreeState.HALF_PATCHED
    verb = "Completed the patch for" if completed else "Patched"
    say(console, f"{verb} {outcome.patch.name} in {directory}:")
    _list(console, outcome.files)
    say(console, f"Now prove that it is live: envpipe patch check {shlex.quote(str(directory))}")


@patch.command()
@_CHECKOUT
def revert(directory: Path) -> None:
    """Take the patch back: the checkout has its released bytes again.

    Refused when a patched file was changed afterwards. Works too on what `git apply` patched, on
    what another version of envpipe patched, and on what was stopped halfway. A checkout without
    the patch is no error: nothing is done, exits 0.

    Example:

      envpipe patch revert ~/Megatron-LM
    """
    outcome = revert_patch(directory)
    console = Console()
    if not outcome.files:
        say(console, f"{directory} is not patched ({outcome.patch.name}). Nothing was done.")
        return
    say(console, f"Took the patch for {outcome.patch.name} out of {directory}:")
    _list(console, outcome.files)


@patch.command()
@_CHECKOUT
@click.option("--json", "as_json", is_flag=True, help="Print the answers as JSON.")
@click.pass_context
def check(ctx: click.Context, directory: Path, as_json: bool) -> None:
    """Say whether a checkout is patched, and prove that the patch does something.

    The patched modules are imported in a fresh Python that has DIR first on its path, and each hook
    is asked. A module that comes from elsewhere, such as an installed megatron-core, is named with
    its path. Nothing is written. Run it in the environment that trains.

    Exits 0 when patched and every hook is live; 3 when patched, but a package that the framework
    imports is missing here, so that nothing is proven; 1 otherwise.

    Example:

      envpipe patch check ~/Megatron-LM
    """
    found = status(directory)
    patched = found.seen.tree in (TreeState.PATCHED, TreeState.CHANGED_AFTER)
    answers = ask_hooks(directory, found.seen.patch.hooks, found.seen.patch.tag) if patched else ()
    if as_json:
        click.echo(json.dumps(_facts(found, answers), indent=1))
    else:
        _report(Console(), directory, found, answers)
    ctx.exit(_exit_status(found, answers))


def _exit_status(found: Status, answers: tuple[Answer, ...]) -> int:
    outcomes = {answer.outcome for answer in answers}
    if found.seen.tree is not TreeState.PATCHED or outcomes - {Outcome.LIVE, Outcome.DEPENDENCY}:
        return 1
    return _NOT_PROVEN if Outcome.DEPENDENCY in outcomes else 0


def _list(console: Console, files: tuple[str, ...]) -> None:
    for file in files:
        say(console, f"  {file}")


def _report(console: Console, directory: Path, found: Status, answers: tuple[Answer, ...]) -> None:
    meaning = _MEANING[found.seen.tree].format(directory=shlex.quote(str(directory)))
    say(console, f"{directory}: {found.seen.patch.name}, {meaning}")
    _list(console, found.seen.foreign)
    if file := patch_file(found.seen.patch):
        say(console, f"The patch, for `git apply` too: {file}")
    if found.superseded:
        say(
            console,
            "The patch in it is another than the one of this version of envpipe. "
            "`envpipe patch revert` and `apply` bring it up to date.",
        )
    if found.interrupted:
        say(
            console,
            "A change of it is going on, or was stopped. "
            "`envpipe patch apply` or `revert` completes it.",
        )
    asked = {""}
    for answer in answers:
        hook = f"{answer.hook.module}.{answer.hook.attribute}"
        say(console, f"{_WORDS[answer.outcome]}: {hook}: {answer.detail}")
        if answer.remedy not in asked:
            asked.add(answer.remedy)
            say(console, f"  {answer.remedy}")


def _facts(found: Status, answers: tuple[Answer, ...]) -> dict[str, Any]:
    patch = found.seen.patch
    return {
        "format": FORMAT,
        "project": patch.project,
        "tag": patch.tag,
        "commit": patch.commit,
        "patch_sha256": patch.sha256,
        "patch_file": None if (file := patch_file(patch)) is None else str(file),
        "state": found.seen.tree,
        "recorded": found.recorded,
        "interrupted": found.interrupted,
        "superseded": found.superseded,
        "files": [
            {"path": path, "state": state.partition(":")[0]}
            for path, state in found.seen.files.items()
        ],
        "hooks": [
            {
                "module": answer.hook.module,
                "attribute": answer.hook.attribute,
                "outcome": answer.outcome,
                "detail": answer.detail,
                "remedy": answer.remedy,
            }
            for answer in answers
        ],
        "live": _exit_status(found, answers) == 0,
    }
