"""Makes a patch and its description from a stock checkout and an edited copy of it.

    python patches/make.py STOCK EDITED --project megatron-lm --tag core_v0.16.1

writes patches/megatron-lm/core_v0.16.1/envpipe.patch and patch.toml. The patch holds as little of
the stock text as is safe: each hunk has one line of context, or as many more as make it fit at one
place only, both when it is applied and when it is taken back. The result is applied and reverted
once before anything is written.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import stat
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.patching.catalog import (
    DESCRIPTION_NAME,
    FORMAT,
    PATCH_NAME,
    read_constants,
    read_patch,
    sha256,
)
from envpipe_megatron.patching.checkout import git_apply

HERE = Path(__file__).resolve().parent
_PASSED_OVER_FOLDERS = {".git", "__pycache__"}


class Change(NamedTuple):
    """A changed or new file; `before` is None for a new one."""

    path: str
    before: bytes | None
    after: bytes


def main() -> None:
    """Make the files, or say why not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("stock", type=Path, help="the checkout as released")
    parser.add_argument("edited", type=Path, help="a copy of it with the edits")
    parser.add_argument("--project", required=True, help="a folder of patches/ with project.toml")
    parser.add_argument("--tag", required=True, help="the tag or commit that the patch is for")
    parser.add_argument("--output", type=Path, default=HERE, help="the patches folder")
    options = parser.parse_args()
    try:
        made = make(options.stock, options.edited, options.output, options.project, options.tag)
    except EnvPipeError as error:
        sys.exit(f"make.py: {error}")
    print("\n".join(made))


def make(stock: Path, edited: Path, patches: Path, project: str, tag: str) -> list[str]:
    """Write patch and description.

    Returns:
        What was made, a line each.

    Raises:
        EnvPipeError: an edit that a patch can't hold, or project.toml lacks something.
    """
    settings = tomllib.loads((patches / project / "project.toml").read_text())
    if tag not in settings["commits"]:
        raise EnvPipeError(
            "project.toml has no commit of the tag", value=tag, remedy="Add it to [commits]."
        )
    changes = list(find_changes(stock, edited))
    if not changes:
        raise EnvPipeError("The trees are equal", value=str(edited))
    patch = b"".join(diff(change) for change in changes)
    description = _description(settings, stock, project, tag, changes, patch)
    made = read_patch(description, patch)
    before, after = {c.path: c.before for c in changes}, {c.path: c.after for c in changes}
    if (git_apply(made, before), git_apply(made, after, "-R")) != ((after, {}), (before, {})):
        raise EnvPipeError("A patch does not bring about its own edits", value=sorted(after))
    folder = patches / project / tag
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PATCH_NAME).write_bytes(patch)
    (folder / DESCRIPTION_NAME).write_text(description)
    return [
        f"{folder}: {len(patch)} bytes",
        *(f"  {'new' if c.before is None else 'changed':8}{c.path}" for c in changes),
    ]


def find_changes(stock: Path, edited: Path) -> Iterator[Change]:
    """Yield what differs, ordered by path; build products and .git are passed over.

    Raises:
        EnvPipeError: a removed file, or a change of mode or kind.
    """
    before, after = _files(stock), _files(edited)
    if removed := sorted(set(before) - set(after)):
        raise EnvPipeError("Files were removed, which a patch may not do", value=removed)
    for path, file in sorted(after.items()):
        content = _content(file)
        old = _content(before[path]) if path in before else None
        if path in before and _kind(file) != _kind(before[path]):
            raise EnvPipeError("A file's mode was changed, which a patch may not do", value=path)
        if content == old:
            continue
        if file.is_symlink() or not content or b"\0" in content:
            raise EnvPipeError(
                "Only text files with content go into a patch",
                value=path,
                remedy="Remove build products from the edited tree.",
            )
        if old is None and os.access(file, os.X_OK):
            raise EnvPipeError("A new file may not be executable", value=path)
        if old is None and not (stock / path).parent.is_dir():
            raise EnvPipeError("A new file may not need a new folder", value=path)
        yield Change(path, old, content)


def _files(tree: Path) -> dict[str, Path]:
    found = {}
    for folder, folders, names in os.walk(tree):
        folders[:] = [name for name in folders if name not in _PASSED_OVER_FOLDERS]
        for name in names:
            if not name.endswith(".pyc") and not name.startswith(".envpipe-patch"):
                path = Path(folder, name)
                found[path.relative_to(tree).as_posix()] = path
    if not found:
        raise EnvPipeError("There are no files in a tree", value=str(tree))
    return found


def _content(file: Path) -> bytes:
    return os.fsencode(file.readlink()) if file.is_symlink() else file.read_bytes()


def _kind(file: Path) -> tuple[bool, bool]:
    return file.is_symlink(), bool(file.lstat().st_mode & stat.S_IXUSR)


def diff(change: Change) -> bytes:
    """Return the change as a unified diff with the least safe context."""
    name = change.path.encode()
    head = b"diff --git a/" + name + b" b/" + name + b"\n"
    if change.before is None:
        head += b"new file mode 100644\n--- /dev/null\n"
    else:
        head += b"--- a/" + name + b"\n"
    head += b"+++ b/" + name + b"\n"
    before, after = _lines(change.before or b""), _lines(change.after)
    return head + b"".join(_hunk_text(before, after, edits) for edits in _hunks(before, after))


