"""Reads the patches that come with the package, and recognizes their versions of projects.

Descriptions are of format envpipe-patch/1.
"""

from __future__ import annotations

import ast
import hashlib
import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import shipped_folder

FORMAT = "envpipe-patch/1"
PATCH_NAME = "envpipe.patch"
DESCRIPTION_NAME = "patch.toml"


class PatchError(EnvPipeError):
    """A patch can't be read, doesn't fit, or the checkout isn't in a state to take it."""


@dataclass(frozen=True)
class Recognition:
    """Recognizes a version: by constants of a Python file, or by a file's sha256."""

    file: str
    constants: dict[str, object] = field(default_factory=dict)
    sha256: str = ""

    def fits(self, root: Path) -> bool:
        """Say whether the checkout in `root` is of this version."""
        path = root / self.file
        if self.sha256:
            return path.is_file() and sha256(path.read_bytes()) == self.sha256
        return self.constants_in(path) == self.constants

    def constants_in(self, path: Path) -> dict[str, object]:
        """Return those of the constants that a file has, if it is Python at all."""
        try:
            return read_constants(path, self.constants)
        except (OSError, SyntaxError, ValueError):
            return {}


@dataclass(frozen=True)
class Patch:
    """A patch and its description.

    Attributes:
        project: folder of the project under patches/.
        name: the project's own name and the tag, for messages.
        commit: commit id of the tag.
        hashes: sha256 of each path, in the released checkout (empty for a new file) and patched.
        hooks: the places that `check` must find live: the `module` to import from the checkout, the
            `attribute` that it must have, and `used_in`, its functions whose code must name that.
        description: text of patch.toml.
    """

    project: str
    name: str
    tag: str
    commit: str
    recognition: Recognition
    hashes: dict[str, tuple[str, str]]
    hooks: tuple[dict[str, Any], ...]
    description: str = field(repr=False)
    text: bytes = field(repr=False)


def patch_file(patch: Patch) -> Path | None:
    """Return where a patch lies in this installation; None for one of another version's."""
    file = shipped_folder("patches") / patch.project / patch.tag / PATCH_NAME
    return file if file.is_file() and file.read_bytes() == patch.text else None


def load_catalog(folder: Path | None = None) -> tuple[Patch, ...]:
    """Return all patches of a folder, the package's own if none is given, by project and tag.

    Raises PatchError if a patch is damaged, or doesn't belong to its description.
    """
    found = sorted((folder or shipped_folder("patches")).glob(f"*/*/{DESCRIPTION_NAME}"))
    return tuple(
        read_patch(file.read_text(encoding="utf-8"), (file.parent / PATCH_NAME).read_bytes())
        for file in found
    )


def read_patch(description: str, text: bytes) -> Patch:
    """Build a patch from the texts of its two files; PatchError if they are not of one patch."""
    try:
        document = tomllib.loads(description)
        if (document["format"], document["patch_sha256"]) != (FORMAT, sha256(text)):
            raise ValueError("it is of another format, or of another patch")
        hashes = {
            file["path"]: (file["sha256_before"], file["sha256_after"])
            for file in document.get("files", [])
        }
        hashes |= {file["path"]: ("", file["sha256"]) for file in document.get("new_files", [])}
        if set(hashes) != set(re.findall(r"(?m)^\+\+\+ b/(.+)$", text.decode(errors="replace"))):
            raise ValueError("it describes other files than the patch changes")
        if outside := [path for path in hashes if path.startswith("/") or ".." in path.split("/")]:
            raise ValueError(f"{outside[0]} leads out of the checkout")
        return Patch(
            **{key: str(document[key]) for key in ("project", "tag", "commit")},
            name=f"{document['title']} {document['tag']}",
            recognition=Recognition(**document["recognition"]),
            hashes=hashes,
            hooks=tuple(document["hooks"]),
            description=description,
            text=text,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PatchError(
            f"A patch's description is damaged: {error}",
            remedy="Reinstall envpipe-megatron, or make the patch again with patches/make.py",
        ) from error


def read_constants(file: Path, names: Collection[str]) -> dict[str, object]:
    """Return those of `names` that a Python file assigns a literal to, without running it."""
    found: dict[str, object] = {}
    for node in ast.parse(file.read_bytes()).body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value))
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=value))
            ) if name in names:
                found[name] = value
    return found


def sha256(content: bytes | None) -> str:
    """Return the hash that files are known by; empty for no file."""
    return "" if content is None else hashlib.sha256(content).hexdigest()
