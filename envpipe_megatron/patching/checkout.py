"""What a checkout is: which version, and how far it is from stock and from patched."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from envpipe_megatron.patching.catalog import Patch, TouchedFile, read_constants, sha256
from envpipe_megatron.patching.unified_diff import PatchError


class FileState(StrEnum):
    """What a touched file is."""

    STOCK = "stock"
    PATCHED = "patched"
    CHANGED = "changed"
    MISSING = "missing"
    LINE_ENDS = "changed: every line ends in CRLF"


class TreeState(StrEnum):
    """What all touched files are together."""

    STOCK = "stock"
    PATCHED = "patched"
    HALF_PATCHED = "half-patched"
    CHANGED_AFTER = "changed-after"
    DIRTY = "dirty"


@dataclass(frozen=True)
class Survey:
    """A checkout as seen by one patch.

    Attributes:
        patch: the patch.
        contents: of each touched file, None where there is none.
        files: the state of each touched file.
        tree: the state of the checkout.
        recorded: a record in the checkout says that the patch was applied.
    """

    patch: Patch
    contents: dict[str, bytes | None]
    files: dict[str, FileState]
    tree: TreeState
    recorded: bool

    @property
    def foreign(self) -> tuple[str, ...]:
        """Files that are neither stock nor patched, each with its state."""
        known = (FileState.STOCK, FileState.PATCHED)
        return tuple(
            f"{path} ({state})" for path, state in self.files.items() if state not in known
        )


def survey(root: Path, patch: Patch, recorded: bool) -> Survey:
    """Compare the touched files with what they are before and after the patch.

    Args:
        root: the checkout, resolved.
        patch: the patch.
        recorded: a record in the checkout says that the patch was applied.

    Raises:
        PatchError: a file is reached through a symbolic link, so that it belongs elsewhere.
    """
    contents = {file.path: _content(root, file.path) for file in patch.files}
    files = {file.path: _state(file, contents[file.path]) for file in patch.files}
    states = set(files.values())
    # A record outlives a patch that is taken out by other means, and new files then go.
    new = [contents[file.path] for file in patch.files if not file.before]
    taken_out = bool(new) and set(new) == {None}
    if states == {FileState.STOCK}:
        tree = TreeState.STOCK
    elif states == {FileState.PATCHED}:
        tree = TreeState.PATCHED
    elif states == {FileState.STOCK, FileState.PATCHED}:
        tree = TreeState.HALF_PATCHED
    elif FileState.PATCHED in states or (recorded and not taken_out):
        tree = TreeState.CHANGED_AFTER
    else:
        tree = TreeState.DIRTY
    return Survey(patch, contents, files, tree, recorded)


def recognised(root: Path, catalog: Sequence[Patch]) -> Survey:
    """Return the checkout as its patch sees it.

    Where several tags call themselves the same version, the files decide.

    Raises:
        PatchError: the checkout is of no supported version.
    """
    surveys = [
        survey(root, patch, recorded=False) for patch in catalog if patch.recognition.fits(root)
    ]
    if not surveys:
        raise _unknown(root, catalog)
    return min(surveys, key=lambda seen: (seen.tree is TreeState.DIRTY, len(seen.foreign)))


def changed_in_git(root: Path, patch: Patch) -> tuple[str, ...]:
    """Return the tracked files that git sees changed, but for those that the patch touches.

    Nothing where the checkout is no git clone, or git is not installed.

    Raises:
        PatchError: git can't say.
    """
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return ()
    # Another repository's place goes; settings stay, as a safe.directory may be among them.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith("GIT_CONFIG")
    }
    said = subprocess.run(
        [git, "-C", str(root), "status", "--porcelain", "-z", "--untracked-files=no"],
        capture_output=True,
        env=environment | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
        check=False,
    )
    if said.returncode:
        lines = os.fsdecode(said.stderr).splitlines()
        raise PatchError(
            "git can't say whether the checkout is clean",
            value=str(root),
            remedy=f"Do what git says: {' '.join(line.strip() for line in lines if line.strip())}",
        )
    touched = {file.path for file in patch.files}
    changed = []
    entries = iter(os.fsdecode(said.stdout).split("\0"))
    for entry in entries:
        if entry and entry[3:] not in touched:
            changed.append(entry[3:])
        if entry[:1] in ("R", "C"):
            next(entries)  # the name before
    return tuple(changed)


def _content(root: Path, path: str) -> bytes | None:
    file = root / path
    if file.resolve() != file:
        raise PatchError(
            f"{path} is reached through a symbolic link and belongs to another folder",
            value=str(file.resolve()),
            remedy="Patch the checkout that the file lies in",
        )
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None


def _state(file: TouchedFile, content: bytes | None) -> FileState:
    if content is None:
        return FileState.MISSING if file.before else FileState.STOCK
    for wanted, state in ((file.after, FileState.PATCHED), (file.before, FileState.STOCK)):
        if sha256(content) == wanted:
            return state
    if sha256(content.replace(b"\r\n", b"\n")) in (file.before, file.after):
        return FileState.LINE_ENDS
    return FileState.CHANGED


def _unknown(root: Path, catalog: Sequence[Patch]) -> PatchError:
    supported = ", ".join(f"{patch.name} (commit {patch.commit[:7]})" for patch in catalog)
    remedy = f"Supported: {supported or 'none, as this installation has no patches'}"
    seen = []
    for file in dict.fromkeys(patch.recognition.file for patch in catalog):
        names = [
            name
            for patch in catalog
            if patch.recognition.file == file
            for name in patch.recognition.constants
        ]
        if (root / file).is_file():
            found = read_constants(root / file, names)
            version = ", ".join(f"{name} = {value!r}" for name, value in found.items())
            seen.append(f"its {file} says {version}" if version else f"its {file} is another")
    if not seen:
        return PatchError(
            "This is no checkout of a supported project",
            value=str(root),
            remedy=f"Give the root folder of the checkout. {remedy}",
        )
    return PatchError(
        f"No patch is for this version ({'; '.join(seen)})", value=str(root), remedy=remedy
    )
