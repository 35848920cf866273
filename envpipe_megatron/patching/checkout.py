"""How a checkout stands: its version, the patch in it, and what each touched file holds.

A file's own lines say whether the patch is in it. So a change that was stopped between two files,
and a patch that `git apply` put in or took out, are known without further notes. The record keeps
the patch itself, for a later version of this package that has another one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from envpipe_megatron import __version__
from envpipe_megatron.patching.catalog import (
    FilePatch,
    Patch,
    PatchError,
    load_catalog,
    read_patch,
    sha256,
)

RECORD_NAME = ".envpipe-patch.json"
_RECORD_FORMAT = "envpipe-patch-record/1"
#: Lines of ours name it, also those of another version's patch.
_OUR_NAME = b"envpipe"


class FileState(StrEnum):
    """State of a touched file."""

    STOCK = "stock"
    PATCHED = "patched"
    CHANGED = "changed"
    MISSING = "missing"

    @property
    def is_known(self) -> bool:
        """The patch is in, or can go in."""
        return self in (FileState.STOCK, FileState.PATCHED)


class TreeState(StrEnum):
    """State of all touched files together."""

    STOCK = "stock"
    PATCHED = "patched"
    HALF_PATCHED = "half-patched"
    CHANGED_AFTER = "changed-after"
    DIRTY = "dirty"


@dataclass(frozen=True)
class TouchedFile:
    """A file of the checkout that the patch changes or makes.

    Attributes:
        content: None if there is no file.
        released: it is the released file, or that one patched; in a fork it need not be.
        problem: why the patch neither is in nor can go in; empty elsewhere.
    """

    change: FilePatch
    content: bytes | None
    state: FileState
    released: bool
    problem: str = ""

    @property
    def shown(self) -> str:
        """The path, and what is wrong with it."""
        reason = f": {self.problem}" if self.problem else ""
        return f"{self.change.path} ({self.state}{reason})"


@dataclass(frozen=True)
class Checkout:
    """A checkout as a patch sees it.

    Attributes:
        root: its folder, without symbolic links.
        patch: the patch that is in it, or else the one for its version.
        recorded: the checkout has a record of a patch.
        superseded: the patch is not the one that this package has for the version.
    """

    root: Path
    patch: Patch
    files: tuple[TouchedFile, ...]
    recorded: bool
    superseded: bool

    @property
    def tree(self) -> TreeState:
        """The state of the checkout."""
        states = {file.state for file in self.files}
        if all(state.is_known for state in states):
            return TreeState(states.pop()) if len(states) == 1 else TreeState.HALF_PATCHED
        ours = any(
            file.state is FileState.PATCHED
            or (not file.change.is_new and _OUR_NAME in (file.content or b""))
            for file in self.files
        )
        return TreeState.CHANGED_AFTER if ours else TreeState.DIRTY

    @property
    def foreign(self) -> tuple[TouchedFile, ...]:
        """The files that the patch neither is in nor can go in."""
        return tuple(file for file in self.files if not file.state.is_known)

    @property
    def forked(self) -> tuple[str, ...]:
        """Paths of the files that differ from the released ones, while the patch fits."""
        return tuple(
            file.change.path for file in self.files if file.state.is_known and not file.released
        )


def look_at(
    directory: Path, catalog: Sequence[Patch] | None = None, tag: str | None = None
) -> Checkout:
    """Read how a checkout stands; the arguments are those of `change.apply_patch`.

    Raises:
        PatchError: no patch is for this version; the record is damaged; a file is reached through
            a symbolic link, so that it belongs elsewhere.
    """
    catalog = load_catalog() if catalog is None else catalog
    root = directory.resolve()
    record = _read_record(root / RECORD_NAME)

    def seen(patch: Patch) -> Checkout:
        known = patch.sha256 in {known.sha256 for known in catalog}
        files = tuple(_touched(root, patch, change) for change in patch.files)
        return Checkout(root, patch, files, record is not None, superseded=not known)

    if record is not None and _holds(held := seen(record)):
        return held
    if tag is None:
        chosen = [patch for patch in catalog if patch.recognition.fits(root)]
        if not chosen:
            raise _unknown(root, catalog)
    else:
        chosen = [patch for patch in catalog if patch.tag == tag]
        if not chosen:
            raise PatchError(
                "There is no patch for this tag", value=tag, remedy=_supported(catalog)
            )
    # Where several tags call themselves the same version, the files decide.
    return min(map(seen, chosen), key=lambda found: (len(found.foreign), len(found.forked)))


def _read_record(file: Path) -> Patch | None:
    """Return the patch that a record holds, None without a record; PatchError if damaged."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    try:
        document = json.loads(content)
        if document["format"] != _RECORD_FORMAT:
            raise PatchError(
                f"{file} is of an unknown format",
                value=document["format"],
                remedy="Use the version of envpipe that wrote it",
            )
        text = document["patch"].encode("utf-8", "surrogateescape")
        return read_patch(document["description"], text)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PatchError(
            f"{file} is damaged: {error}",
            remedy="Remove it; the patch is known by the checkout's files too",
        ) from error


