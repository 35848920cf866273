"""Hooks that are not reached end the job; those of a closed job do no harm."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron.core.models.gpt import GPTModel

from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.integrations.hooking import HookError
from envpipe_megatron.integrations.job import Job, JobError
from envpipe_megatron.integrations.megatron_lm import hooks


class FakeSession:
    """Notes what the hooks tell it."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.state = SimpleNamespace(profile=None, phase=Phase.WARMUP, notes=("no meter",))

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: self.told.append(" ".join((name, *map(str, args))))


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job that has begun: arguments validated, training begun."""
    session = FakeSession()
    made = SimpleNamespace(
        session=session,
        options=SimpleNamespace(profile_only=False),
        close=lambda: session.told.append("close"),
    )
    made.has_its_profile = lambda: Job.has_its_profile(made)  # type: ignore[arg-type]
    state = hooks._State(job=made, reached=Counter({"validate": 1, "begin_training": 1}))
    monkeypatch.setattr(hooks, "_state", state)
    monkeypatch.setattr(
        hooks.IntervalReport,
        "gather",
        lambda session: SimpleNamespace(
            scalars=lambda: {"envpipe-power/gpu": 300.0}, line=lambda: " envpipe |"
        ),
    )
    return made


def steps(count: int, *, without: str = "") -> None:
    """As Megatron's loop calls the hooks, but for one of them."""
    forward_backward = hooks._reaching(lambda **arguments: arguments)
    for iteration in range(count):
        if without != "begin_step":
            hooks.begin_step(iteration)
        if without != "forward_backward":
            arguments = {"model": [object.__new__(GPTModel)], "forward_only": False}
            assert forward_backward(**arguments) == arguments
        if without != "end_step":
            hooks.end_step(0)
        if without != "log":
            hooks.log(iteration, None, None)


def test_all_hooks_reached(job: Any) -> None:
    steps(5)
    assert job.session.told == [text for n in range(5) for text in (f"begin_step {n}", "end_step")]


@pytest.mark.parametrize("hook", ["begin_step", "forward_backward", "end_step", "log"])
def test_one_that_is_never_reached_ends_the_job(job: Any, hook: str) -> None:
    steps(2, without=hook)
    with pytest.raises(HookError, match=rf"not reached by iteration 3 .*{hook}"):
        steps(2, without=hook)


def test_scalars_go_to_both_writers(job: Any) -> None:
    written: list[Any] = []
    tensorboard = SimpleNamespace(add_scalar=lambda *scalar: written.append(scalar))
    wandb = SimpleNamespace(log=lambda *scalar: written.append(scalar))
    assert hooks.log(7, tensorboard, wandb) == " envpipe |"
    assert written == [("envpipe-power/gpu", 300.0, 7), ({"envpipe-power/gpu": 300.0}, 7)]


def test_a_checkpoint_pauses_and_one_after_training_does_not(job: Any) -> None:
    hooks.pause()
    hooks._close()
    hooks.pause()
    assert job.session.told == ["pause", "close"]
    with pytest.raises(HookError, match="outside training"):
        hooks.end_step(0)


def test_arguments_that_were_not_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_state", hooks._State())
    with pytest.raises(HookError, match="came from elsewhere"):
        hooks.begin_training(SimpleNamespace())  # type: ignore[arg-type]


def test_an_unpatched_megatron_core_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.pipeline_parallel import schedules

    monkeypatch.delattr(schedules, "envpipe_hook", raising=False)
    with pytest.raises(HookError, match=r"not patched .*schedules\.py"):
        hooks._hooked_schedules()


def test_a_job_for_the_profile_alone_that_gets_none(job: Any) -> None:
    job.options.profile_only = True
    job.session.state.phase = Phase.STEADY
    with pytest.raises(JobError, match="no profile to write: no meter"):
        steps(1)


def test_what_is_wrong_is_told_once_a_node_and_without_a_stack(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hooks, "_state", hooks._State())
    monkeypatch.setattr("sys.argv", ["/somewhere/pretrain_gpt.py"])
    for local_rank, told in (
        ("0", "pretrain_gpt.py: error: --envpipe needs a pipeline"),
        ("1", ""),
    ):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(SystemExit) as ended:
            hooks.validate(SimpleNamespace(pipeline_model_parallel_size=1))  # type: ignore[arg-type]
        assert ended.value.code == 2
        assert capsys.readouterr().err[: len(told) or None] == told


def test_megatrons_energy_monitor_asks_for_no_device_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask() -> None:
        raise AssertionError("a null handle")

    monitor = SimpleNamespace(pause=ask, resume=ask)
    variables = SimpleNamespace(get_energy_monitor=lambda: monitor)
    monkeypatch.setitem(sys.modules, "megatron.training", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", variables)
    hooks._quiet_energy_monitor()
    monitor.pause()
    monitor.resume()
