"""What is told about a checkout that is in no state to be changed, with the way out of it."""

from __future__ import annotations

import shlex
from pathlib import Path

from envpipe_megatron.patching.catalog import Patch, patch_file
from envpipe_megatron.patching.checkout import FileState, Survey, TreeState
from envpipe_megatron.patching.journal import JOURNAL_NAME, RECORD_NAME
from envpipe_megatron.patching.unified_diff import PatchError

_PRINT_PATCH = "import json, sys; sys.stdout.write(json.load(open(sys.argv[1]))['patch'])"


def git_command(root: Path, patch: Patch, *, reverse: bool = False) -> str:
    """Return the shell command that applies a patch with git alone, or takes it out.

    The patch of another version of this package is read out of the record.
    """
    command = ["git", "-C", str(root), "apply", *(["-R"] if reverse else [])]
    # In a folder of somebody else's clone git would pass over every file, and say nothing.
    alone = "" if (root / ".git").exists() else f"GIT_CEILING_DIRECTORIES={_quoted(root.parent)} "
    if file := patch_file(patch):
        return alone + shlex.join([*command, str(file)])
    record = root / RECORD_NAME
    held = record if record.exists() else root / JOURNAL_NAME
    printing = shlex.join(["python3", "-c", _PRINT_PATCH, str(held)])
    return f"{printing} | {alone}{shlex.join(command)}"


def foreign_files(root: Path, seen: Survey, *, reverting: bool) -> PatchError:
    """Return the refusal of a checkout that has files which are neither stock nor patched."""
    if seen.tree is TreeState.DIRTY:
        what = f"Files differ from those of {seen.patch.name}"
        remedy = _out_of_dirty(seen, reverting)
    else:
        taken_out = (
            "Take your changes out of them and revert, or keep them and take the patch out alone: "
            f"`{git_command(root, seen.patch, reverse=True)}`"
        )
        if seen.recorded:
            what, remedy = f"Files were changed after the patch for {seen.patch.name}", taken_out
        else:
            what = f"Files differ from what the patch for {seen.patch.name} makes"
            remedy = f"{taken_out}. {_ANOTHER_VERSION}"
    if FileState.LINE_ENDS in seen.files.values():
        remedy += ". Git turned line ends into CRLF: set core.autocrlf to false and check out again"
    return PatchError(what, value=list(seen.foreign), remedy=remedy)


_ANOTHER_VERSION = (
    "If another version of the patch was applied by hand, `git apply -R` of that one takes it out"
)


def _out_of_dirty(seen: Survey, reverting: bool) -> str:
    known = (FileState.STOCK, FileState.PATCHED)
    foreign = [file for file in seen.patch.files if seen.files[file.path] not in known]
    in_the_way = [file.path for file in foreign if not file.before]
    commit = seen.patch.commit[:12]
    steps = []
    if len(in_the_way) < len(foreign):
        steps.append(f"put the files of commit {commit} back")
    if in_the_way:
        steps.append(f"move {', '.join(in_the_way)} away, which commit {commit} does not have")
    todo = " and ".join(steps)
    if reverting:
        remedy = f"The patch is not in, so nothing is to be taken out. For the stock files, {todo}"
    else:
        remedy = f"{todo[0].upper()}{todo[1:]}, then apply again"
    return f"{remedy}. {_ANOTHER_VERSION}" if len(steps) > 1 else remedy


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
