"""The record of a patch in its checkout, and the journal that stands there while it changes.

The journal is the record to be: it is on disk before anything else changes, and becomes the record
by being renamed. One that is found later tells of a change that was stopped, and holds the whole
patch, so that another version of this package can bring it to an end too. It is locked while
somebody works, which keeps two from changing a checkout at once.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from envpipe_megatron import __version__
from envpipe_megatron.patching.catalog import Patch, read_patch
from envpipe_megatron.patching.unified_diff import PatchError

FORMAT = "envpipe-patch-record/1"
RECORD_NAME = ".envpipe-patch.json"
JOURNAL_NAME = ".envpipe-patch.journal"

logger = logging.getLogger(__name__)


def read_record(file: Path) -> Patch | None:
    """Return the patch that a record or journal holds; None where there is none.

    Raises:
        PatchError: the file is damaged.
    """
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    try:
        document = json.loads(content)
        if document["format"] != FORMAT:
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


class Journal:
    """The open and locked journal of a checkout.

    Attributes:
        interrupted: the patch of a change that was stopped halfway, None where none was.
    """

    def __init__(self, root: Path, descriptor: int) -> None:
        self._root = root
        self._descriptor = descriptor
        self._path = root / JOURNAL_NAME
        # A journal is whole on disk before anything else changes: a torn one tells of nothing.
        try:
            self.interrupted = read_record(self._path)
        except PatchError:
            self.interrupted = None
        self._pending = self.interrupted is not None

    def begin(self, patch: Patch) -> None:
        """Put on disk what is about to change."""
        self._pending = True
        content = json.dumps(_record(patch), indent=1).encode() + b"\n"
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        write_all(self._descriptor, content)
        os.fsync(self._descriptor)
        sync_folder(self._root)

    def nothing_changed(self) -> None:
        """Say that the checkout is as it was before `begin`."""
        self._pending = False

    def end_as_record(self) -> None:
        """Say that the patch is in: the journal becomes its record."""
        self._path.replace(self._root / RECORD_NAME)
        sync_folder(self._root)
        self._pending = True

    def end_without_record(self) -> None:
        """Say that the checkout is stock."""
        (self._root / RECORD_NAME).unlink(missing_ok=True)
        self._pending = False

    def close(self) -> None:
        """Give up the lock; the journal stays where a change is not finished."""
        try:
            if not self._pending:
                self._path.unlink(missing_ok=True)
                sync_folder(self._root)
        finally:
            os.close(self._descriptor)


@contextmanager
def open_journal(root: Path, by_hand: str) -> Iterator[Journal]:
    """Yield the journal of a checkout, after whoever else is changing it.

    Args:
        root: the checkout, resolved.
        by_hand: a command that makes the same change where this can't.

    Raises:
        PatchError: the file system has no locks.
        OSError: the folder can't be written.
    """
    path = root / JOURNAL_NAME
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            _lock(descriptor, path, by_hand)
            # Whoever held the lock has renamed or removed the file that was waited for.
            if _is_at(descriptor, path):
                break
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    journal = Journal(root, descriptor)
    try:
        yield journal
    finally:
        journal.close()


def write_all(descriptor: int, content: bytes) -> None:
    """Write every byte."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _lock(descriptor: int, path: Path, by_hand: str) -> None:
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("Waiting for another envpipe patch in %s", path.parent)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        if not os.fstat(descriptor).st_size:
            path.unlink()  # just made, and nobody else gets further than this either
        raise PatchError(
            "The file system has no locks, so the checkout can't be changed safely",
            value=str(path.parent),
            remedy=f"Run `{by_hand}`, or use a checkout on another file system",
        ) from error


def _record(patch: Patch) -> dict[str, object]:
    return {
        "format": FORMAT,
        "envpipe_megatron": __version__,
        "project": patch.project,
        "tag": patch.tag,
        "patch_sha256": patch.sha256,
        "files": [
            {"path": file.path, "sha256_before": file.before or None, "sha256_after": file.after}
            for file in patch.files
        ],
        "description": patch.description,
        "patch": patch.text.decode("utf-8", "surrogateescape"),
    }
