"""`envpipe patch`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

import click

from envpipe_megatron.console import say
from envpipe_megatron.patching.catalog import patch_file
from envpipe_megatron.patching.checkout import (
    Checkout,
    State,
    apply_patch,
    look_at,
    revert_patch,
)
from envpipe_megatron.patching.liveness import Answer, Outcome, ask_hooks

_CHECKOUT = click.argument(
    "directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
#: The patch is in, but a dependency of the framework is missing, so its hooks could not be asked.
_NOT_PROVEN = 3
_MEANING = {
    State.STOCK: "stock: the patch is not applied; run `envpipe patch apply {directory}`",
    State.PATCHED: "patched",
    State.CHANGED_AFTER: "changed-after: the patch is in, and its own lines were changed",
    State.DIRTY: "dirty: not patched, and the patch does not fit",
}


@click.group()
def patch() -> None:
    """Patch a checkout of Megatron-LM or Megatron-DeepSpeed, prove it, and take it back.

    Example:

      envpipe patch apply ~/Megatron-LM
    """


@patch.command()
@_CHECKOUT
@click.option("--tag", help="Take the patch for this tag, as for a fork with its own version.")
def apply(directory: Path, tag: str | None) -> None:
    """Apply the patch for the checkout's version.

    DIR is the root of the checkout, a git clone or an unpacked archive; it may be a fork. Each of
    the patch's hooks goes where `git apply` finds the lines around it; nothing is changed where one
    has no such place. The patch is kept in DIR/.envpipe-patch.json, for `revert`. It needs git;
    `git apply` with the patch file gives the same bytes. Applying twice is no error: the second
    time does nothing, exits 0.

    Example:

      envpipe patch apply ~/Megatron-LM
    """
    found, files = apply_patch(directory, tag=tag)
    if not files:
        say(f"{directory} is patched already ({found.patch.name}). Nothing was done.")
        return
    say(f"Patched {found.patch.name} in {directory}:")
    _list(files)
    _list_forked(found)
    say(f"Now prove that it is live: envpipe patch check {shlex.quote(str(directory))}")


@patch.command()
@_CHECKOUT
def revert(directory: Path) -> None:
    """Take the patch's lines out again; a stock checkout has its released bytes then.

    What else was edited stays. Refused when the patch's own lines were changed. Works too on what
    `git apply` or another version of envpipe patched. A checkout without the patch is no error:
    nothing is done, exits 0.

    Example:

      envpipe patch revert ~/Megatron-LM
    """
    found, files = revert_patch(directory)
    if not files:
        say(f"{directory} is not patched ({found.patch.name}). Nothing was done.")
        return
    say(f"Took the patch for {found.patch.name} out of {directory}:")
    _list(files)


@patch.command()
@_CHECKOUT
@click.pass_context
def check(ctx: click.Context, directory: Path) -> None:
    """Say whether a checkout is patched, and prove that the patch does something.

    The patched modules are imported in a fresh Python that has DIR first on its path, and each hook
    is asked. A module that comes from elsewhere, such as an installed megatron-core, is named with
    its path. Triton, which comes with torch for GPUs, is stood in for where it is missing, as no
    hook calls it. Nothing is written. Run it in the environment that trains.

    Exits 0 when patched and every hook is live; 3 when patched, but a package that the framework
    imports is missing here, so that nothing is proven; 1 otherwise.

    Example:

      envpipe patch check ~/Megatron-LM
    """
    found = look_at(directory)
    patched = found.state in (State.PATCHED, State.CHANGED_AFTER)
    answers = ask_hooks(directory, found.patch.hooks) if patched else ()
    _report(directory, found, answers)
    ctx.exit(_exit_status(found, answers))


def _exit_status(found: Checkout, answers: tuple[Answer, ...]) -> int:
    outcomes = {answer.outcome for answer in answers}
    if found.state is not State.PATCHED or outcomes - {Outcome.LIVE, Outcome.DEPENDENCY}:
        return 1
    return _NOT_PROVEN if Outcome.DEPENDENCY in outcomes else 0


def _list(lines: Iterable[str]) -> None:
    for line in lines:
        say(f"  {line}")


def _list_forked(found: Checkout) -> None:
    if found.forked:
        say("These differ from the released ones, and the patch fits them:")
        _list(sorted(found.forked))


def _report(directory: Path, found: Checkout, answers: tuple[Answer, ...]) -> None:
    meaning = _MEANING[found.state].format(directory=shlex.quote(str(directory)))
    say(f"{directory}: {found.patch.name}, {meaning}")
    _list((f"{path} ({reason})" for path, reason in found.foreign.items()))
    _list_forked(found)
    if file := patch_file(found.patch):
        say(f"The patch, for `git apply` too: {file}")
    else:
        say(
            "The patch in it is another than the one of this version of envpipe. "
            "`envpipe patch revert` and `apply` bring it up to date.",
        )
    shown = {""}
    for answer in answers:
        say(f"{answer.outcome}: {answer.hook}: {answer.detail}")
        if answer.remedy not in shown:
            shown.add(answer.remedy)
            say(f"  {answer.remedy}")
    if names := sorted({name for answer in answers for name in answer.stood_in}):
        say(f"Not installed here, and stood in for, as no hook calls it: {', '.join(names)}")
