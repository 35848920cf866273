"""Proves that a patch does something: imports the patched modules and asks each hook."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from envpipe_megatron.patching.catalog import Hook

#: Importing a framework from a cold network disk takes minutes; a hang should still end.
_TIMEOUT_S = 600
_SHOWN_CHARACTERS = 2000


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
        stood_in: packages for GPUs only that are missing here, in whose place the checkout's
            modules got a stand-in.
    """

    hook: Hook
    outcome: Outcome
    detail: str
    remedy: str
    stood_in: tuple[str, ...] = ()


def ask_hooks(root: Path, hooks: Sequence[Hook]) -> tuple[Answer, ...]:
    """Ask hooks in a fresh interpreter that has the checkout first on its path; answers in order.

    Nothing is written to the checkout.
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
        failed: Any = [[(Outcome.IMPORT_FAILED, failure)] * len(hooks), []]
        found, stood_in = json.loads(answers.read() or "null") or failed
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
            Outcome.DEPENDENCY: "Install it in this Python environment; then check again",
            Outcome.IMPORT_FAILED: "Make this import work first",
        }[outcome]
        answered.append(Answer(hook, Outcome(outcome), detail, remedy, tuple(stood_in)))
    return tuple(answered)