def record_of(patch: Patch) -> bytes:
    """Return the content of a patch's record."""
    document = {
        "format": _RECORD_FORMAT,
        "envpipe_megatron": __version__,
        "project": patch.project,
        "tag": patch.tag,
        "patch_sha256": patch.sha256,
        "files": [
            {"path": path, "sha256_before": before or None, "sha256_after": after}
            for path, (before, after) in patch.hashes.items()
        ],
        "description": patch.description,
        "patch": patch.text.decode("utf-8", "surrogateescape"),
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def _holds(seen: Checkout) -> bool:
    """Say whether a recorded patch is still in; it may have been taken out by other means.

    The file with the version may have been edited, so it decides only in doubt.
    """
    is_in = any(f.state is FileState.PATCHED and not f.change.is_new for f in seen.files)
    return is_in and (not seen.foreign or seen.patch.recognition.fits(seen.root))


def _touched(root: Path, patch: Patch, change: FilePatch) -> TouchedFile:
    file = root / change.path
    if file.resolve() != file:
        raise PatchError(
            f"{change.path} is reached through a symbolic link and belongs to another folder",
            value=str(file.resolve()),
            remedy="Patch the checkout that the file lies in",
        )
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        state = FileState.STOCK if change.is_new else FileState.MISSING
        return TouchedFile(change, None, state, released=change.is_new)
    hashes = patch.hashes[change.path]
    released = sha256(content) in hashes
    try:
        change.revert(content)
        return TouchedFile(change, content, FileState.PATCHED, released)
    except PatchError:
        pass
    try:
        change.apply(content)
        if released or _OUR_NAME not in content:
            return TouchedFile(change, content, FileState.STOCK, released)
        problem = "it holds lines of EnvPipe that this patch does not make"
    except PatchError as error:
        problem = "in the way of a new file" if change.is_new else error.what
    if sha256(content.replace(b"\r\n", b"\n")) in hashes:
        problem = "every line ends in CRLF"
    return TouchedFile(change, content, FileState.CHANGED, released, problem)


def _supported(catalog: Sequence[Patch]) -> str:
    names = ", ".join(f"{patch.name} (commit {patch.commit[:7]})" for patch in catalog)
    return f"Supported: {names or 'none, as this installation has no patches'}"


def _unknown(root: Path, catalog: Sequence[Patch]) -> PatchError:
    seen = []
    for known in {patch.recognition.file: patch.recognition for patch in catalog}.values():
        if (root / known.file).is_file():
            found = known.constants_in(root / known.file)
            version = ", ".join(f"{name} = {value!r}" for name, value in found.items())
            seen.append(f"its {known.file} " + (f"says {version}" if version else "is another"))
    if not seen:
        return PatchError(
            "This is no checkout of a supported project",
            value=str(root),
            remedy=f"Give the root folder of the checkout. {_supported(catalog)}",
        )
    return PatchError(
        f"No patch is for this version ({'; '.join(seen)})",
        value=str(root),
        remedy=f"{_supported(catalog)}. For a fork of one of them, give its tag with --tag",
    )
