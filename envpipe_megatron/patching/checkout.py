"""Reads what a checkout holds of a patch, applies the patch, and takes it out.

`git apply` says of each file whether the patch is in it, or fits, and makes its other content. It
works on a copy: in a checkout it would leave half of a patch where a folder is closed, cut files
off where the disk is full, and do nothing in a folder of another repository.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import replace_files
from envpipe_megatron.patching.catalog import (
    Patch,
    PatchError,
    load_catalog,
    patch_file,
    read_patch,
    sha256,
)

#: Keeps the patch in the checkout, for a version of this package that has another one.
RECORD_NAME = ".envpipe-patch.json"
_RECORD_FORMAT = "envpipe-patch-record/1"
#: Lines of ours name it, also those of another version's patch.
_OUR_NAME = b"envpipe"


class GitError(EnvPipeError):
    """`git apply` can't be run on this machine."""


class State(StrEnum):
    """State of a checkout."""

    STOCK = "stock"
    PATCHED = "patched"
    CHANGED_AFTER = "changed-after"
    DIRTY = "dirty"


@dataclass(frozen=True)
class Checkout:
    """A checkout as a patch sees it.

    Attributes:
        root: its folder, without symbolic links.
        patch: the patch that is in it, or else the one for its version.
        forked: paths of the files that are neither the released nor the patched ones.
        foreign: why each file does not fit that does not.
        other: contents of the files with the patch in if it is out, and out if it is in; None for
            no file.
    """

    root: Path
    patch: Patch
    state: State
    forked: set[str]
    foreign: dict[str, str]
    other: dict[str, bytes | None]


def look_at(directory: Path, tag: str | None = None) -> Checkout:
    """Read what a checkout holds; the arguments are those of `apply_patch`.

    Raises:
        PatchError: no patch is for this version; the record is damaged; a file is reached through
            a symbolic link, so that it belongs elsewhere.
        GitError: there is no git.
    """
    catalog = load_catalog()
    root = directory.resolve()
    recorded = _read_record(root / RECORD_NAME)
    if recorded is not None:
        held = _compared(root, recorded)
        # It may be out by other means. The version may have been edited: it decides only in doubt.
        is_changed = held.state is State.CHANGED_AFTER
        if held.state is State.PATCHED or (is_changed and recorded.recognition.fits(root)):
            return held
    own = [p for p in catalog if (p.recognition.fits(root) if tag is None else p.tag == tag)]
    # Branches are between versions: their files decide which patch is theirs.
    found = [_compared(root, patch) for patch in (own if own and tag is not None else catalog)]
    found.sort(key=lambda f: (bool(f.foreign), f.patch not in own, len(f.foreign), len(f.forked)))
    if not own:
        raise _no_patch(root, tag, found)
    return found[0]


def apply_patch(directory: Path, tag: str | None = None) -> tuple[Checkout, tuple[str, ...]]:
    """Bring a checkout from stock to patched.

    Args:
        directory: root of the checkout.
        tag: take the patch of this tag, even if the checkout says it is of another version.

    Returns:
        The checkout before, and the paths of the files that were changed or made.

    Raises:
        PatchError: as `look_at`; the patch does not fit, or another version of it is in.
        GitError: there is no git.
        OSError: the checkout can't be written; it is then as it was, or changed in part.
    """
    found = look_at(directory, tag)
    if patch_file(found.patch) is None:
        raise PatchError(
            f"Another version of the patch for {found.patch.name} is in this checkout",
            value=str(found.root),
            remedy="Run `envpipe patch revert` first, then apply again",
        )
    if found.foreign:
        raise does_not_fit(found)
    if found.state is State.PATCHED:
        return found, ()
    _write(found.root, {RECORD_NAME: _record_of(found.patch), **found.other})
    return found, tuple(found.other)


def revert_patch(directory: Path) -> tuple[Checkout, tuple[str, ...]]:
    """Take the patch's lines out of a checkout, and leave all else that was edited.

    The patch is read from the record in the checkout if there is one, so that a checkout which
    another version of this package patched can be reverted too. Returns and raises as
    `apply_patch`; PatchError even if the patch's own lines were changed.
    """
    found = look_at(directory)
    if found.state is State.CHANGED_AFTER:
        raise does_not_fit(found)
    contents = found.other
    if found.state is not State.PATCHED:
        contents = dict.fromkeys(_new_files_left(found.root, found.patch))
    if contents or (found.root / RECORD_NAME).exists():
        _write(found.root, {**contents, RECORD_NAME: None})
    return found, tuple(contents)


def does_not_fit(found: Checkout) -> PatchError:
    """Return the error that names a checkout's foreign files, and what to do."""
    back = f"ut the files of commit {found.patch.commit[:12]} back"
    if found.state is State.CHANGED_AFTER:
        what = "is in, and its own lines or files were changed"
        remedy = (
            f"Undo these changes, or p{back}. If another version of the patch was applied by hand, "
            "`git apply -R` of that one takes it out"
        )
    else:
        what = "does not fit"
        remedy = f"P{back}, then apply again"
        if new := [path for path in found.foreign if not found.patch.hashes[path][0]]:
            remedy = f"Move {', '.join(new)} away. {remedy}"
    if any("CRLF" in reason for reason in found.foreign.values()):
        remedy += ". Git turned line ends into CRLF: set core.autocrlf to false and check out again"
    files = [f"{path} ({reason})" for path, reason in found.foreign.items()]
    return PatchError(f"The patch for {found.patch.name} {what}", value=files, remedy=remedy)


