"""The block of EnvPipe in what `deepspeed.initialize` is called with, and layers split by time."""

import argparse
import itertools
import json
import math
from contextlib import suppress
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from envpipe_megatron.integrations.levels import JobError

pytest.importorskip("deepspeed")

import deepspeed
import numpy as np
import torch
from deepspeed.comm.config import DeepSpeedCommsConfig
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.activation_checkpointing.config import (
    DeepSpeedActivationCheckpointingConfig,
)
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import TrainSchedule
from leveled_jobs import begin

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.deepspeed import (
    initialize,
    layer_profile,
)
from envpipe_megatron.integrations.deepspeed.engine import (
    EnvPipeEngine,
    not_run,
)
from envpipe_megatron.integrations.deepspeed.initialize import (
    check_version,
    parsed_config,
    settings_of,
)
from envpipe_megatron.integrations.hooking import BETWEEN_STEPS
from envpipe_megatron.integrations.levels import Level
from envpipe_megatron.runtime.memory.peak import MemoryFullError
from envpipe_megatron.search.layer_file import read_layers
from envpipe_megatron.search.layer_profile import Measure, Sizes
from envpipe_megatron.search.partition import make_parts

CONFIG = {"train_batch_size": 4, "envpipe": {"type": "uniform", "gpu": "a40"}}
PLAIN = {"train_batch_size": 4}


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps(CONFIG))
    return str(file)


@pytest.mark.parametrize("place", ["config", "config_params", "file", "args", "args' file"])
def test_the_block_is_found_where_deepspeed_looks(place, path):
    given: dict[str, Any] = {
        "config": {"config": CONFIG},
        "config_params": {"config_params": CONFIG},
        "file": {"config": path},
        "args": {"args": argparse.Namespace(deepspeed_config=CONFIG, local_rank=1)},
        "args' file": {"args": argparse.Namespace(deepspeed_config=path, local_rank=1)},
    }[place]
    assert settings_of(parsed_config(given), None) == {"type": "uniform", "gpu": "a40"}


@pytest.mark.parametrize(
    ("config", "given", "settings"),
    [
        (PLAIN, None, None),
        (CONFIG, {"type": "optimal"}, {"type": "optimal", "gpu": "a40"}),
        (CONFIG, True, {"type": "uniform", "gpu": "a40"}),
        (CONFIG, False, None),
        (PLAIN, {}, {}),
    ],
)
def test_the_call_goes_before_the_block(config, given, settings):
    assert settings_of(config, given) == settings


@pytest.mark.parametrize("block", ["envelope", ["envelope"], True])
def test_a_block_that_is_no_table(block):
    with pytest.raises(JobError, match="table"):
        settings_of({"envpipe": block}, None)


def test_without_envpipe_deepspeed_is_called_as_it_is(monkeypatch):
    seen: list[dict[str, Any]] = []

    def fake(args=None, model=None, config=None):
        seen.append({"args": args, "model": model, "config": config})
        return "engine", "optimizer", "loader", "scheduler"

    monkeypatch.setattr(deepspeed, "initialize", fake)
    assert initialize(None, "a model", config=PLAIN)[0] == "engine"
    assert initialize(model="a model", config=CONFIG, envpipe=False)[0] == "engine"
    assert [each["config"] for each in seen] == [PLAIN, CONFIG]


def test_deepspeed_does_not_mind_the_block():
    assert DeepSpeedConfig(CONFIG).train_batch_size == 4


def test_a_job_is_told_from_another_by_each_setting_of_its_own(monkeypatch):
    """So that a restart names the one that has changed, in place of all of them."""
    module = import_module("envpipe_megatron.integrations.deepspeed.initialize")
    monkeypatch.setattr(module, "dist", Mock())
    engine = Mock(module=torch.nn.Linear(2, 2), device="cpu", train_batch_size=Mock(return_value=4))
    engine.module.parts, engine.module.activation_checkpoint_interval = [0, 1], 0
    facts = module._framework_job(engine, CONFIG | {"bf16": {"enabled": True}}, None).same_job
    assert facts["deepspeed bf16"] == '{"enabled": true}'
    assert not any(
        "envpipe" in str(each) or each[0] == "deepspeed train_batch_size" for each in facts.items()
    )


