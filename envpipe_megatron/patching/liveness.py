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

from envpipe_megatron.patching.catalog import Hook

#: Importing a framework from a cold network disk takes minutes; a hang should still end.
_TIMEOUT_S = 600
_SHOWN_CHARACTERS = 2000
#: Where pip knows a package by another name than its module's.
_PIP_NAMES = {"yaml": "pyyaml", "transformer_engine": "transformer-engine[pytorch]"}
#: NVIDIA Apex and its extensions; what PyPI calls apex is something else.
_APEX = {"apex", "amp_C"}


class Outcome(StrEnum):
    """What became of a hook that was asked."""

    LIVE = "live"
    NOT_LIVE = "not_live"
    ELSEWHERE = "elsewhere"
    DEPENDENCY = "dependency"
    IMPORT_FAILED = "import_failed"


@dataclass(frozen=True)
class Answer:
    """What a hook answered.

    Attributes:
        hook: the hook.
        outcome: whether it is live, or why that is not known.
        detail: the file that the module came from, the dependency, or the error.
        needs: part of a remedy: the missing packages, or which Python the checkout asks for, where
            this one is too old.
    """

    hook: Hook
    outcome: Outcome
    detail: str
    needs: str = ""

    @property
    def remedy(self) -> str:
        """What to do about it; empty for a live hook."""
        if self.outcome is Outcome.LIVE:
            return ""
        package = self.hook.module.partition(".")[0]
        return {
            Outcome.NOT_LIVE: "Revert and apply the patch again",
            Outcome.ELSEWHERE: (
                f"Another {package} is installed and wins over the checkout, so the patch would "
                "do nothing: uninstall it, or take it out of PYTHONPATH"
            ),
            Outcome.DEPENDENCY: f"In this Python environment {self.needs or 'install it'}; "
            "then check again",
            Outcome.IMPORT_FAILED: "Make this import work first" + self.needs,
        }[self.outcome]


def ask_hooks(root: Path, hooks: Sequence[Hook], name: str = "the checkout") -> tuple[Answer, ...]:
    """Ask hooks in a fresh interpreter that has the checkout first on its path.

    Nothing is written to the checkout.

    Args:
        root: the checkout.
        hooks: what to ask.
        name: the checkout's, for messages.

    Returns:
        An answer for each hook, in order.
    """
    with tempfile.TemporaryDirectory() as folder:
        request, answers = Path(folder, "request.json"), Path(folder, "answers.json")
        document = {"root": str(root.resolve()), "hooks": [asdict(hook) for hook in hooks]}
        request.write_text(json.dumps(document))
        probe = Path(__file__).with_name("probe.py")
        command = [sys.executable, "-B", str(probe), str(request), str(answers)]
        try:
            done = subprocess.run(
                command,
                cwd=root,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return _none(hooks, f"importing took more than {_TIMEOUT_S} s")
        if done.returncode or not answers.exists():
            how = f"Python ended with {_exit(done.returncode)}"
            return _none(hooks, f"{how}: {done.stdout[-_SHOWN_CHARACTERS:].strip()}")
        found, missing = json.loads(answers.read_text())
    needs = {
        Outcome.IMPORT_FAILED: _newer_python(root, name),
        Outcome.DEPENDENCY: _to_install(missing),
    }
    return tuple(
        Answer(
            hook, outcome := Outcome(answer["outcome"]), answer["detail"], needs.get(outcome, "")
        )
        for hook, answer in zip(hooks, found, strict=True)
    )


def _to_install(missing: Sequence[str]) -> str:
    """Say how modules that are missing are installed; empty where none is."""
    names = [_PIP_NAMES.get(name, name) for name in missing if name not in _APEX]
    return " and ".join(
        [f"pip install {' '.join(names)}"] * bool(names)
        + ["build NVIDIA Apex from its source (PyPI's apex is something else)"]
        * bool(_APEX & set(missing))
    )


def _none(hooks: Sequence[Hook], reason: str) -> tuple[Answer, ...]:
    return tuple(Answer(hook, Outcome.IMPORT_FAILED, reason) for hook in hooks)


def _newer_python(root: Path, name: str) -> str:
    """Say which Python the checkout's own pyproject.toml asks for; empty where this one will do."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        least = re.search(r">=\s*(\d+)\.(\d+)", project["requires-python"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if least is None or (wanted := (int(least[1]), int(least[2]))) <= sys.version_info[:2]:
        return ""
    return f": {name} needs Python {wanted[0]}.{wanted[1]} or newer, as its pyproject.toml says"


def _exit(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
