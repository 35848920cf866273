"""Proves that a patch does something: imports the patched modules and asks their hooks.

`ask_hooks` runs this file by itself in a fresh interpreter. There it imports nothing of EnvPipe, so
that it sees what a training script sees which is started from the checkout.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import inspect
import json
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from unittest.mock import MagicMock

#: Comes with torch for GPUs only, and is called in kernels only, by no hook.
_GPU_ONLY = ("triton",)
#: Importing a framework from a cold network disk takes minutes; a hang should still end.
_TIMEOUT_S = 600
_SHOWN_CHARACTERS = 2000


class Outcome(StrEnum):
    """Result of asking a hook, for people."""

    LIVE = "live"
    NOT_LIVE = "NOT LIVE"
    ELSEWHERE = "NOT LIVE, comes from elsewhere"
    DEPENDENCY = "not proven, the framework needs a package"
    IMPORT_FAILED = "NOT LIVE, import failed"


@dataclass(frozen=True)
class Answer:
    """A hook's answer.

    Attributes:
        hook: its module and attribute.
        detail: the module's file, the dependency, or the error.
        stood_in: packages for GPUs only that are missing here, in whose place the checkout's
            modules got a stand-in.
    """

    hook: str
    outcome: Outcome
    detail: str
    remedy: str
    stood_in: tuple[str, ...] = ()


def ask_hooks(root: Path, hooks: Sequence[dict[str, Any]]) -> tuple[Answer, ...]:
    """Ask hooks in a fresh interpreter that has the checkout first on its path; answers in order.

    They are as `Patch` has them. Nothing is written to the checkout.
    """
    request = json.dumps({"root": str(root.resolve()), "hooks": hooks})
    with tempfile.NamedTemporaryFile() as answers:
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-B", __file__, answers.name],
                cwd=root,
                input=request,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                check=False,
            )
            code = done.returncode
            how = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
            failure = f"Python ended with {how}: {done.stdout[-_SHOWN_CHARACTERS:].strip()}"
        except subprocess.TimeoutExpired:
            failure = f"importing took more than {_TIMEOUT_S} s"
        failed: Any = [[(Outcome.IMPORT_FAILED, failure)] * len(hooks), []]
        found, stood_in = json.loads(answers.read() or "null") or failed
    answered = []
    for hook, (outcome, detail) in zip(hooks, found, strict=True):
        package, name = hook["module"].partition(".")[0], f"{hook['module']}.{hook['attribute']}"
        remedy = {
            Outcome.LIVE: "",
            Outcome.NOT_LIVE: "Revert and apply the patch again",
            Outcome.ELSEWHERE: (
                f"Another {package} is installed and wins over the checkout, so the patch would "
                "do nothing: uninstall it, or take it out of PYTHONPATH"
            ),
            Outcome.DEPENDENCY: "Install it in this Python environment; then check again",
            Outcome.IMPORT_FAILED: "Make this import work first",
        }[outcome]
        answered.append(Answer(name, Outcome(outcome), detail, remedy, tuple(stood_in)))
    return tuple(answered)


def main() -> None:
    """Read a request (JSON: root, hooks), and write answers to the file that an argument names."""
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


def ask(hook: dict[str, Any], root: Path) -> tuple[Outcome, str]:
    """Return outcome and detail of one hook."""
    project = hook["module"].partition(".")[0]
    own = root / project
    found = importlib.util.find_spec(project)
    places = [*((found and found.submodule_search_locations) or ())]
    if places and not any(Path(place).resolve() == own for place in places):
        return Outcome.ELSEWHERE, places[0]
    try:
        module = importlib.import_module(hook["module"])
    except Exception as error:
        return _failed_import(error, own)
    try:
        return _proven(hook, module)
    except Exception as error:
        return Outcome.NOT_LIVE, f"asking it failed: {type(error).__name__}: {error}"


def _proven(hook: dict[str, Any], module: ModuleType) -> tuple[Outcome, str]:
    attribute = hook["attribute"]
    if not hasattr(module, attribute):
        return Outcome.NOT_LIVE, f"{module.__name__} has no {attribute}"
    for name in hook.get("used_in", ()):
        if attribute not in _names(inspect.unwrap(attrgetter(name)(module)).__code__):
            return Outcome.NOT_LIVE, f"{name} does not use {attribute}"
    return Outcome.LIVE, str(module.__file__)


def _failed_import(error: Exception, own: Path) -> tuple[Outcome, str]:
    """Tell a package that is missing or broken here from what is wrong in the checkout."""
    said = f"{type(error).__name__}: {error}"
    package = (getattr(error, "name", None) or "").partition(".")[0]
    if package in sys.stdlib_module_names:
        version = ".".join(map(str, sys.version_info[:2]))
        return Outcome.IMPORT_FAILED, f"{said}; this is Python {version}"
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    is_own = package == own.name or isinstance(error, SyntaxError)
    if is_own or (not package and Path(last).resolve().is_relative_to(own)):
        return Outcome.IMPORT_FAILED, said
    if isinstance(error, ModuleNotFoundError):
        return Outcome.DEPENDENCY, package
    return Outcome.DEPENDENCY, f"{package or last} ({said})"


def _names(code: CodeType) -> set[str]:
    inner = (_names(part) for part in code.co_consts if isinstance(part, CodeType))
    return {*code.co_names}.union(*inner)


if __name__ == "__main__":
    main()
