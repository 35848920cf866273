"""The patches that come with the package, how they know a version, and the diffs they hold.

A hunk goes where its old lines are, which must be one place of the file. The line numbers in a
patch are for `git apply` and for messages. Descriptions are of format envpipe-patch/1.
"""

from __future__ import annotations

import ast
import hashlib
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from envpipe_megatron.errors import EnvPipeError

_FILE = re.compile(rb"(?m)^diff --git .*\n")
_HEAD = re.compile(
    rb"(new file mode 100644\n)?(?:index .*\n)?--- (?:a/.*|/dev/null)\n\+\+\+ b/(.*)\n"
)
_HUNK = re.compile(rb"(?m)^(?=@@ -)")
_HUNK_START = re.compile(rb"@@ -(\d+)")
_LINE = re.compile(rb"([ +-])(.*)\n(\\ No newline at end of file\n)?")

FORMAT = "envpipe-patch/1"
PATCH_NAME = "envpipe.patch"
DESCRIPTION_NAME = "patch.toml"


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


def _check_inside(path: str) -> str:
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
    return FilePatch(_check_inside(match[2].decode()), bool(match[1]), tuple(map(_hunk, hunks)))


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


@dataclass(frozen=True)
class Recognition:
    """How a version is known: by constants of a Python file, or by a file's sha256."""

    file: str
    constants: dict[str, object] = field(default_factory=dict)
    sha256: str = ""

    def fits(self, root: Path) -> bool:
        """Say whether the checkout in `root` is of this version."""
        path = root / self.file
        if not path.is_file():
            return False
        if self.sha256:
            return sha256(path.read_bytes()) == self.sha256
        return self.constants_in(path) == self.constants

    def constants_in(self, path: Path) -> dict[str, object]:
        """Which of the constants a file has, if it is Python at all."""
        try:
            return read_constants(path, self.constants)
        except (SyntaxError, ValueError):
            return {}


@dataclass(frozen=True)
class Hook:
    """A place that `check` must find live; its fields are those of `[[hooks]]` in patch.toml.

    Attributes:
        module: the module to import, which must come from the checkout.
        attribute: the name that the module must have.
        returned_by: a function of the module; if the attribute is set to a function, it must return
            what that function returns. Empty to skip this check.
        arguments: the arguments of `returned_by`.
        prepare: calls to make first, each with `call`, a `module:function`, and its `arguments`.
        used_in: functions of the module whose code must name the attribute.
    """

    module: str
    attribute: str
    returned_by: str = ""
    arguments: Sequence[Any] = ()
    prepare: Sequence[dict[str, Any]] = ()
    used_in: Sequence[str] = ()


@dataclass(frozen=True)
class Patch:
    """A patch and its description.

    Attributes:
        project: folder of the project under patches/.
        title: the project's own name.
        commit: commit id of the tag.
        sha256: hash of the patch's text.
        hashes: sha256 of each path, in the released checkout (empty for a new file) and patched.
        hooks: the places that `check` must find live.
        description: text of patch.toml.
    """

    project: str
    title: str
    tag: str
    commit: str
    sha256: str
    recognition: Recognition
    files: tuple[FilePatch, ...]
    hashes: dict[str, tuple[str, str]]
    hooks: tuple[Hook, ...]
    description: str = field(repr=False)
    text: bytes = field(repr=False)

    @property
    def name(self) -> str:
        """Project and tag, for messages."""
        return f"{self.title} {self.tag}"


def patches_folder() -> Path:
    """Return the folder of the patches: in the installed package, or else in the checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "patches"
    return installed if installed.is_dir() else package.parent / "patches"


def patch_file(patch: Patch) -> Path | None:
    """Return where a patch lies in this installation; None for one of another version's."""
    file = patches_folder() / patch.project / patch.tag / PATCH_NAME
    return file if file.is_file() and sha256(file.read_bytes()) == patch.sha256 else None


def load_catalog(folder: Path | None = None) -> tuple[Patch, ...]:
    """Return all patches of a folder, the package's own if none is given, by project and tag.

    Raises PatchError if a patch is damaged, or doesn't belong to its description.
    """
    found = sorted((folder or patches_folder()).glob(f"*/*/{DESCRIPTION_NAME}"))
    return tuple(
        read_patch(file.read_text(encoding="utf-8"), (file.parent / PATCH_NAME).read_bytes())
        for file in found
    )


def read_patch(description: str, text: bytes) -> Patch:
    """Build a patch from the texts of its two files; PatchError if they are not of one patch."""
    try:
        document = tomllib.loads(description)
        if document["format"] != FORMAT:
            raise PatchError(
                "A patch's description is of an unknown format",
                value=document["format"],
                remedy="Use the version of envpipe that wrote it",
            )
        hashes = {
            file["path"]: (file["sha256_before"], file["sha256_after"])
            for file in document.get("files", [])
        }
        hashes |= {file["path"]: ("", file["sha256"]) for file in document.get("new_files", [])}
        recognition = Recognition(**document["recognition"])
        _check_inside(recognition.file)
        hooks = tuple(Hook(**table) for table in document["hooks"])
        changes = parse_patch(text)
        names = {key: str(document[key]) for key in ("project", "title", "tag", "commit")}
        recorded = document["patch_sha256"]
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise PatchError(
            f"A patch's description is damaged: {error}", remedy="Reinstall envpipe-megatron"
        ) from error
    same_files = {(change.path, change.is_new) for change in changes} == {
        (path, not before) for path, (before, _) in hashes.items()
    }
    if recorded != sha256(text) or not same_files:
        raise PatchError(
            "A patch and its description do not belong together",
            value=f"{names['project']}/{names['tag']}",
            remedy="Reinstall envpipe-megatron, or make the patch again with patches/make.py",
        )
    return Patch(
        **names,
        sha256=recorded,
        recognition=recognition,
        files=changes,
        hashes=hashes,
        hooks=hooks,
        description=description,
        text=text,
    )


def read_constants(file: Path, names: Iterable[str]) -> dict[str, object]:
    """Return those of `names` that a Python file assigns a literal to, without running it."""
    wanted = set(names)
    found: dict[str, object] = {}
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and target.id in wanted:
                    found[target.id] = node.value.value
    return found


def sha256(content: bytes) -> str:
    """Return the hash that files are known by."""
    return hashlib.sha256(content).hexdigest()
