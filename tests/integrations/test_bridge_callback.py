"""The callback for Megatron-Bridge, called as its training loop calls it; Bridge is not needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from envpipe_megatron.integrations.hooking import BETWEEN_STEPS
from envpipe_megatron.integrations.levels import (
    JobError,
    decide,
    limits_of_arguments,
)

pytestmark = pytest.mark.xdist_group("megatron")

EVENTS = {
    "on_data_init_start",
    "on_train_start",
    "on_train_step_start",
    "on_train_step_end",
    "on_train_end",
}
BETWEEN = [row.function for row in BETWEEN_STEPS["Megatron-Bridge"]]


def config(**changes):
    """As a ConfigContainer is when training begins; changes by dotted name, with `__`."""
    part = SimpleNamespace
    made = part(
        model=part(
            pipeline_model_parallel_size=2,
            num_moe_experts=None,
            gated_linear_unit=True,
            share_embeddings_and_output_weights=False,
            vocab_size=64,
            seq_length=32,
        ),
        train=part(train_iters=12, micro_batch_size=1, global_batch_size=4),
        validation=part(skip_train=False),
        optimizer=part(optimizer="adam", optimizer_cuda_graph=False),
        ddp=part(use_megatron_fsdp=False),
        dist=part(use_megatron_fsdp=False, use_decentralized_pg=False),
        logger=part(log_interval=2, timing_log_level=0),
        checkpoint=part(save=None),
        rerun_state_machine=part(rerun_mode="disabled"),
        dataset=part(dataloader_type="single", seq_length=7),
        ft=None,
        straggler=None,
        peft=None,
        inprocess_restart=None,
        tensor_inspect=None,
        data_parallel_size=1,
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        where = made
        for step in path:
            where = getattr(where, step)
        setattr(where, last, value)
    return made


class FakeTraining:
    """Notes what it is told, and stands in by a function that says so."""

    made: list[FakeTraining]

    def __init__(self, args, options, limits, model, group):
        decide(limits_of_arguments(args, limits), options.level, checks=options.self_check != "off")
        self.options, self.group = options, group
        self.told: list[str] = []
        self.made.append(self)

    def in_place_of(self, function):
        return lambda **arguments: f"ours for {function(**arguments)}"

    def end_step(self, *, skipped):
        self.told.append(f"end_step {skipped}")

    def log(self, iteration, tensorboard, wandb):
        self.told.append(f"log {iteration} {tensorboard} {wandb}")
        return " energy |"

    def __getattr__(self, name):
        return lambda *args: self.told.append(" ".join((name, *map(str, args))))


@pytest.fixture
def loop(monkeypatch):
    """The module of Bridge's training loop."""
    pytest.importorskip("megatron.core")
    modules = {
        name: ModuleType(f"megatron.bridge.training.{name}")
        for name in ("callbacks", "train", "utils.pg_utils")
    }
    vars(modules["callbacks"])["VALID_EVENTS"] = frozenset(EVENTS)
    vars(modules["train"]).update(
        get_forward_backward_func=lambda **_: lambda **arguments: f"Megatron {arguments}",
        checkpoint_and_decide_exit=lambda leaving: leaving,
        **dict.fromkeys(BETWEEN, lambda *_: "Bridge's own"),
    )
    vars(modules["utils.pg_utils"])["get_pg_collection"] = lambda model: SimpleNamespace(pp="pp")
    for module in modules.values():
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return modules["train"]


@pytest.fixture
def arguments():
    """The module that reads a configuration."""
    pytest.importorskip("megatron.core")
    from envpipe_megatron.integrations import megatron_bridge

    return megatron_bridge


@pytest.fixture
def trainings(loop, monkeypatch):
    from envpipe_megatron.integrations import megatron_bridge as callback

    monkeypatch.setattr(FakeTraining, "made", [], raising=False)
    monkeypatch.setattr(callback, "Training", FakeTraining)
    monkeypatch.setattr(callback.dist, "get_world_size", lambda: 2)
    for name in ("TYPE", "SCHEDULING", "RECONFIGURE"):
        monkeypatch.delenv(f"ENVPIPE_{name}", raising=False)
    return FakeTraining.made


def make(**options):
    from envpipe_megatron.integrations.megatron_bridge import EnvPipeCallback

    return EnvPipeCallback(**options)


