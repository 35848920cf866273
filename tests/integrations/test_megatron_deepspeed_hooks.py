"""Megatron-DeepSpeed's hooks: what is not reached ends the job, what is not run is refused."""

import argparse
import json
import sys
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from envpipe_megatron.integrations.levels import JobError

pytest.importorskip("deepspeed")

from deepspeed.runtime.pipe.engine import PipelineEngine
from leveled_jobs import begin, fresh_hooks

from envpipe_megatron.integrations.deepspeed.engine import EnvPipeEngine
from envpipe_megatron.integrations.leveled import LeveledJob
from envpipe_megatron.integrations.megatron_deepspeed import hooks
from envpipe_megatron.integrations.megatron_deepspeed.hooks import (
    REFUSED,
    check_supported,
)
from envpipe_megatron.integrations.options import add_arguments
from envpipe_megatron.runtime.job.options import JobOptions

LOG_INTERVAL = 4


@pytest.fixture
def job(monkeypatch):
    """A job that has begun."""
    state = fresh_hooks(hooks, monkeypatch)
    report = SimpleNamespace(
        scalars=lambda: {"envpipe-power/gpu": 300.0}, line=lambda: " envpipe |"
    )
    made = Mock(report=Mock(return_value=report))
    made.log.side_effect = partial(LeveledJob.log, made)
    state.options, state.job, state.needed_by = SimpleNamespace(), made, LOG_INTERVAL  # type: ignore[assignment]
    return made


def asked(job):
    """Return what the hooks have asked of the job."""
    return [name for name, *_ in job.mock_calls]


def writer(*, enabled, written=None):
    return SimpleNamespace(
        is_enabled=lambda: enabled,
        add_scalar=lambda *scalar: written.append(scalar) if written is not None else None,
    )


def steps(count, *, logged=True):
    for step in range(1, count + 1):
        hooks.end_step()
        if logged and step % LOG_INTERVAL == 0:
            hooks.log(step, writer(enabled=False))


def test_all_hooks_reached(job):
    steps(2 * LOG_INTERVAL + 1)
    assert asked(job) == ["log", "report"] * 2


def test_a_log_line_that_lacks_the_energy_is_told_once(job, caplog):
    steps(LOG_INTERVAL, logged=False)
    assert not caplog.records
    steps(2 * LOG_INTERVAL, logged=False)
    (told,) = caplog.messages
    assert "by iteration 4: log. Training goes on" in told


def test_steps_that_are_not_ended_are_told_at_the_second_log_line(job, caplog):
    for line in range(1, 4):
        assert len(caplog.messages) == (line > 2), "once"
        hooks.log(line * LOG_INTERVAL, writer(enabled=False))
    assert "by iteration 4: end_step. Training goes on" in caplog.text


def test_scalars_go_to_the_writer_that_is_enabled(job):
    written: list[Any] = []
    assert hooks.log(7, writer(enabled=False, written=written)) == " envpipe |"
    assert written == []
    hooks.log(8, writer(enabled=True, written=written))
    assert written == [("envpipe-power/gpu", 300.0, 8)]


def test_the_engine_is_deepspeeds_own_after_training(job, monkeypatch):
    def begin(engine, *_, **__):
        engine.__class__ = EnvPipeEngine
        return job

    own = object.__new__(PipelineEngine)
    hooks._hooks.job = None
    monkeypatch.setattr(hooks, "begin", begin)
    monkeypatch.setattr(hooks, "check_model", lambda model: None)
    monkeypatch.setattr(hooks, "deepspeed_config", lambda args: {})
    args: Any = SimpleNamespace(log_interval=LOG_INTERVAL, seq_length=32)
    hooks.begin_training(args, [own])
    assert type(own) is EnvPipeEngine
    hooks.end_training()
    assert asked(job) == ["end"]
    assert type(own) is PipelineEngine


def test_a_model_without_deepspeeds_pipeline_is_refused(monkeypatch):
    model = SimpleNamespace(GPTModelPipe=type("GPTModelPipe", (), {}))
    monkeypatch.setitem(sys.modules, "megatron.model", model)
    with pytest.raises(JobError, match="other than GPTModelPipe"):
        hooks.check_model([SimpleNamespace(module=object())])


# --- what is refused ------------------------------------------------------------------------------


