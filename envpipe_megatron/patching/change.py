"""Applies patches to checkouts, and takes them back.

All results are written beside their targets, and only then does each take its target's place by a
rename. Before the first rename the checkout is as it was; after it, the next `apply` or `revert`
completes the change, as every file's own lines tell on which side it is.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from envpipe_megatron.patching.catalog import Patch, PatchError, load_catalog
from envpipe_megatron.patching.checkout import (
    RECORD_NAME,
    Checkout,
    FileState,
    TouchedFile,
    TreeState,
    look_at,
    record_of,
)


class Outcome(NamedTuple):
    """The checkout before, and the files that were changed, made or removed, in order."""

    found: Checkout
    files: tuple[str, ...]


def apply_patch(
    directory: Path, catalog: Sequence[Patch] | None = None, tag: str | None = None
) -> Outcome:
    """Bring a checkout from stock, or from halfway, to patched.

    Args:
        directory: root of the checkout.
        catalog: the patches to choose from; the package's own by default.
        tag: take the patch of this tag, whatever the checkout says its version is.

    Raises:
        PatchError: no patch is for this version, it does not fit, or another version of it is in.
        OSError: the checkout can't be written; it is then as it was, or can be completed.
    """
    catalog = load_catalog() if catalog is None else catalog
    with _locked(directory) as root:
        found = look_at(root, catalog, tag)
        if found.superseded:
            raise PatchError(
                f"Another version of the patch for {found.patch.name} is in this checkout",
                value=str(root),
                remedy="Run `envpipe patch revert` first, then apply again",
            )
        if found.foreign:
            raise does_not_fit(found)
        _clean_up(root, found.patch)
        results = {
            file.change.path: file.change.apply(file.content or b"")
            for file in _new_first(found)
            if file.state is FileState.STOCK
        }
        if results:
            _write(root, found.patch, {RECORD_NAME: record_of(found.patch), **results})
        return Outcome(found, tuple(results))


def revert_patch(directory: Path, catalog: Sequence[Patch] | None = None) -> Outcome:
    """Take the patch's lines out of a checkout, and leave whatever else was edited.

    The patch is read from the record in the checkout if there is one, so that a checkout which
    another version of this package patched can be reverted too. Raises as `apply_patch`; PatchError
    even if the patch's own lines were changed.
    """
    with _locked(directory) as root:
        found = look_at(root, catalog)
        if found.tree is TreeState.CHANGED_AFTER:
            raise does_not_fit(found)
        _clean_up(root, found.patch)
        results = {
            file.change.path: None
            if file.change.is_new
            else file.change.revert(file.content or b"")
            for file in reversed(_new_first(found))
            if file.state is FileState.PATCHED
        }
        if results or found.recorded:
            _write(root, found.patch, {**results, RECORD_NAME: None})
        return Outcome(found, tuple(results))


def was_stopped(found: Checkout) -> bool:
    """Say whether a change of the checkout was stopped halfway, or is going on."""
    paths = [found.root / path for path in (RECORD_NAME, *found.patch.hashes)]
    halfway = found.tree is TreeState.HALF_PATCHED
    return halfway or any(temporary_of(path).exists() for path in paths)


def temporary_of(target: Path) -> Path:
    """Return where a file's next content is written before it takes the file's place."""
    return target.with_name(f".{target.name}.envpipe-patch")


@contextmanager
def _locked(directory: Path) -> Iterator[Path]:
    """Wait until no other process changes the checkout, if its file system has locks."""
    root = directory.resolve()
    descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Two at once could leave it halfway, which the next call completes.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield root
    finally:
        os.close(descriptor)


def does_not_fit(found: Checkout) -> PatchError:
    """Return the error that names a checkout's foreign files, and what to do."""
    files = [file.shown for file in found.foreign]
    commit = found.patch.commit[:12]
    if found.tree is TreeState.CHANGED_AFTER:
        return PatchError(
            f"The patch for {found.patch.name} is in, and its own lines or files were changed",
            value=files,
            remedy=f"Undo these changes, or put the files of commit {commit} back. If another "
            "version of the patch was applied by hand, `git apply -R` of that one takes it out",
        )
    steps = []
    if not all(file.change.is_new for file in found.foreign):
        steps.append(f"put the files of commit {commit} back")
    if in_the_way := [file.change.path for file in found.foreign if file.change.is_new]:
        steps.append(f"move {', '.join(in_the_way)} away, which commit {commit} does not have")
    todo = " and ".join(steps)
    remedy = f"{todo[0].upper()}{todo[1:]}, then apply again"
    if any("CRLF" in file.problem for file in found.foreign):
        remedy += ". Git turned line ends into CRLF: set core.autocrlf to false and check out again"
    return PatchError(f"The patch for {found.patch.name} does not fit", value=files, remedy=remedy)


def _new_first(found: Checkout) -> list[TouchedFile]:
    """Order the files so that a checkout between two renames never lacks what it imports."""
    return sorted(found.files, key=lambda file: not file.change.is_new)


def _write(root: Path, patch: Patch, results: dict[str, bytes | None]) -> None:
    """Put new contents in place, and remove the files with none, in the order given."""
    try:
        for path, content in results.items():
            if content is not None:
                _write_temporary(root / path, content)
    except BaseException:
        with suppress(OSError):
            _clean_up(root, patch)
        raise
    try:
        for path, content in results.items():
            if content is None:
                (root / path).unlink(missing_ok=True)
            else:
                temporary_of(root / path).replace(root / path)
        _clean_up(root, patch)
    except OSError as error:
        raise PatchError(
            f"The change was stopped halfway: {error}",
            value=str(root),
            remedy="Run `envpipe patch apply` or `envpipe patch revert` again to complete it",
        ) from error


def _write_temporary(target: Path, content: bytes) -> None:
    """Write a target's next content beside it, with the target's mode and owner."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary_of(target).open("wb") as file:
        if target.exists():
            like = target.stat()
            with suppress(PermissionError):  # only root may give files away
                os.fchown(file.fileno(), like.st_uid, like.st_gid)
            os.fchmod(file.fileno(), stat.S_IMODE(like.st_mode))
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _clean_up(root: Path, patch: Patch) -> None:
    """Remove what a stopped change left beside the files, and new folders that hold nothing."""
    for path in (RECORD_NAME, *patch.hashes):
        if os.path.lexists(temporary := temporary_of(root / path)):
            temporary.unlink()
    for file in patch.files:
        folder = (root / file.path).parent
        while file.is_new and folder != root:
            with suppress(OSError):  # holds something, or is gone
                folder.rmdir()
            folder = folder.parent
