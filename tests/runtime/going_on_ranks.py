"""What the ranks of the tests of failing parts run: jobs in which something of EnvPipe's raises."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import memory_ranks

FINGERPRINT = {"hidden_size": 64}
MICROBATCHES = 5


@dataclass(frozen=True)
class Fault:
    """A call that raises.

    Args:
        target: `module:function` or `module:Class.method`, below `envpipe_megatron`.
        victim: the rank; None for all.
        error: what is raised.
        call: the number of the first call that raises.
    """

    target: str
    victim: int | None = 0
    error: type[BaseException] = ZeroDivisionError
    call: int = 1

    @contextmanager
    def on(self, rank: int) -> Iterator[None]:
        """While it lasts, the call raises on its victim."""
        if self.victim not in (None, rank):
            yield
            return
        path, name = self.target.rsplit("." if "." in self.target.split(":")[1] else ":", 1)
        owner = pkgutil.resolve_name(f"envpipe_megatron.{path}")
        original = getattr(owner, name)
        calls = 0

        def failing(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls >= self.call:
                raise self.error("of a test")
            return original(*arguments, **named)

        with patch.object(owner, name, failing):
            yield


def train(
    rank: int,
    root: Path,
    request: dict[str, Any],
    faults: tuple[Fault, ...] = (),
    capacities: tuple[int, ...] = (10**9,) * 3,
    profile_file: Path | None = None,
) -> memory_ranks.Told:
    """Train into the steady phase; the job can be started again."""
    with _all(faults, rank):
        return memory_ranks.train(
            rank,
            root,
            capacities,
            MICROBATCHES,
            request,
            profile_file,
            fingerprint=FINGERPRINT,
        )


@contextmanager
def _all(faults: tuple[Fault, ...], rank: int) -> Iterator[None]:
    if not faults:
        yield
        return
    with faults[0].on(rank), _all(faults[1:], rank):
        yield