def test_a_model_without_a_pipeline_is_refused():
    with pytest.raises(JobError, match=r"PipelineModule.*'Linear'"):
        initialize(model=torch.nn.Linear(1, 1), config=CONFIG)


@pytest.mark.parametrize("version", ["0.18.9", "0.19.6rc1", "0.20.0rc1", "1.0"])
def test_versions_that_were_not_tried(version, monkeypatch):
    check_version()
    monkeypatch.setattr(deepspeed, "__version__", version)
    with pytest.raises(JobError, match=f"'{version}'.*0.19.6"):
        check_version()


def with_checkpoints(name):
    return {"config": {"activation_checkpointing": {name: True}}}


@pytest.mark.parametrize(
    ("changes", "queues", "named"),
    [
        ({}, "1", ""),
        ({"num_stages": 1}, "8", "one stage"),
        ({"is_grad_partitioned": False}, "8", "activations partitioned and gradients not"),
        ({"dynamic_shape": True}, "8", ""),
        ({"dynamic_shape": True}, "1", "dynamic_shape with CUDA_DEVICE_MAX_CONN"),
        # What waits for the device in a unit.
        (with_checkpoints("synchronize_checkpoint_boundary"), "8", "wait for the"),
        (with_checkpoints("contiguous_memory_optimization"), "8", "contiguous"),
        ({"config": {"comms_logger": {"enabled": True}}}, "8", "comms_logger"),
        ({"grad_layer": []}, "8", "no gradient"),
    ],
)
def test_engines_that_are_not_run(changes, queues, named, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    found = not_run(an_engine(**changes))
    assert len(found) == bool(named)
    assert all(named in why for why in found)
    if not changes:  # checkpoints that were configured by themselves
        monkeypatch.setattr(checkpointing, "CONTIGUOUS_CHECKPOINTING", True)
        (why,) = not_run(an_engine())
        assert "contiguous" in why


def an_engine(config=None, **changes):
    """Return what is looked at of an engine that EnvPipe runs, but for some changes."""
    engine = object.__new__(PipelineEngine)
    fit = {
        "num_stages": 2,
        "is_pipe_partitioned": True,
        "is_grad_partitioned": True,
        "dynamic_shape": False,
        "grad_layer": None,
        "_config": SimpleNamespace(
            activation_checkpointing_config=DeepSpeedActivationCheckpointingConfig(config or {}),
            comms_config=DeepSpeedCommsConfig(config or {}),
        ),
    }
    engine.__dict__.update({**fit, **changes})
    return engine


@pytest.mark.parametrize("elsewhere", [None, (1, "seen on another rank")])
def test_what_is_set_late_leaves_all_steps_to_deepspeed(elsewhere):
    """On all ranks, in place of an error in training."""
    waits = {"activation_checkpointing": {"contiguous_memory_optimization": True}}
    engine = an_engine(None if elsewhere else waits, _own_steps_left=0)
    engine.__class__ = EnvPipeEngine
    engine.job, made, said = begin()
    made[0].session.parts.collectives.first = lambda own: elsewhere or (0, own)
    engine._check_again()
    assert [job.level for job in made] == [Level.ORDER, Level.OBSERVE]
    assert ("another rank" if elsewhere else "contiguous") in said[-1]


def test_an_engine_of_another_class_keeps_it():
    class Own(PipelineEngine):  # type: ignore[misc]  # DeepSpeed has no types
        pass

    engine = an_engine()
    engine.__class__ = Own
    assert not_run(engine) == ["an engine of another class (Own)"]


def test_layers_are_measured_and_split_by_time(tmp_path, monkeypatch):
    norm = torch.nn.LayerNorm(4)
    layers = [
        TiedLayerSpec("embedding", torch.nn.Embedding, 7, 4),
        LayerSpec(torch.nn.Linear, 4, 4),
        norm,
        LayerSpec(torch.nn.Linear, 4, 4),
        TiedLayerSpec(
            "embedding",
            torch.nn.Embedding,
            7,
            4,
            forward_fn=lambda embedding, hidden: hidden @ embedding.weight.t(),
        ),
    ]
    forward_s = [0.001, 0.010, 0.001, 0.010, 0.030]
    times_s = iter(forward_s)

    def measure(forward, _gpu):
        layer_profile._backward(forward())
        time_s = np.array([next(times_s)])
        return Measure(time_s, 2 * time_s, 200 * time_s, 400 * time_s)

    monkeypatch.setattr(layer_profile, "measure", measure)
    words = torch.randint(7, (2, 5))
    path = tmp_path / "layers.json"

    def loss(outputs, labels):
        return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())

    layer_profile.profile_layers(layers, (words, words), loss, torch.device("cpu"), path)
    assert next(times_s, None) is None
    assert norm.weight.grad is None, "a copy was measured"
    measures, cut = read_layers(path).at(Sizes()), f"time:{path}"
    assert [float(each.forward_s[0]) for each in measures.values()] == forward_s
    backward_j = [float(each.backward_j[0]) for each in measures.values()]
    assert backward_j == pytest.approx([400 * time_s for time_s in forward_s])
    assert make_parts(cut, [1] * 5, 2) == [0, 4, 5], "the loss is heavy"
    assert make_parts(cut, [1] * 5, 3) == [0, 2, 4, 5]
    with pytest.raises(EnvPipeError, match="another model"):
        make_parts(cut, [1] * 6, 2)


