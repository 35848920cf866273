"""Runs a training script of Megatron-LM with EnvPipe's hooks, where nobody may patch the checkout.

    torchrun --nproc-per-node 4 -m envpipe_megatron.attach pretrain_gpt.py ... --envpipe

The modules that the patch touches are patched as they are imported, in memory: by the patch that
`checkout.apply_patch` would put in, at the same places. The checkout stays as it is, and the script
finds its arguments, its folder in the path and `__main__` as without this module. Where there is no
git, by which EnvPipe patches, the script runs without EnvPipe.
"""

from __future__ import annotations

import argparse
import importlib.util
import linecache
import runpy
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import SourceLoader
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePosixPath
from types import ModuleType

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.patching.catalog import PatchError, load_catalog
from envpipe_megatron.patching.checkout import Checkout, GitError, State, does_not_fit, look_at


def attach(directory: Path, tag: str | None = None) -> Checkout:
    """Let this process import the modules of a checkout as the patch makes them.

    Call it before any of them is imported. What is patched already stays as it is. The arguments
    and errors are those of `checkout.apply_patch`; PatchError too if more than modules is changed.

    Returns:
        The checkout, to which nothing is written.
    """
    found = look_at(directory, tag)
    if found.foreign:
        raise does_not_fit(found)
    sys.meta_path.insert(0, _PatchedModules(found))
    return found


def _imported_checkout(script: Path) -> Path:
    """Return the root of the checkout or installation that a script would import.

    It is the script's own folder where nothing supported can be imported.
    """
    files = {patch.recognition.file for patch in load_catalog()}
    for package in sorted({PurePosixPath(file).parts[0] for file in files}):
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            root = Path(folder).parent
            if any((root / file).is_file() for file in files):
                return root
    return script.resolve().parent


class _PatchedModules(SourceLoader):
    """Finds and loads the modules that a checkout has unpatched, or lacks.

    Compiled files are neither read nor left, as they belong to the file.
    """

    def __init__(self, found: Checkout) -> None:
        other = found.other if found.state is State.STOCK else {}
        self._files = {_module_name(path): str(found.root / path) for path in other}
        self._sources = {str(found.root / path): text or b"" for path, text in other.items()}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._files:
            return None
        return importlib.util.spec_from_file_location(fullname, self._files[fullname], loader=self)

    def get_filename(self, fullname: str) -> str:
        return self._files[fullname]

    def get_data(self, path: str | bytes) -> bytes:
        return self._sources[str(path)]

    def exec_module(self, module: ModuleType) -> None:
        file = self._files[module.__name__]
        source = self._sources[file]
        lines = importlib.util.decode_source(source).splitlines(keepends=True)
        # For tracebacks; without a time, it is not held against the file.
        linecache.cache[file] = (len(source), None, lines, file)
        super().exec_module(module)


def _module_name(path: str) -> str:
    file = PurePosixPath(path)
    if file.suffix != ".py":
        raise PatchError(
            "The patch changes more than Python modules, so it cannot be attached",
            value=path,
            remedy="Run `envpipe patch apply` on a copy of the checkout",
        )
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _without_ours(words: Sequence[str]) -> list[str]:
    """Return a script's arguments without `--envpipe`, `--envpipe-...` and their values."""
    kept = []
    is_ours = False
    for word in words:
        if word.startswith("--"):
            is_ours = word.startswith("--envpipe")
        if not is_ours:
            kept.append(word)
    return kept


def main() -> None:
    """Attach the hooks to what the script will import, and run it."""
    parser = argparse.ArgumentParser(
        prog="python -m envpipe_megatron.attach",
        description="Run a script of Megatron-LM with EnvPipe's hooks; no file is changed.",
        allow_abbrev=False,
    )
    parser.add_argument("--tag", help="take the patch for this tag, as for a fork")
    parser.add_argument("script", type=Path, help="such as pretrain_gpt.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    options = parser.parse_args()
    if not options.script.exists():  # else a patch may seem not to fit
        parser.error(f"there is no script {options.script}")
    if not sys.flags.safe_path:  # else Python puts no folder there
        sys.path[0] = str(options.script.resolve().parent)
    sys.argv = [str(options.script), *options.arguments]
    where = ""
    try:
        checkout = _imported_checkout(options.script)
        where = f"\nThe script would import it from {checkout}"
        attach(checkout, tag=options.tag)
    except GitError as error:
        with suppress(OSError):  # a log that takes no lines
            print(f"Warning: this job runs without EnvPipe. {error}", file=sys.stderr)
        sys.argv[1:] = _without_ours(options.arguments)
    except EnvPipeError as error:
        sys.exit(f"Error: {error}{where}")
    # Before 3.13, Python itself shows lines of the files as they are stored.
    sys.excepthook = traceback.print_exception
    runpy.run_path(str(options.script), run_name="__main__")


if __name__ == "__main__":
    main()