def supported(**changed):
    """Arguments of a job that is run."""
    return argparse.Namespace(
        **{
            "deepspeed": True,
            "deepspeed_config": {"train_batch_size": 8, "wall_clock_breakdown": False},
            "pipeline_model_parallel_size": 4,
            "no_pipeline_parallel": False,
            "num_experts": [1],
            "ds_sequence_parallel_size": 1,
            **changed,
        }
    )


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, None),
        ({"deepspeed_config": {"curriculum_learning": {"enabled": False}}}, None),
        ({"pipeline_model_parallel_size": 1}, "needs a pipeline"),
        ({"deepspeed": False}, "no --deepspeed"),
        ({"envpipe_level": "units"}, "--envpipe-level"),
        ({"no_pipeline_parallel": True}, "--no-pipeline-parallel"),
        ({"num_experts": [1, 8]}, "mixture of experts"),
        ({"kd": True}, "--kd"),
        ({"enable_zbh1_pipeline": True}, "--enable-zbh1-pipeline"),
        ({"pipeline_model_parallel_split_rank": 0}, "split rank"),
        ({"deepspeed_config": {"curriculum_learning": {"enabled": True}}}, "curriculum"),
        ({"deepspeed_config": {"compression_training": {"sparse": {}}}}, "compression"),
        ({"deepspeed_config": {"wall_clock_breakdown": True}}, "wall_clock_breakdown"),
    ],
)
def test_features_are_refused_by_name(changed, named):
    with pytest.raises(JobError, match=named) if named else nullcontext():
        check_supported(supported(**changed))


def test_the_configuration_of_deepspeed_is_read_from_its_file(tmp_path):
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps({"elasticity": {"enabled": True}}))
    with pytest.raises(JobError, match="elasticity"):
        check_supported(supported(deepspeed_config=str(path)))
    path.write_text("{")
    for given in (path, tmp_path / "none.json"):
        with pytest.raises(JobError, match=f"cannot be read.*{given.name}"):
            check_supported(supported(deepspeed_config=str(given)))


def test_what_is_wrong_is_told_without_a_stack(monkeypatch, capsys):
    fresh_hooks(hooks, monkeypatch)
    monkeypatch.setattr("sys.argv", ["/somewhere/pretrain_gpt.py"])
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        hooks.validate(supported(random_ltd=True))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("pretrain_gpt.py: error: Under --envpipe, these are refused")


def test_options_are_read_from_the_arguments(monkeypatch, tmp_path):
    fresh_hooks(hooks, monkeypatch)
    monkeypatch.setattr("sys.argv", ["/somewhere/pretrain_gpt.py"])
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_argument_group())
    args = parser.parse_args(["--envpipe-type", "uniform"], supported(save=str(tmp_path)))
    hooks.validate(args)
    assert hooks._hooks.options is not None
    assert hooks._hooks.options.type == "uniform"
    assert hooks._hooks.options.output == tmp_path / "envpipe"


def test_the_user_guide_lists_what_is_refused():
    guide = (Path(__file__).parents[2] / "docs" / "start" / "megatron_deepspeed.md").read_text()
    assert not [feature for feature in REFUSED if f"- {feature}\n" not in guide]


def test_a_job_that_trains_without_envpipe_has_deepspeeds_engine(monkeypatch):
    # The package has a function of its name.
    initialize = import_module("envpipe_megatron.integrations.deepspeed.initialize")
    own = object.__new__(PipelineEngine)
    own.__dict__.update(micro_batches=4, grid=Mock(), dynamic_shape=False)
    own.__dict__["gradient_accumulation_steps"] = lambda: 4
    fresh_hooks(hooks, monkeypatch).options = SimpleNamespace()  # type: ignore[assignment]
    for name in ("validate", "begin_training"):
        hooks._hooks.note(name)
    for name in ("not_run", "_framework_job"):
        monkeypatch.setattr(initialize, name, lambda *arguments: None)
    without, *_ = begin(options=JobOptions(gpu_control="none"))
    monkeypatch.setattr(initialize, "LeveledJob", lambda *arguments: without)
    monkeypatch.setattr(hooks, "check_model", lambda model: None)
    monkeypatch.setattr(hooks, "deepspeed_config", lambda args: {})
    args: Any = SimpleNamespace(log_interval=LOG_INTERVAL, seq_length=32)
    hooks.begin_training(args, [own])
    steps(LOG_INTERVAL + 1)
    assert hooks.log(8, writer(enabled=True)) == ""
    hooks.end_training()
    assert type(own) is PipelineEngine
    initialize.end_training(own)
