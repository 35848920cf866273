"""Jobs of frameworks without ranks, a GPU or a session, which say what they are told."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest

from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.integrations import leveled
from envpipe_megatron.integrations.hooking import Hooks
from envpipe_megatron.integrations.job import WithoutEnvPipeError
from envpipe_megatron.integrations.leveled import LeveledJob
from envpipe_megatron.runtime.job.options import JobOptions


class FakeJob:
    """Notes at what level its session was opened, says so, and what of it was closed."""

    def __init__(
        self, options: JobOptions, *, decision: Any, notes: Any, say: Any, **_: Any
    ) -> None:
        if options.gpu_control == "none":
            raise WithoutEnvPipeError("NVML is not there")
        self.options, self.level = options, decision.level
        self.closed = False
        state = SimpleNamespace(notes=tuple(notes), given=None, profile=None, phase=Phase.WARMUP)
        self.session: Any = Mock(state=state)
        self.session.parts.say = say
        say(f"{decision}; active")
        self.session.parts.channel.close = self._close

    def _close(self) -> None:
        self.closed = True


def given(**options: Any) -> JobOptions:
    """Options by name; all others as they are where nothing is given."""
    return JobOptions(**options)


@contextmanager
def jobs_are_faked() -> Iterator[list[FakeJob]]:
    """Leveled jobs make fake ones, which are yielded, and have no replicas."""
    made: list[FakeJob] = []

    def open_job(*args: Any, **kwargs: Any) -> Any:
        made.append(FakeJob(*args, **kwargs))
        return made[-1].session

    with (
        patch.object(leveled, "limits_of_replicas", lambda count: []),
        patch.object(leveled, "open_job", open_job),
    ):
        yield made


def begin(
    of: Any = LeveledJob, options: JobOptions | None = None, limits: Any = ()
) -> tuple[Any, list[FakeJob], list[str]]:
    """A job of a class that is a `LeveledJob`, the jobs that it makes, and what it says."""
    said: list[str] = []
    job = object.__new__(of)
    framework: Any = SimpleNamespace(num_microbatches=4, bill={})
    with jobs_are_faked() as made:
        LeveledJob.__init__(job, options or given(), framework, said.append, limits)
    return job, made, said


def fresh_hooks(module: Any, monkeypatch: pytest.MonkeyPatch) -> Hooks[Any]:
    """The state of a patch's hooks that nothing has called, which its module has from here on."""
    made = Hooks[Any](module._hooks._file, *module._hooks._needed)
    monkeypatch.setattr(module, "_hooks", made)
    return made