def context(settings, step=0, **more):
    state = SimpleNamespace(
        cfg=settings,
        train_state=SimpleNamespace(step=step),
        tensorboard_logger="tensorboard",
        wandb_logger=None,
    )
    return SimpleNamespace(state=state, model=["chunk"], **more)


def begin(callback, loop, settings):
    """As the loop begins; the function that it then calls at each step."""
    function: Callable[..., Any] = loop.get_forward_backward_func(pp_size=2, vp_size=None)
    callback.on_train_start(context(settings))
    return function


def test_a_training_from_begin_to_end(loop, trainings, tmp_path):
    own = dict(vars(loop))
    settings = config(checkpoint__save=str(tmp_path))
    callback = make(level="units", baseline_steps=3)
    function = begin(callback, loop, settings)
    (training,) = trainings
    assert training.group == "pp"
    assert training.options.output == tmp_path / "envpipe"
    assert training.options.baseline_steps == 3
    for step in range(2):
        callback.on_train_step_start(context(settings, step))
        assert function(n=step) == f"ours for Megatron {{'n': {step}}}"
        callback.on_train_step_end(context(settings, step, skipped_iter=bool(step)))
    assert [getattr(loop, name)(settings) for name in BETWEEN] == ["Bridge's own"] * 3
    assert not loop.checkpoint_and_decide_exit(False)
    callback.on_train_end(context(settings))
    loop.evaluate_and_print_results(settings)  # one more, after training
    assert training.told == [
        "begin_step 0",
        "end_step False",
        "begin_step 1",
        "end_step True",
        "log 2 tensorboard None",
        "say iteration 2 | energy |",
        *["pause"] * 3,
        "end",
        "close",
    ]
    assert vars(loop) == own
    assert function(n=2) == "Megatron {'n': 2}"


def test_a_loop_that_is_left_early_ends_training(loop, trainings):
    begin(make(), loop, config())
    assert loop.checkpoint_and_decide_exit(True)
    assert trainings[0].told[-2:] == ["end", "close"]


def test_a_training_that_an_error_ended_is_closed_by_the_next_callback(loop, trainings):
    """It is not called again, by the next training of the same process for one."""
    own = dict(vars(loop))
    failed = make()
    begin(failed, loop, config())
    callback = make()
    assert trainings[0].told[-1] == "close"
    assert begin(callback, loop, config())(n=0) == "ours for Megatron {'n': 0}"
    callback.on_train_end(context(config()))
    failed.close()
    assert trainings[0].told == ["close"]
    assert vars(loop) == own


def test_what_never_trained_leaves_the_loop_as_it_was(loop, trainings):
    own = dict(vars(loop))
    failed = make()
    failed.close()
    assert vars(loop) == own
    callback = make()
    failed.close()
    assert begin(callback, loop, config())(n=0) == "ours for Megatron {'n': 0}"
    callback.on_train_end(context(config()))
    assert vars(loop) == own


@pytest.mark.parametrize("why", ["late", "used", "two"])
def test_a_training_whose_loop_is_not_reached_runs_without(loop, trainings, caplog, why):
    """Since a callback came too late, has had its training, or another was made behind it."""
    callback = make()
    if why == "used":
        begin(callback, loop, config())
        callback.on_train_end()
    last = make() if why == "two" else None
    made = len(trainings)
    function = None if why == "late" else loop.get_forward_backward_func()
    for each in filter(None, (callback, last)):
        each.on_train_start(context(config()))
    assert "This training runs without EnvPipe" in caplog.text
    callback.on_train_step_start(context(config()))
    if function:
        assert function(n=0).startswith("ours" if last else "Megatron")
    callback.on_train_step_end(context(config(), skipped_iter=0))
    callback.on_train_end(context(config()))
    assert len(trainings) == made + (last is not None)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tpye": "uniform"}, "No such option.*'tpye'.* level, "),
        ({"level": "best"}, "level is auto, observe, .* 'best'"),
        ({"profile_only": 3}, "takes true or false"),
    ],
)
def test_wrong_options_are_told_at_once(loop, options, told):
    own = dict(vars(loop))
    with pytest.raises(JobError, match=told):
        make(**options)
    assert vars(loop) == own


def test_options_that_do_not_go_together_have_the_callbacks_names(loop, trainings):
    with pytest.raises(JobError, match=r"^plan needs profile"):
        begin(make(plan=__file__), loop, config())