def git_apply(
    patch: Patch, files: dict[str, bytes | None], *flags: str
) -> tuple[dict[str, bytes | None], dict[str, str]]:
    """Return what `git apply` makes of files, and why each does not fit that does not.

    None is no file, before and after. Neither settings nor a repository around it count. Raises
    GitError if there is no git that runs, or no room for copies of the files.
    """
    command = ["git", "apply", "--whitespace=nowarn", *flags]
    command += [f"--include={path}" for path in files]
    try:
        with tempfile.TemporaryDirectory() as folder:
            for path, content in files.items():
                Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
                if content is not None:
                    Path(folder, path).write_bytes(content)
            settings = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
            settings |= {"HOME": folder, "XDG_CONFIG_HOME": folder, "GIT_CONFIG_NOSYSTEM": "1"}
            settings |= {"GIT_DIR": os.devnull, "GIT_ATTR_NOSYSTEM": "1", "LC_ALL": "C"}
            done = subprocess.run(
                command, input=patch.text, cwd=folder, env=settings, capture_output=True
            )
            after = {path: _content(Path(folder, path)) for path in files}
    except OSError as error:
        raise _cannot_run(error) from error
    said = done.stderr.decode(errors="replace")
    reasons: dict[str, str] = {}
    for failed, path, reason in re.findall(r"(?m)^error: (patch failed: )?(.+?): ?(.+)$", said):
        if path in files:
            reasons.setdefault(path, f"no place for the lines near {reason}" if failed else reason)
    if done.returncode and not reasons:  # a library that git needs is missing, say
        raise _cannot_run(said.strip() or f"status {done.returncode}")
    return after, reasons


def _cannot_run(why: object) -> GitError:
    return GitError(
        f"EnvPipe patches by `git apply`, which cannot be run: {why}",
        remedy="Install git, or run `envpipe patch apply` on a machine that has it",
    )


def _compared(root: Path, patch: Patch) -> Checkout:
    """Compare a checkout's files with a patch."""
    for path in patch.hashes:
        if (place := (root / path).resolve()) != root / path:
            raise PatchError(
                f"{path} is reached through a symbolic link and belongs to another folder",
                value=str(place),
                remedy="Patch the checkout that the file lies in",
            )
    files = {path: _content(root / path) for path in patch.hashes}
    state = State.PATCHED
    other, reasons = git_apply(patch, files, "-R")
    if reasons:
        if any(_OUR_NAME in (files[path] or b"") for path, (old, _) in patch.hashes.items() if old):
            state = State.CHANGED_AFTER
        else:
            left = dict.fromkeys(_new_files_left(root, patch))
            other, reasons = git_apply(patch, files | left)
            state = State.DIRTY if reasons else State.STOCK
    foreign = {}
    for path, reason in reasons.items():
        content = files[path]
        of_unix = content and content.replace(b"\r\n", b"\n")
        if of_unix != content and sha256(of_unix) in patch.hashes[path]:
            reason = "every line ends in CRLF"
        foreign[path] = "missing" if content is None else f"changed: {reason}"
    forked = {path for path in files if sha256(files[path]) not in patch.hashes[path]}
    forked -= set(foreign)
    return Checkout(root, patch, state, forked, foreign, other)


def _new_files_left(root: Path, patch: Patch) -> list[str]:
    """Return the patch's new files that are there: they may be, where the others were put back."""
    ends = patch.hashes.items()
    return [path for path, end in ends if end == ("", sha256(_content(root / path)))]


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.exists() else None


def _write(root: Path, contents: dict[str, bytes | None]) -> None:
    """Put new contents in place, the first last; then remove what has none."""
    replace_files({root / path: new for path, new in contents.items() if new is not None})
    for path, content in contents.items():
        if content is None:
            (root / path).unlink(missing_ok=True)


def _record_of(patch: Patch) -> bytes:
    text = patch.text.decode("utf-8", "surrogateescape")
    record = {"format": _RECORD_FORMAT, "description": patch.description, "patch": text}
    return json.dumps(record, indent=1).encode() + b"\n"


def _read_record(file: Path) -> Patch | None:
    """Return the patch that a record holds, None without a record; PatchError if damaged."""
    if not file.exists():
        return None
    try:
        record = json.loads(file.read_bytes())
        if record["format"] != _RECORD_FORMAT:
            raise ValueError(f"its format is {record['format']}")
        text = record["patch"].encode("utf-8", "surrogateescape")
        return read_patch(record["description"], text)
    except Exception as error:  # of any kind: the file may hold anything
        raise PatchError(
            f"{file} is damaged, or of a newer version: {error}",
            remedy="Remove it; the patch is known by the checkout's files too",
        ) from error


def _no_patch(root: Path, tag: str | None, nearest_first: Sequence[Checkout]) -> PatchError:
    """Return the error that says what is supported, and what version a checkout says it is."""
    patches = [found.patch for found in nearest_first]
    names = ", ".join(f"{patch.name} (commit {patch.commit[:7]})" for patch in patches)
    remedy = f"Supported, the nearest first: {names or 'none, this installation has no patches'}"
    if tag is not None:
        return PatchError("There is no patch for this tag", value=tag, remedy=remedy)
    seen = []
    for known in {patch.recognition.file: patch.recognition for patch in patches}.values():
        if (root / known.file).is_file():
            found = known.constants_in(root / known.file)
            version = ", ".join(f"{name} = {value!r}" for name, value in found.items())
            seen.append(f"its {known.file} " + (f"says {version}" if version else "is another"))
    if seen:
        what = f"No patch is for this version ({'; '.join(seen)})"
        remedy += ". For a fork of one of them, give its tag with --tag"
    else:
        what = "This is no checkout of a supported project"
        remedy = f"Give the root folder of the checkout. {remedy}"
    return PatchError(what, value=str(root), remedy=remedy)