@pytest.mark.parametrize("power_w", [200.0, math.nan])
def test_joules_of_a_layer_are_shared_out_by_time_where_a_meter_knows_them(monkeypatch, power_w):
    clock_s = itertools.count(0.0, 0.5)
    monkeypatch.setattr(layer_profile, "now_s", lambda: next(clock_s))
    monkeypatch.setattr(layer_profile, "_WINDOW_S", 0.0)
    gpu = SimpleNamespace(energies_j=lambda windows: [power_w * each.runs for each in windows])
    weight = torch.ones(1, requires_grad=True)
    measured = layer_profile.measure(lambda: (weight * 2, torch.ones(1)), gpu)
    assert (measured.forward_s, measured.backward_s) == ([0.5], [0.5])
    joules = None if math.isnan(power_w) else [100.0]
    assert (measured.forward_j, measured.backward_j) == (joules, joules)
    assert weight.grad == 4.0, "once to warm up, once measured"


@pytest.mark.parametrize("reshaped", [False, True])
def test_a_step_without_memory_for_messages_is_deepspeeds_and_so_are_those_after(
    monkeypatch, reshaped
):
    """Of the first shapes, or of longer samples than before."""

    def full(*arguments, **options):
        raise MemoryFullError("too little of a test")

    ran, steps = [], TrainSchedule(2, 2, 0)
    monkeypatch.setattr(PipelineEngine, "_exec_schedule", lambda engine, steps: ran.append(steps))
    monkeypatch.setattr(
        PipelineEngine, "train_batch", lambda engine, _: engine._exec_schedule(steps)
    )
    engine: Any = object.__new__(EnvPipeEngine)
    job, made, said = begin()
    setattr(made[0].session, "make_room" if reshaped else "run_iteration", full)
    given = {
        "_reshaped": reshaped,
        "job": job,
        "global_steps": 3,
        "_own_steps_left": 0,
        "_specs": None,
        "micro_batches": 2,
        "_reserve_pipe_buffers": lambda count: None,
        "_prints": False,
        "steps_per_print": lambda: None,
    }
    for name, value in given.items():
        object.__setattr__(engine, name, value)
    for _ in range(3):
        engine.train_batch()
    assert ran == [steps] * 3
    why = "DeepSpeed's own schedule (too little of a test)"
    assert said[1:] == [f"level observe; against uniform: {why}; active"]
    first, second = made
    assert first.closed
    assert second.session.state.notes == (why,)
    assert second.session.begin_step.call_args_list == [call(3)] * 3
    second.session.pause.assert_not_called()  # short steps are metered together


def test_evaluations_and_checkpoints_are_paused_before():
    told = []
    engine = SimpleNamespace(job=SimpleNamespace(pause=lambda: told.append("pause")))
    for row in BETWEEN_STEPS["DeepSpeed"]:
        with suppress(AttributeError, TypeError):  # DeepSpeed's own finds no engine there
            getattr(EnvPipeEngine, row.function)(engine)
        told.append(row.function)
    assert told == [
        *("pause", "eval_batch"),
        *("pause", "save_checkpoint"),
        *("pause", "load_checkpoint"),
    ]