def test_what_a_job_cannot_have_is_told_before_its_first_step(loop, trainings):
    with pytest.raises(JobError, match="CUDA graphs"):
        begin(make(level="order"), loop, config(model__cuda_graph_impl="local"))
    experts = config(model__num_moe_experts=8)
    with pytest.raises(JobError, match="mixture of experts"):
        begin(make(level="order", self_check="off"), loop, experts)
    of_two_models = {"model__dist_train": SimpleNamespace(use_dist_train=True)}
    restarting = {"inprocess_restart": SimpleNamespace(enabled=True)}
    for changes, named in ((restarting, "in-process restart"), (of_two_models, "dist_train")):
        with pytest.raises(JobError, match=named):
            begin(make(), loop, config(**changes))


def test_another_version_is_named(loop, monkeypatch):

    monkeypatch.delattr(loop, BETWEEN[-1])  # ends no training: it is not paused before
    make().close()
    callbacks = sys.modules["megatron.bridge.training.callbacks"]
    monkeypatch.setattr(callbacks, "VALID_EVENTS", frozenset(EVENTS - {"on_train_end"}))
    with pytest.raises(JobError, match=r"Megatron-Bridge 0\.5 or later.*on_train_end"):
        make()
    monkeypatch.setitem(sys.modules, callbacks.__name__, None)
    with pytest.raises(JobError, match=r"Megatron-Bridge 0\.5 or later"):
        make()


@pytest.mark.parametrize(
    ("changes", "level", "said"),
    [
        ({}, "order", None),
        ({"tensor_inspect": SimpleNamespace(enabled=False)}, "order", None),
        ({"model__num_moe_experts": 8}, "order", "mixture of experts"),
        ({"model__transformer": SimpleNamespace(mtp_num_layers=1)}, "order", "multi-token"),
        ({"peft": object()}, "order", "--sft"),
        ({"dataset__dataloader_type": "batch"}, "order", "--sft"),
        ({"dataset__enable_in_batch_packing": True}, "order", "--sft"),
        ({"model__restore_modelopt_state": True}, "order", "ModelOpt"),
        ({"model__quant_recipe": object()}, "order", "FP4"),
        ({"dist__use_decentralized_pg": True}, "order", "use_decentralized_pg"),
        ({"model__cuda_graph_impl": "local"}, "units", "CUDA graphs"),
        ({"ft": SimpleNamespace(enable_ft_package=True)}, "units", "fault tolerance"),
        ({"tensor_inspect": SimpleNamespace(enabled=True)}, "units", "tensor inspection"),
        ({"rerun_state_machine__rerun_mode": "report_stats"}, "units", "report_stats"),
        ({"straggler": SimpleNamespace(log_straggler=True)}, "uniform", "--log-straggler"),
        ({"train__rampup_batch_size": [4, 4, 8]}, "order", None),
        ({"model__pipeline_model_parallel_size": 1}, "uniform", "no pipeline"),
        ({"validation__skip_train": True}, "observe", "--skip-train"),
    ],
)
def test_the_level_is_that_of_the_same_arguments(changes, level, said, arguments, monkeypatch):
    """The lines name what is checked, or what rules out the next level."""
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING"):
        monkeypatch.delenv(variable, raising=False)
    args = arguments.arguments_of(config(**changes), 2)
    decision = decide(limits_of_arguments(args, arguments.BRIDGE_LIMITS))
    assert str(decision.level) == level
    assert bool(decision.to_check) is (level == "order" and said is not None)
    assert str(decision) == "level order" if said is None else said in str(decision)
    named = args.swiglu, args.untie_embeddings_and_output_weights, args.padded_vocab_size
    assert (*named, args.world_size, args.optimizer) == (True, True, 64, 2, "adam")
    assert args.lengths_vary is (said == "--sft" and "peft" not in changes)  # no J per token


def test_the_page_has_the_limits_that_are_bridges_own(arguments):
    page = (
        (Path(__file__).parents[2] / "docs" / "start" / "megatron_bridge.md")
        .read_text()
        .replace("`", "")
    )
    for limit in set(arguments.BRIDGE_LIMITS) - set(arguments.LIMITS):
        assert f"\n| {limit.feature} | {limit.highest} |\n" in page
