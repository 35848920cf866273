"""Runs by itself in a fresh interpreter: imports the patched modules and asks their hooks.

It reads the request (JSON: root, hooks), and gets the name of a file for the answers. It imports
nothing of EnvPipe, so that it sees what a training script sees which is started from the checkout.
"""

import builtins
import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from operator import attrgetter
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from unittest.mock import MagicMock

#: Comes with torch for GPUs only, and is called in kernels only, by no hook.
_GPU_ONLY = ("triton",)


def main() -> None:
    """Ask every hook of the request."""
    request = json.load(sys.stdin)
    root = request["root"]
    sys.path.insert(0, root)  # where a script's own folder is
    hooks = request["hooks"]
    stand_ins = StandIns({hook["module"].partition(".")[0] for hook in hooks})
    answers = [ask(hook, Path(root)) for hook in hooks]
    stood_in = sorted(stand_ins.imported)
    Path(sys.argv[1]).write_text(json.dumps([answers, stood_in]))


class StandIns:
    """Lets projects import packages for GPUs that are missing, with all that is asked of them.

    Others do not see them: torch looks for Triton itself, and does without. Tools of a checkout and
    tests on CPUs load this class from this file, by its path.

    Attributes:
        imported: the packages that a project has imported, and that are stood in for.
    """

    def __init__(self, projects: set[str]) -> None:
        self._names = {name for name in _GPU_ONLY if importlib.util.find_spec(name) is None}
        self.imported: set[str] = set()
        self._projects = projects
        self._import = builtins.__import__
        builtins.__import__ = self

    def __call__(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        """Do what `__import__` does, for every import statement."""
        importer = (globals or {}).get("__name__", "").partition(".")[0]
        package = name.partition(".")[0]
        if level or package not in self._names or importer not in self._projects:
            return self._import(name, globals, locals, fromlist, level)
        self.imported.add(package)
        return _NoKernels(__version__="9999")


class _NoKernels(MagicMock):
    """A package of kernels: its names may decorate, but no kernel starts, by `kernel[grid]`."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        del self.__getitem__


def ask(hook: dict[str, Any], root: Path) -> tuple[str, str]:
    """Return `outcome` and `detail` of one hook."""
    project = hook["module"].partition(".")[0]
    own = root / project
    found = importlib.util.find_spec(project)
    places = [*((found and found.submodule_search_locations) or ())]
    if places and not any(Path(place).resolve() == own for place in places):
        return "elsewhere", places[0]
    try:
        module = importlib.import_module(hook["module"])
    except Exception as error:
        return _failed_import(error, own)
    try:
        return _proven(hook, module)
    except Exception as error:
        return "not_live", f"asking it failed: {type(error).__name__}: {error}"


def _proven(hook: dict[str, Any], module: ModuleType) -> tuple[str, str]:
    attribute = hook["attribute"]
    if not hasattr(module, attribute):
        return "not_live", f"{module.__name__} has no {attribute}"
    for name in hook["used_in"]:
        if attribute not in _names(inspect.unwrap(attrgetter(name)(module)).__code__):
            return "not_live", f"{name} does not use {attribute}"
    if hook["returned_by"]:
        for step in hook["prepare"]:
            place, _, function = step["call"].partition(":")
            getattr(importlib.import_module(place), function)(*step["arguments"])
        mark = object()
        before = getattr(module, attribute)
        setattr(module, attribute, lambda *_, **__: mark)
        try:
            returned = attrgetter(hook["returned_by"])(module)(*hook["arguments"])
        finally:
            setattr(module, attribute, before)
        if returned is not mark:
            return "not_live", f"{hook['returned_by']} does not ask {attribute}"
    return "live", str(module.__file__)


def _failed_import(error: Exception, own: Path) -> tuple[str, str]:
    """Tell a package that is missing or broken here from what is wrong in the checkout."""
    said = f"{type(error).__name__}: {error}"
    package = (getattr(error, "name", None) or "").partition(".")[0]
    if package in sys.stdlib_module_names:
        version = ".".join(map(str, sys.version_info[:2]))
        return "import_failed", f"{said}; this is Python {version}"
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    is_own = package == own.name or isinstance(error, SyntaxError)
    if is_own or (not package and Path(last).resolve().is_relative_to(own)):
        return "import_failed", said
    if isinstance(error, ModuleNotFoundError):
        return "dependency", package
    return "dependency", f"{package or last} ({said})"


def _names(code: CodeType) -> set[str]:
    inner = (_names(part) for part in code.co_consts if isinstance(part, CodeType))
    return {*code.co_names}.union(*inner)


if __name__ == "__main__":
    main()