def _lines(content: bytes) -> list[bytes]:
    return re.findall(rb".*\n|.+\Z", content)


#: Begin and end in the stock file, begin and end in the edited one; lines from 0.
_Edit = tuple[int, int, int, int]


@dataclass
class _Hunk:
    """Edits that share one hunk.

    `first` and `last` bound it, context included, in the stock file; `new_first` and `new_last` do
    in the edited one.
    """

    edits: list[_Edit]
    first: int
    last: int

    @property
    def new_first(self) -> int:
        begin, _, new_begin, _ = self.edits[0]
        return new_begin - (begin - self.first)

    @property
    def new_last(self) -> int:
        _, end, _, new_end = self.edits[-1]
        return new_end + (self.last - end)


def _hunks(before: list[bytes], after: list[bytes]) -> list[_Hunk]:
    """Give each edit one line of context, and more while its hunk would fit elsewhere too."""
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    context = {code[1:]: 1 for code in matcher.get_opcodes() if code[0] != "equal"}
    while True:
        hunks: list[_Hunk] = []
        for edit, count in context.items():
            first, last = max(0, edit[0] - count), min(len(before), edit[1] + count)
            if hunks and first <= hunks[-1].last:
                joined = hunks[-1]
                joined.first, joined.last = min(joined.first, first), max(joined.last, last)
                joined.edits.append(edit)
            else:
                hunks.append(_Hunk([edit], first, last))
        vague = [
            edit
            for hunk in hunks
            if not _once(before, hunk.first, hunk.last)
            or not _once(after, hunk.new_first, hunk.new_last)
            for edit in hunk.edits
        ]
        if not vague:
            return hunks
        for edit in vague:
            context[edit] += 1


def _once(lines: list[bytes], first: int, last: int) -> bool:
    """Say whether lines are at one place only, for `git apply` takes the nearest of several."""
    wanted = lines[first:last]
    return sum(lines[at : at + last - first] == wanted for at in range(len(lines))) <= 1


def _hunk_text(before: list[bytes], after: list[bytes], hunk: _Hunk) -> bytes:
    sides = []
    for first, last in ((hunk.first, hunk.last), (hunk.new_first, hunk.new_last)):
        count = last - first
        sides.append(b"%d,%d" % (first + 1 if count else first, count))
    text = [b"@@ -%s +%s @@\n" % tuple(sides)]
    position = hunk.first
    for begin, end, new_begin, new_end in hunk.edits:
        text += [_marked(b" ", line) for line in before[position:begin]]
        text += [_marked(b"-", line) for line in before[begin:end]]
        text += [_marked(b"+", line) for line in after[new_begin:new_end]]
        position = end
    text += [_marked(b" ", line) for line in before[position : hunk.last]]
    return b"".join(text)


def _marked(mark: bytes, line: bytes) -> bytes:
    end = b"" if line.endswith(b"\n") else b"\n\\ No newline at end of file\n"
    return mark + line + end


def _description(
    settings: dict[str, Any],
    stock: Path,
    project: str,
    tag: str,
    changes: list[Change],
    patch: bytes,
) -> str:
    """Return the text of patch.toml."""
    lines = [
        "# Made by patches/make.py; edit project.toml and make it again.",
        f"format = {_toml(FORMAT)}",
        f"project = {_toml(project)}",
        f"title = {_toml(settings['title'])}",
        f"tag = {_toml(tag)}",
        f"commit = {_toml(settings['commits'][tag])}",
        f"patch_sha256 = {_toml(sha256(patch))}",
        "",
        "[recognition]",
        *_recognition(settings["recognition"], stock),
    ]
    for change in changes:
        if change.before is None:
            lines += ["", "[[new_files]]", f"path = {_toml(change.path)}"]
            lines += [f"sha256 = {_toml(sha256(change.after))}"]
        else:
            lines += ["", "[[files]]", f"path = {_toml(change.path)}"]
            lines += [f"sha256_before = {_toml(sha256(change.before))}"]
            lines += [f"sha256_after = {_toml(sha256(change.after))}"]
    for hook in settings["hooks"]:
        if tag in hook.get("tags", [tag]):
            lines += ["", "[[hooks]]"]
            lines += [f"{key} = {_toml(value)}" for key, value in hook.items() if key != "tags"]
    return "\n".join(lines) + "\n"


def _recognition(settings: dict[str, Any], stock: Path) -> list[str]:
    """Return the lines that tell this version from others, read from the stock tree."""
    file = stock / settings["file"]
    lines = [f"file = {_toml(settings['file'])}"]
    if "constants" not in settings:
        return [*lines, f"sha256 = {_toml(sha256(file.read_bytes()))}"]
    values = read_constants(file, settings["constants"])
    if missing := sorted(set(settings["constants"]) - set(values)):
        raise EnvPipeError(f"{file} lacks constants", value=missing)
    return [*lines, f"constants = {_toml(values)}"]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


if __name__ == "__main__":
    main()
