"""Proves that a patch does something: imports the patched modules and asks each hook."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from envpipe_megatron.patching.catalog import Hook

#: Importing a framework from a cold network disk takes minutes; a hang should still end.
_TIMEOUT_S = 600
_SHOWN_CHARACTERS = 2000
#: Where pip knows a package by another name than its module's.
_PIP_NAMES = {"yaml": "pyyaml", "transformer_engine": "transformer-engine[pytorch]"}
#: NVIDIA Apex and its extensions; what PyPI calls apex is something else.
_APEX = {"apex", "amp_C"}


class Outcome(StrEnum):
    """Result of asking a hook."""

    LIVE = "live"
    NOT_LIVE = "not_live"
    ELSEWHERE = "elsewhere"
    DEPENDENCY = "dependency"
    IMPORT_FAILED = "import_failed"


@dataclass(frozen=True)
class Answer:
    """A hook's answer.

    Attributes:
        detail: the module's file, the dependency, or the error.
        stood_in: packages for GPUs alone that are missing here, in whose place the checkout's
            modules got a stand-in.
    """

    hook: Hook
    outcome: Outcome
    detail: str
    remedy: str
    stood_in: tuple[str, ...] = ()


def ask_hooks(root: Path, hooks: Sequence[Hook], name: str = "the checkout") -> tuple[Answer, ...]:
    """Ask hooks in a fresh interpreter that has the checkout first on its path; answers in order.

    Nothing is written to the checkout, which messages call `name`.
    """
    request = json.dumps({"root": str(root.resolve()), "hooks": [asdict(hook) for hook in hooks]})
    with tempfile.NamedTemporaryFile() as answers:
        probe = Path(__file__).with_name("probe.py")
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-B", str(probe), answers.name],
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
        failed: Any = [[(Outcome.IMPORT_FAILED, failure)] * len(hooks), [], []]
        found, missing, stood_in = json.loads(answers.read() or "null") or failed
    answered = []
    for hook, (outcome, detail) in zip(hooks, found, strict=True):
        package = hook.module.partition(".")[0]
        remedy = {
            Outcome.LIVE: "",
            Outcome.NOT_LIVE: "Revert and apply the patch again",
            Outcome.ELSEWHERE: (
                f"Another {package} is installed and wins over the checkout, so the patch would "
                "do nothing: uninstall it, or take it out of PYTHONPATH"
            ),
            Outcome.DEPENDENCY: (
                f"In this Python environment {_to_install(missing)}; then check again"
            ),
            Outcome.IMPORT_FAILED: f"Make this import work first{_newer_python(root, name)}",
        }[outcome]
        answered.append(Answer(hook, Outcome(outcome), detail, remedy, tuple(stood_in)))
    return tuple(answered)


def _to_install(missing: Sequence[str]) -> str:
    """Say how modules that are missing are installed."""
    steps = []
    if names := [_PIP_NAMES.get(name, name) for name in missing if name not in _APEX]:
        steps.append(f"pip install {' '.join(names)}")
    if _APEX & set(missing):
        steps.append("build NVIDIA Apex from its source (PyPI's apex is something else)")
    return " and ".join(steps) or "install it"


def _newer_python(root: Path, name: str) -> str:
    """Say which Python the checkout's own pyproject.toml asks for; empty if this one will do."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        least = re.search(r">=\s*(\d+)\.(\d+)", project["requires-python"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if least is None or (wanted := (int(least[1]), int(least[2]))) <= sys.version_info[:2]:
        return ""
    return f": {name} needs Python {wanted[0]}.{wanted[1]} or newer, as its pyproject.toml says"
