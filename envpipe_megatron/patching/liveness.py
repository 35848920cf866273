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

from envpipe_megatron.patching.catalog import Hook

#: Importing a framework from a cold network disk takes minutes; a hang should still end.
_TIMEOUT_S = 600
_SHOWN_CHARACTERS = 2000


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
    """

    hook: Hook
    outcome: Outcome
    detail: str

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
            Outcome.DEPENDENCY: "Install it in this Python environment, then check again",
            Outcome.IMPORT_FAILED: "Make this import work first",
        }[self.outcome]


def ask_hooks(root: Path, hooks: Sequence[Hook]) -> tuple[Answer, ...]:
    """Ask hooks in a fresh interpreter that has the checkout first on its path.

    Nothing is written to the checkout.

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
        found = json.loads(answers.read_text())
    return tuple(
        Answer(hook, Outcome(answer["outcome"]), answer["detail"])
        for hook, answer in zip(hooks, found, strict=True)
    )


def _none(hooks: Sequence[Hook], reason: str) -> tuple[Answer, ...]:
    return tuple(Answer(hook, Outcome.IMPORT_FAILED, reason) for hook in hooks)


def _exit(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
