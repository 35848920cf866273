"""Applies patches to checkouts, takes them back, and says how a checkout stands.

A change goes in steps that may stop anywhere: the journal is written, all results are written
beside their targets, and only then does each take its target's place by a rename. Before the first
rename the checkout is as it was; after it, the next `apply` or `revert` completes the change, as
every file is known by its sha256 to be on one side or the other.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from envpipe_megatron.patching.catalog import Patch, TouchedFile, load_catalog, sha256
from envpipe_megatron.patching.checkout import (
    FileState,
    Survey,
    TreeState,
    changed_in_git,
    recognised,
    survey,
)
from envpipe_megatron.patching.journal import (
    JOURNAL_NAME,
    RECORD_NAME,
    Journal,
    open_journal,
    read_record,
    sync_folder,
    write_all,
)
from envpipe_megatron.patching.refusals import foreign_files, git_command
from envpipe_megatron.patching.unified_diff import PatchError


@dataclass(frozen=True)
class Outcome:
    """What `apply` or `revert` did.

    Attributes:
        patch: the patch that is in, or was taken out.
        before: the state that was found.
        files: what was changed, made or removed, in order; empty where nothing was to do.
    """

    patch: Patch
    before: TreeState
    files: tuple[str, ...]


@dataclass(frozen=True)
class Status:
    """How a checkout stands.

    Attributes:
        seen: its files as its patch sees them.
        recorded: the checkout has a record of the patch.
        interrupted: a change was stopped halfway, or is going on right now.
        superseded: the patch in the checkout is not the one that this package has for its version.
    """

    seen: Survey
    recorded: bool
    interrupted: bool
    superseded: bool


def apply_patch(directory: Path, catalog: Sequence[Patch] | None = None) -> Outcome:
    """Bring a checkout from stock, or from halfway, to patched.

    Args:
        directory: root of the checkout.
        catalog: the patches to choose from; the package's own where left out.

    Returns:
        What was done; nothing where the checkout is patched already.

    Raises:
        PatchError: no patch is for this version; files differ from the released ones, or git sees
            changes; another version of the patch is in.
        OSError: the checkout can't be written; it is then as it was, or can be completed.
    """
    catalog = load_catalog() if catalog is None else catalog
    root = directory.resolve()
    seen = _seen_by_current(root, catalog)
    if seen.tree is TreeState.PATCHED and _unchanging(root):
        return Outcome(seen.patch, seen.tree, ())
    with open_journal(root, git_command(root, seen.patch)) as journal:
        seen = _seen_by_current(root, catalog)
        if seen.foreign:
            raise foreign_files(root, seen, reverting=False)
        if seen.tree is TreeState.PATCHED and journal.interrupted is None:
            return Outcome(seen.patch, seen.tree, ())
        # A change that was stopped halfway is completed whatever else was edited since.
        if seen.tree is TreeState.STOCK and (changed := changed_in_git(root, seen.patch)):
            raise PatchError(
                "The checkout has changes that are not committed",
                value=list(changed),
                remedy="Commit or stash them, then apply again",
            )
        results = {
            file.path: _result(file.change.apply(seen.contents[file.path] or b""), file.after, file)
            for file in _new_first(seen.patch)
            if seen.files[file.path] is FileState.STOCK
        }
        _replace(root, journal, seen, results, ())
        journal.end_as_record()
        return Outcome(seen.patch, seen.tree, tuple(results))


def revert_patch(directory: Path, catalog: Sequence[Patch] | None = None) -> Outcome:
    """Bring a checkout from patched, or from halfway, back to stock.

    The patch is taken from the record in the checkout where there is one, so that a checkout which
    another version of this package patched can be reverted too.

    Args:
        directory: root of the checkout.
        catalog: the patches to choose from; the package's own where left out.

    Returns:
        What was done; nothing where the checkout is stock already.

    Raises:
        PatchError: no patch is for this version; a touched file was changed afterwards.
        OSError: the checkout can't be written; it is then as it was, or can be completed.
    """
    root = directory.resolve()
    seen = _seen(root, catalog)
    if seen.tree is TreeState.STOCK and _unchanging(root) and not (root / RECORD_NAME).exists():
        return Outcome(seen.patch, seen.tree, ())
    with open_journal(root, git_command(root, seen.patch, reverse=True)) as journal:
        seen = _seen(root, catalog)
        if seen.foreign:
            raise foreign_files(root, seen, reverting=True)
        if seen.tree is TreeState.STOCK:
            _clean_up(root, journal.interrupted or seen.patch)
            journal.end_without_record()
            return Outcome(seen.patch, seen.tree, ())
        touched = [
            file
            for file in reversed(_new_first(seen.patch))
            if seen.files[file.path] is FileState.PATCHED
        ]
        results = {
            file.path: _result(
                file.change.revert(seen.contents[file.path] or b""), file.before, file
            )
            for file in touched
            if file.before
        }
        removed = tuple(file.path for file in touched if not file.before)
        _replace(root, journal, seen, results, removed)
        journal.end_without_record()
        return Outcome(seen.patch, seen.tree, (*results, *removed))


def status(directory: Path, catalog: Sequence[Patch] | None = None) -> Status:
    """Say how a checkout stands, by reading alone.

    Raises:
        PatchError: no patch is for this version.
    """
    catalog = load_catalog() if catalog is None else catalog
    root = directory.resolve()
    seen = _seen(root, catalog)
    return Status(
        seen,
        recorded=read_record(root / RECORD_NAME) is not None,
        interrupted=(root / JOURNAL_NAME).exists(),
        superseded=seen.patch.sha256 not in {patch.sha256 for patch in catalog},
    )


def _seen(root: Path, catalog: Sequence[Patch] | None) -> Survey:
    """Return the checkout as the patch sees it that it holds, or else the one for its version."""
    kept = None
    for held in _held(root):
        if held.patch.recognition.fits(root):
            return held
        # Only the version's file was edited: what was patched is there, and nothing else.
        if not held.foreign and any(
            file.before and held.files[file.path] is FileState.PATCHED for file in held.patch.files
        ):
            kept = kept or held
    try:
        found = recognised(root, load_catalog() if catalog is None else catalog)
    except PatchError:
        if kept is None:
            raise
        return kept
    return kept if kept is not None and found.foreign else found


def _seen_by_current(root: Path, catalog: Sequence[Patch]) -> Survey:
    seen = _seen(root, catalog)
    if seen.patch.sha256 not in {patch.sha256 for patch in catalog}:
        raise PatchError(
            f"Another version of the patch for {seen.patch.name} is in this checkout",
            value=str(root),
            remedy="Run `envpipe patch revert` first, then apply again",
        )
    return seen


def _unchanging(root: Path) -> bool:
    """Say that nobody changes the checkout and nobody was stopped: it need not be locked.

    Asked after the files were read, so that a change that began meanwhile is seen.
    """
    return not (root / JOURNAL_NAME).exists()


def _held(root: Path) -> Iterator[Survey]:
    """Yield the checkout as the patches see it that its journal and its record tell of.

    A patch that was taken out by other means is passed over.
    """
    for name in (JOURNAL_NAME, RECORD_NAME):
        try:
            patch = read_record(root / name)
        except PatchError:
            if name == RECORD_NAME:
                raise
            continue  # torn: nothing was changed yet
        if patch is not None:
            seen = survey(root, patch, recorded=True)
            if seen.tree not in (TreeState.STOCK, TreeState.DIRTY):
                yield seen


def _replace(
    root: Path,
    journal: Journal,
    seen: Survey,
    results: dict[str, bytes],
    removed: tuple[str, ...],
) -> None:
    """Write the results beside their targets, then put all in place and remove what is to go."""
    if journal.interrupted is not None:
        _clean_up(root, journal.interrupted)
    try:
        journal.begin(seen.patch)
        for path, content in results.items():
            _write_temporary(root / path, content)
        for folder in {(root / path).parent for path in results}:
            sync_folder(folder)
    except BaseException:
        with suppress(OSError):
            _clean_up(root, seen.patch)
            if seen.tree is not TreeState.HALF_PATCHED:
                journal.nothing_changed()
        raise
    try:
        for path in results:
            _temporary(root / path).replace(root / path)
        for path in removed:
            (root / path).unlink()
        for folder in {(root / path).parent for path in (*results, *removed)}:
            sync_folder(folder)
        _remove_empty_folders(root, seen.patch)
    except OSError as error:
        raise PatchError(
            f"The change was stopped halfway: {error}",
            value=str(root),
            remedy="Run `envpipe patch apply` or `envpipe patch revert` again to complete it",
        ) from error


def _new_first(patch: Patch) -> list[TouchedFile]:
    """Order the files so that a checkout between two renames never lacks what it imports."""
    return sorted(patch.files, key=lambda file: bool(file.before))


def _result(content: bytes, expected: str, file: TouchedFile) -> bytes:
    if sha256(content) != expected:
        raise PatchError(
            "A patch does not make what its description says",
            value=file.path,
            remedy="Reinstall envpipe-megatron",
        )
    return content


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.envpipe-patch")


def _write_temporary(target: Path, content: bytes) -> None:
    """Write a target's next content beside it, with the target's mode and owner."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(target)
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666)
    try:
        if target.exists():
            like = target.stat()
            with suppress(PermissionError):  # only root may give files away
                os.fchown(descriptor, like.st_uid, like.st_gid)
            os.fchmod(descriptor, stat.S_IMODE(like.st_mode))
        write_all(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clean_up(root: Path, patch: Patch) -> None:
    """Remove what a change that was stopped has left beside the files."""
    for file in patch.files:
        if (root / file.path).parent.is_dir():
            _temporary(root / file.path).unlink(missing_ok=True)
    _remove_empty_folders(root, patch)


def _remove_empty_folders(root: Path, patch: Patch) -> None:
    """Remove the folders of new files that hold nothing, as git does."""
    for file in patch.files:
        folder = (root / file.path).parent
        while not file.before and folder != root:
            with suppress(OSError):  # holds something, or is gone
                folder.rmdir()
            folder = folder.parent
