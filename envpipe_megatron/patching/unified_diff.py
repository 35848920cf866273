"""Unified diffs of the kind that EnvPipe ships: read, applied, and turned around.

Only what such patches hold is understood: text changes and new files. Each hunk must fit at
exactly the lines it names; nothing is searched for and nothing is passed over.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from envpipe_megatron.errors import EnvPipeError

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = b"\\ No newline at end of file"
_NEW_FILE_MODE = b"new file mode 100644"


class PatchError(EnvPipeError):
    """A patch can't be read, doesn't fit, or the checkout isn't in a state to take it."""


@dataclass(frozen=True)
class Hunk:
    """One changed place.

    Attributes:
        old_start: first line, from 1; with no old lines, the line after which it goes in.
        new_start: the same in the changed file.
        old_lines: context and removed lines, with their line ends.
        new_lines: context and added lines, with their line ends.
    """

    old_start: int
    new_start: int
    old_lines: tuple[bytes, ...]
    new_lines: tuple[bytes, ...]

    def reversed(self) -> Hunk:
        """The hunk that takes this one back."""
        return Hunk(self.new_start, self.old_start, self.new_lines, self.old_lines)


@dataclass(frozen=True)
class FilePatch:
    """The change of one file.

    Attributes:
        path: relative to the root of the checkout, with forward slashes.
        is_new: the file is made by the patch.
        hunks: the changed places in ascending order.
    """

    path: str
    is_new: bool
    hunks: tuple[Hunk, ...]

    def apply(self, before: bytes) -> bytes:
        """Return the changed content; a new file's `before` is empty.

        Raises:
            PatchError: a hunk does not fit at its lines.
        """
        return _changed(before, self.hunks, self.path)

    def revert(self, after: bytes) -> bytes:
        """Return the content that `apply` was given.

        Raises:
            PatchError: a hunk does not fit at its lines.
        """
        return _changed(after, tuple(hunk.reversed() for hunk in self.hunks), self.path)


def split_lines(content: bytes) -> list[bytes]:
    """Return the lines with their ends; a carriage return belongs to the line."""
    lines = content.split(b"\n")
    last = lines.pop()
    return [line + b"\n" for line in lines] + ([last] if last else [])


def parse_patch(text: bytes) -> tuple[FilePatch, ...]:
    """Read a patch.

    Raises:
        PatchError: it holds something other than text changes and new files, a path leads out of
            the checkout, or it is damaged.
    """
    reader = _Reader(text)
    patches = []
    while not reader.at_end:
        patches.append(reader.file_patch())
    if not patches:
        raise PatchError("A patch is empty")
    paths = [patch.path for patch in patches]
    if len(set(paths)) < len(paths):
        raise PatchError("A patch changes a file twice", value=sorted(paths))
    return tuple(patches)


def check_inside(path: str) -> str:
    """Return a path of a patch or record when it stays inside the checkout.

    Raises:
        PatchError: it is absolute or leads upwards.
    """
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or ".git" in parts:
        raise PatchError("A path of a patch leads out of the checkout", value=path)
    return path


def _changed(content: bytes, hunks: tuple[Hunk, ...], path: str) -> bytes:
    lines = split_lines(content)
    result: list[bytes] = []
    position = 0
    for hunk in hunks:
        start = hunk.old_start - 1 if hunk.old_lines else hunk.old_start
        end = start + len(hunk.old_lines)
        if start < position or tuple(lines[start:end]) != hunk.old_lines or start > len(lines):
            raise PatchError(f"{path} differs from what the patch expects", value=hunk.old_start)
        result += lines[position:start]
        if len(result) != (hunk.new_start - 1 if hunk.new_lines else hunk.new_start):
            raise PatchError(f"The line numbers of a patch of {path} disagree with each other")
        result += hunk.new_lines
        position = end
    return b"".join(result + lines[position:])


class _Reader:
    def __init__(self, text: bytes) -> None:
        self._lines = split_lines(text)
        self._at = 0

    @property
    def at_end(self) -> bool:
        return self._at >= len(self._lines)

    def file_patch(self) -> FilePatch:
        is_new = False
        while not self._next_is(b"--- "):
            line = self._take().rstrip(b"\r\n")
            is_new = is_new or line == _NEW_FILE_MODE
            if line != _NEW_FILE_MODE and not line.startswith((b"diff --git ", b"index ")):
                raise self._damaged("A patch may only change text and make files")
        old = self._take()[4:].rstrip(b"\n")
        if not self._next_is(b"+++ b/"):
            raise self._damaged("A patch names no changed file")
        path = self._take()[6:].rstrip(b"\n").decode()
        if (old == b"/dev/null") != is_new or (not is_new and old.decode() != f"a/{path}"):
            raise self._damaged("A patch may only change text and make files")
        hunks = []
        while not self.at_end and self._next_is(b"@@ "):
            hunks.append(self._hunk())
        if not hunks:
            raise self._damaged(f"A patch of {path} has no hunk")
        return FilePatch(check_inside(path), is_new, tuple(hunks))

    def _hunk(self) -> Hunk:
        match = _HUNK.match(self._take())
        if match is None:
            raise self._damaged("A hunk's header is damaged")
        old_start, old_left, new_start, new_left = (
            1 if number is None else int(number) for number in match.groups()
        )
        old: list[bytes] = []
        new: list[bytes] = []
        while len(old) < old_left or len(new) < new_left:
            mark, line = (taken := self._take())[:1], taken[1:]
            if mark not in (b" ", b"-", b"+"):
                raise self._damaged("A hunk is damaged")
            if not self.at_end and self._next_is(_NO_NEWLINE):
                self._take()
                line = line.removesuffix(b"\n")
            if mark != b"+":
                old.append(line)
            if mark != b"-":
                new.append(line)
        if (len(old), len(new)) != (old_left, new_left):
            raise self._damaged("A hunk's lengths disagree with its header")
        return Hunk(old_start, new_start, tuple(old), tuple(new))

    def _next_is(self, start: bytes) -> bool:
        return not self.at_end and self._lines[self._at].startswith(start)

    def _take(self) -> bytes:
        if self.at_end:
            raise self._damaged("A patch ends too early")
        self._at += 1
        return self._lines[self._at - 1]

    def _damaged(self, what: str) -> PatchError:
        return PatchError(f"{what}: line {self._at}")
