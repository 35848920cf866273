"""Unified diffs as patches/make.py writes them: changes of text files, and new ones.

A hunk goes where its old lines stand, which must be one place of the file. The line numbers in a
patch are for `git apply` and for messages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from envpipe_megatron.errors import EnvPipeError

_FILE = re.compile(rb"(?m)^diff --git .*\n")
_HEAD = re.compile(
    rb"(new file mode 100644\n)?(?:index .*\n)?--- (?:a/.*|/dev/null)\n\+\+\+ b/(.*)\n"
)
_HUNK = re.compile(rb"(?m)^(?=@@ -)")
_HUNK_START = re.compile(rb"@@ -(\d+)")
_LINE = re.compile(rb"([ +-])(.*)\n(\\ No newline at end of file\n)?")


class PatchError(EnvPipeError):
    """A patch can't be read, doesn't fit, or the checkout isn't in a state to take it."""


@dataclass(frozen=True)
class Hunk:
    """One changed place, from a line of the released file on, with its context in old and new."""

    line: int
    old: bytes
    new: bytes


@dataclass(frozen=True)
class FilePatch:
    """The change of one file; `path` is relative to the checkout, with forward slashes."""

    path: str
    is_new: bool
    hunks: tuple[Hunk, ...]

    def apply(self, before: bytes) -> bytes:
        """Return the changed content; PatchError if a hunk's lines do not stand at one place."""
        return self._exchanged(before, [(hunk.line, hunk.old, hunk.new) for hunk in self.hunks])

    def revert(self, after: bytes) -> bytes:
        """Return the content without the change, whatever else was edited; raises as `apply`."""
        before = self._exchanged(after, [(hunk.line, hunk.new, hunk.old) for hunk in self.hunks])
        if self.is_new and before:
            raise PatchError("the patch makes this file, and it holds more")
        return before

    def _exchanged(self, content: bytes, hunks: list[tuple[int, bytes, bytes]]) -> bytes:
        result, position = b"", 0
        for line, old, new in hunks:
            found = places(content, old)
            if len(found) != 1 or found[0] < position:
                what = "are not at one place" if found else "are missing"
                raise PatchError(f"lines that the patch needs, near {line}, {what}")
            result += content[position : found[0]] + new
            position = found[0] + len(old)
        return result + content[position:]


def places(content: bytes, lines: bytes) -> list[int]:
    """Return where whole lines stand in a file's content; no lines stand in an empty one only."""
    if not lines:
        return [] if content else [0]
    end = b"" if lines.endswith(b"\n") else rb"\Z"
    return [m.start() for m in re.finditer(rb"(?m)^(?=%s%s)" % (re.escape(lines), end), content)]


def parse_patch(text: bytes) -> tuple[FilePatch, ...]:
    """Read a patch; PatchError if it holds more than text changes and new files inside."""
    before, *parts = _FILE.split(text)
    if before or not parts:
        raise PatchError("This is no patch for EnvPipe", value=before[:80])
    return tuple(map(_file_patch, parts))


def check_inside(path: str) -> str:
    """Return a path of a patch or record; PatchError unless it stays inside the checkout."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or ".git" in parts:
        raise PatchError("A path of a patch leads out of the checkout", value=path)
    return path


def _file_patch(text: bytes) -> FilePatch:
    head, *hunks = _HUNK.split(text)
    match = _HEAD.fullmatch(head)
    if match is None or not hunks:
        raise PatchError("A patch may only change text and make files", value=head)
    return FilePatch(check_inside(match[2].decode()), bool(match[1]), tuple(map(_hunk, hunks)))


def _hunk(text: bytes) -> Hunk:
    header, _, body = text.partition(b"\n")
    start = _HUNK_START.match(header)
    if start is None or _LINE.sub(b"", body):
        raise PatchError("A hunk of a patch is damaged", value=header)
    old = new = b""
    for mark, line, no_newline in _LINE.findall(body):
        line += b"" if no_newline else b"\n"
        old += line if mark != b"+" else b""
        new += line if mark != b"-" else b""
    return Hunk(int(start[1]), old, new)
