"""What megatron-core's hooks refuse: calls that are not reached, other models, other features.

megatron-core is imported when a test needs it: it takes seconds, in every worker of pytest.
"""

import argparse
import pickle
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from leveled_jobs import begin, fresh_hooks, given, jobs_are_faked

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders.builders import whole_iteration
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.integrations import leveled
from envpipe_megatron.integrations.hooking import replaced
from envpipe_megatron.integrations.levels import JobError, Level
from envpipe_megatron.integrations.megatron.limits import LIMITS, keep_sequence
from envpipe_megatron.integrations.options import add_arguments
from envpipe_megatron.runtime.job.options import JobOptions

pytestmark = pytest.mark.xdist_group("megatron")


class FakeSession:
    """Notes what the hooks tell it."""

    def __init__(self):
        self.told: list[str] = []
        self.state = SimpleNamespace(profile=None, phase=Phase.WARMUP, notes=("no meter",))

    def __getattr__(self, name):
        return lambda *args: self.told.append(" ".join((name, *map(str, args))))


@pytest.fixture
def hooks():
    pytest.importorskip("megatron.core")
    from envpipe_megatron.integrations.megatron_lm import hooks

    return hooks


@pytest.fixture
def job(hooks, monkeypatch):
    """A job that has begun: arguments validated, training begun."""
    session = FakeSession()
    channel = SimpleNamespace(close=lambda: session.told.append("give back"))
    session.parts = SimpleNamespace(folder=SimpleNamespace(path=None), channel=channel)
    made = SimpleNamespace(session=session)
    monkeypatch.setattr(leveled, "end_of_job", lambda *_: session.told.append("bill") or [])
    training, *_ = begin(hooks.Training)
    training.job, training._replacement = session, None
    made_hooks = fresh_hooks(hooks, monkeypatch)
    made_hooks.job = training
    training.report = lambda: SimpleNamespace(
        scalars=lambda: {"envpipe-power/gpu": 300.0}, line=lambda: " envpipe |"
    )
    return made


def gpt():
    from megatron.core.models.gpt import GPTModel

    model = object.__new__(GPTModel)
    torch.nn.Module.__init__(model)
    return model


def steps(hooks, count, *, without=""):
    """As Megatron's loop calls the hooks, but for one of them."""
    if without != "forward_backward":
        hooks._hooks.note("forward_backward")
    for iteration in range(count):
        if without != "begin_step":
            hooks.begin_step(iteration)
        if without != "end_step":
            hooks.end_step(0)
        if without != "log":
            hooks.log(iteration, None, None)


def test_all_hooks_reached(hooks, job):
    steps(hooks, 5)
    assert job.session.told == [text for n in range(5) for text in (f"begin_step {n}", "end_step")]


@pytest.mark.parametrize("hook", ["begin_step", "forward_backward", "end_step", "log"])
def test_one_that_is_never_reached_is_told_once(hooks, job, hook, caplog):
    """As where Megatron 0.19 trains over several grids, by a function that EnvPipe is not given."""
    steps(hooks, 2, without=hook)
    assert not caplog.records
    steps(hooks, 6, without=hook)
    (told,) = caplog.messages
    assert f"not reached by iteration 3: {hook}. Training goes on" in told


def test_scalars_go_to_both_writers(hooks, job):
    written: list[Any] = []
    tensorboard = SimpleNamespace(add_scalar=lambda *scalar: written.append(scalar))
    wandb = SimpleNamespace(log=lambda *scalar: written.append(scalar))
    assert hooks.log(7, tensorboard, wandb) == " envpipe |"
    assert written == [("envpipe-power/gpu", 300.0, 7), ({"envpipe-power/gpu": 300.0}, 7)]


def test_what_lies_between_steps_pauses_and_what_follows_training_does_not(hooks, job, monkeypatch):
    told, schedules = job.session.told, SimpleNamespace(envpipe_hook=None)
    loop = SimpleNamespace(evaluate=lambda: told.append("evaluate"))
    training, state = hooks._hooks.job, fresh_hooks(hooks, monkeypatch)
    state.options = SimpleNamespace()
    monkeypatch.setattr(hooks, "Training", lambda *arguments: training)
    monkeypatch.setattr(hooks, "by_stage", lambda args: None)
    monkeypatch.setattr(hooks.parallel_state, "get_pipeline_model_parallel_group", lambda: None)
    monkeypatch.setattr(hooks, "_hooked_schedules", lambda: schedules)
    monkeypatch.setitem(sys.modules, "megatron.training.training", loop)
    hooks.begin_training(SimpleNamespace(log_energy=True), [gpt()])
    assert schedules.envpipe_hook is not None
    loop.evaluate()
    hooks.pause()
    hooks.end_training()
    loop.evaluate()
    hooks.pause()
    assert told == [
        *("pause", "evaluate", "pause"),
        *("close", "bill", "close", "give back"),
        "evaluate",
    ]
    assert schedules.envpipe_hook is None
    with pytest.raises(JobError, match="outside training"):
        hooks.end_step(0)


def test_a_training_that_an_error_ended_is_closed_by_the_next(hooks, job, monkeypatch):
    """Else its guards hold the GPUs, which the next one could only read."""
    hooks._hooks.options = SimpleNamespace()
    follows, *_ = begin(hooks.Training)

    def make(*arguments):
        job.session.told.append("begin")
        return follows

    monkeypatch.setattr(hooks, "Training", make)
    monkeypatch.setattr(hooks, "by_stage", lambda args: None)
    monkeypatch.setattr(hooks.parallel_state, "get_pipeline_model_parallel_group", lambda: None)
    monkeypatch.setattr(hooks, "_hooked_schedules", lambda: SimpleNamespace(envpipe_hook=None))
    hooks.begin_step(0)
    hooks.begin_training(SimpleNamespace(log_energy=True), [gpt()])
    assert job.session.told == ["begin_step 0", "close", "give back", "begin"]
    assert hooks._hooks.job is follows


def test_arguments_that_were_not_validated(hooks, monkeypatch, capsys):
    """As with --yaml-cfg."""
    fresh_hooks(hooks, monkeypatch)
    with pytest.raises(SystemExit):
        hooks.begin_training(SimpleNamespace(), [gpt()])
    assert "came from elsewhere" in capsys.readouterr().err


def test_an_unpatched_megatron_core_is_named(hooks, monkeypatch):
    from megatron.core.pipeline_parallel import schedules

    monkeypatch.delattr(schedules, "envpipe_hook", raising=False)
    with pytest.raises(JobError, match=r"not patched .*schedules\.py"):
        hooks._hooked_schedules()


def test_a_job_for_the_profile_alone_that_gets_none(hooks, job):
    training = hooks._hooks.job
    training.options = replace(training.options, profile_only=True)
    job.session.state.phase = Phase.STEADY
    with pytest.raises(JobError, match="no profile to write: no meter"):
        steps(hooks, 1)


def arguments(**given):
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_argument_group())
    return parser.parse_args([], argparse.Namespace(save=None, **given))


def test_what_is_wrong_is_told_once_a_node_and_without_a_stack(hooks, monkeypatch, capsys):
    fresh_hooks(hooks, monkeypatch)
    monkeypatch.setattr("sys.argv", ["/somewhere/pretrain_gpt.py"])
    for local_rank, told in (("0", "pretrain_gpt.py: error: "), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(SystemExit) as ended:
            hooks.validate(arguments(pipeline_model_parallel_size=1))
        assert ended.value.code == 2
        assert capsys.readouterr().err[: len(told) or None] == told


def test_a_rank_says_what_is_wrong_of_its_own_environment(hooks, monkeypatch, capsys):
    fresh_hooks(hooks, monkeypatch)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("ENVPIPE_TYPE", "best")
    with pytest.raises(SystemExit):
        hooks.validate(arguments(pipeline_model_parallel_size=2))
    assert "The environment variable ENVPIPE_TYPE is" in capsys.readouterr().err


WITH_EXPERTS = {"num_experts": 8, "envpipe_level": "order"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"pipeline_model_parallel_size": 1, "envpipe_level": "units"},
            "Level units cannot be had with: no pipeline",
        ),
        ({**WITH_EXPERTS, "cuda_graph_impl": "local"}, "order cannot be had with: CUDA graphs"),
        ({**WITH_EXPERTS, "envpipe_self_check": "off"}, "order cannot be had with: mixture of exp"),
        ({"inprocess_restart": True}, "cannot meter"),
        ({"fake_process_group": True}, "cannot meter"),
        ({"llm_pp": 1}, "cannot meter"),
    ],
)
def test_what_a_job_cannot_have_ends_it(hooks, given, told, monkeypatch, capsys):
    fresh_hooks(hooks, monkeypatch)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit):
        hooks.validate(arguments(**{"pipeline_model_parallel_size": 2, **given}))
    assert told in capsys.readouterr().err


def test_whole_steps_are_opened_and_closed_outside_of_megatrons_function(hooks, job, monkeypatch):
    """So that a CUDA graph may hold all of it. A smaller batch is none of them."""
    from envpipe_megatron.integrations.megatron import training as module

    told, training = job.session.told, hooks._hooks.job
    (unit,) = whole_iteration(1).stages[0]
    begin_unit = partial(told.append, "begin")
    run = SimpleNamespace(units=(unit,), next_unit=unit, begin_unit=begin_unit)

    def end_unit():
        told.append("end")
        run.next_unit = None

    run.end_unit = end_unit
    job.session.parts.num_stages = 1
    job.session.open_iteration = lambda *_: run
    training.decision = replace(training.decision, level=Level.UNIFORM)
    training._microbatches, training._framework_function = 4, None
    monkeypatch.setattr(module, "get_num_microbatches", iter([4, 2]).__next__)
    function = training.in_place_of(lambda **_: told.append("train"))
    for iteration in range(2):
        hooks.begin_step(iteration)
        function(num_microbatches=1)
        hooks.end_step(0)
    training._replacement = lambda **_: pytest.fail("not Megatron's own")  # at a level above
    function(forward_only=True)
    assert told[:5] == ["begin_step 0", "begin", "train", "end", "end_step"]
    assert told[5:] == ["begin_step 1", "highest_clock", "train", "end_step", "pause", "train"]


def test_megatrons_energy_monitor_asks_for_no_device_that_it_lacks(hooks, monkeypatch):
    def ask():
        raise AssertionError("a null handle")

    monitor = SimpleNamespace(pause=ask, resume=ask)
    variables = SimpleNamespace(get_energy_monitor=lambda: monitor)
    monkeypatch.setitem(sys.modules, "megatron.training", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", variables)
    hooks._quiet_energy_monitor()
    monitor.pause()
    monitor.resume()


def test_what_flags_do_not_tell_of_a_model_is_checked_or_keeps_megatrons_order(hooks):
    from megatron.core.transformer import TransformerConfig

    from envpipe_megatron.integrations.megatron.training import limits_of

    def limits(model, **changes):
        config = TransformerConfig(
            num_layers=2, hidden_size=8, num_attention_heads=1, pipeline_dtype=torch.float32
        )
        for name, value in changes.items():
            setattr(config, name, value)
        vars(model)["config"] = config
        return {limit.feature: str(limit.highest) for limit in limits_of([model])}

    assert limits(gpt()) == {}
    assert limits(torch.nn.Linear(1, 1), variable_seq_lengths=True) == {
        "models other than GPTModel: Linear": "order",
        "sequences of varying length": "order",
    }
    own = gpt()
    own.layer, own.norm = type("Layer", (torch.nn.Linear,), {})(1, 1), torch.nn.LayerNorm(1)
    assert limits(own) == {f"layers of the user's: {__name__}.Layer": "order"}


@pytest.mark.parametrize(
    "set_",
    [
        {"hidden_dropout": 0.1},
        {"moe_router_force_load_balancing": True},
        {"moe_router_force_biased": 0.5},
        {"fp4": "e2m1"},
        {"fp8": "hybrid", "fp8_amax_history_len": 16},
        {"fp8": "hybrid", "fp8_amax_history_len": 1},
        {},
    ],
)
def test_what_random_numbers_and_histories_rest_on_keeps_the_sequence_of_chunks(set_):
    config = SimpleNamespace(hidden_dropout=0.0, attention_dropout=0, moe_input_jitter_eps=None)
    vars(config).update(set_)
    kept = bool(set_) and set_.get("fp8_amax_history_len") != 1
    assert keep_sequence(JobOptions(), 2, config).scheduling == ("1f1b" if kept else "auto")
    assert keep_sequence(JobOptions(), 1, config) == JobOptions()


@pytest.mark.parametrize(
    ("stages", "count", "own_group", "tried"),
    [
        (2, 12, 2, ["groups of 3", "groups of 4", "more"]),
        (4, 16, 4, ["groups of 6", "groups of 8", "more"]),
        (4, 16, 8, ["groups of 4", "groups of 6", "more"]),
        (4, 4, 4, ["more"]),
        (4, 8, 4, ["groups of 6", "groups of 8", "more"]),
    ],
)
def test_a_check_tries_what_a_plan_may_run(stages, count, own_group, tried):
    """Another sequence of chunks first: what rests on it is not seen by more forwards alone."""
    from envpipe_megatron.core.kinds import ScheduleError
    from envpipe_megatron.core.orders import builders
    from envpipe_megatron.integrations.megatron.training import orders_to_try

    class Chunk(torch.nn.Module):
        config = SimpleNamespace(
            microbatch_group_size_per_vp_stage=own_group, overlap_moe_expert_parallel_comm=False
        )

    args, model = SimpleNamespace(pipeline_model_parallel_size=stages), [Chunk(), Chunk()]
    more = [1] * (stages - 1) + [0]
    named = {}
    for size in (8, 6, 4, 3):
        with suppress(ScheduleError):
            named[builders.interleaved(stages, count, 2, size).stages] = f"groups of {size}"
    longer = builders.interleaved(stages, count, 2, own_group, extra_warmup=more)
    named[longer.stages] = "more"
    own, *others = orders_to_try(args, model, count, regroups=True)
    assert own.stages == builders.interleaved(stages, count, 2, own_group).stages
    assert [named[order.stages] for order in others] == tried
    alike = orders_to_try(args, model, count, regroups=False)[1:]
    assert [named[order.stages] for order in alike] == tried[-1:]


def test_what_the_interpreter_does_not_run_goes_to_megatron_itself():
    """From the first call on, also shapes that ModelOpt adjusts; on this rank, or another one."""
    pytest.importorskip("megatron.core")
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    assert "without pipeline_dtype" in called(config)[1]
    config.pipeline_dtype = torch.float32
    assert "not [0, 1]" in called(config, ranks=[0, 2])[1]
    assert "pg_collection" in called(config, p2p_communicator=None)[1]
    assert "adjusts (ModelOpt)" in called(config, adjust_tensor_shapes_fn=print)[1]
    own, failed = called(config, told=(1, "elsewhere"))
    assert len(own) == 3
    assert failed == "elsewhere"
    features = "moe_paged_stash", "fine_grained_activation_offloading", "cuda_graph_impl"
    partial_checkpoints = "num_microbatches_with_partial_activation_checkpoints"
    for feature in (*features, "overlap_moe_expert_parallel_comm", partial_checkpoints):
        assert feature in called(SimpleNamespace(**{**vars(config), feature: 1}))[1]
    assert "another version: a_flag, b_flag" in called(config, b_flag=1, a_flag=1)[1]
    # The interpreter would drop what such calls collect, or ask for by an argument that is new.
    for call in ({"collect_non_loss_data": True}, {"later": {"a_flag": 1}}):
        own, failed = called(config, **call)
        assert len(own) == 3
        assert failed is None


def test_memory_is_for_the_longest_messages_that_may_come():
    """Megatron-Bridge's fine-tuning gives each iteration, and each replica, another length."""
    pytest.importorskip("megatron.core")
    from megatron.core.transformer import TransformerConfig

    from envpipe_megatron.integrations.megatron.core import ForwardBackward

    config = TransformerConfig(
        num_layers=2, hidden_size=8, num_attention_heads=2, pipeline_dtype=torch.float32
    )
    run = Mock(side_effect=EOFError)
    session = session_of(lambda why: why and (0, why), run_iteration=run)
    ours = ForwardBackward(session, 0, Mock(), seq_length=12)
    with patch("torch.distributed.get_process_group_ranks", lambda group: [0, 1]):
        for length, decoder in ((8, None), (12, 12), (4, 16)):
            with pytest.raises(EOFError):
                ours(**arguments_of(config, seq_length=length, decoder_seq_length=decoder))
    specs = [(call.args[1], call.kwargs["longest"]) for call in run.mock_calls]
    lengths = [[each.sends[Kind.FORWARD].shapes[0][0] for each in both] for both in specs]
    assert lengths == [[8, 12], [12, 12], [16, 16]]


def session_of(first, **more) -> Any:
    """A session of two stages, whose ranks exchange by `first` why they do not run ours."""
    parts = SimpleNamespace(
        channel=SimpleNamespace(ranks=[0, 1]), collectives=SimpleNamespace(first=first)
    )
    return SimpleNamespace(parts=parts, may_split=False, **more)


def arguments_of(config, **named):
    """The arguments by which Megatron calls its forward-backward function on two stages."""
    one = SimpleNamespace(size=lambda: 1)
    groups = SimpleNamespace(pp=SimpleNamespace(size=lambda: 2), tp=one, cp=one)
    names = ("forward_step_func", "data_iterator", "num_microbatches", "micro_batch_size")
    given = dict.fromkeys(names, 1) | {"seq_length": 8, "model": SimpleNamespace(config=config)}
    return given | {"p2p_communicator": object(), "pg_collection": groups, **named}


def called(config, ranks=(0, 1), told=None, later=None, **named):
    """Three training calls that reached Megatron's own function, and what is said against ours.

    Those after the first have the arguments of `later`, too.
    """
    from envpipe_megatron.integrations.megatron.core import ForwardBackward

    own: list[Any] = []
    asked: list[str | None] = []

    def first(why):
        asked.append(why)
        return told or (why and (0, why))

    given = arguments_of(config, **named)
    stand_in = ForwardBackward(session_of(first, executed=[]), 1, lambda **given: own.append(given))
    with patch("torch.distributed.get_process_group_ranks", lambda group: list(ranks)):
        for _ in range(3):
            stand_in(**given)
            given |= later or {}
    assert len(asked) == 1  # ranks exchange it once
    return own, stand_in.end_step(skipped=False)


def test_ranks_that_share_out_weights_have_data_of_their_own():
    pytest.importorskip("megatron.core")
    from envpipe_megatron.integrations.megatron import training

    args = SimpleNamespace(
        global_batch_size=64,
        micro_batch_size=2,
        data_parallel_size=2,
        step_batch_size_schedule=None,
    )
    assert training.num_microbatches_of(args) == 16
    args.gtp_weight_remat_size = 2
    assert training.num_microbatches_of(args) == 8


@pytest.mark.parametrize("later", [False, True])
def test_a_job_that_trains_without_envpipe(hooks, monkeypatch, caplog, later):
    """Megatron has its own function, and hooks have nothing to do: also if it lost its level."""
    from megatron.core.pipeline_parallel import schedules

    training, *_ = begin(hooks.Training, given(gpu_control="auto" if later else "none"))
    training._replacement = training._framework_function = None
    training.options = replace(training.options, gpu_control="none")
    state = fresh_hooks(hooks, monkeypatch)
    state.options = SimpleNamespace()
    state.note("forward_backward")
    monkeypatch.setattr(hooks, "Training", lambda *arguments: training)
    monkeypatch.setattr(hooks, "by_stage", lambda args: None)
    monkeypatch.setattr(hooks.parallel_state, "get_pipeline_model_parallel_group", lambda: None)
    monkeypatch.setattr(schedules, "envpipe_hook", None, raising=False)
    if later:
        state.job = training
        in_its_place = replaced(schedules, envpipe_hook=training.in_place_of)
        state.while_training.enter_context(in_its_place)
        training._why_lower = "too little of a test"
    else:
        hooks.begin_training(SimpleNamespace(log_energy=True), [gpt()])
    hooks.begin_step(0)
    hooks.end_step(0)
    hook = schedules.envpipe_hook
    assert (hook(dict) if later else hook or dict)(model="m") == {"model": "m"}
    for iteration in range(1, 5):
        hooks.begin_step(iteration)
        hooks.end_step(0)
        assert hooks.log(iteration, None, None) == ""
        hooks.pause()
    hooks.end_training()
    assert schedules.envpipe_hook is None
    assert not caplog.records


def test_a_batch_that_no_pipeline_of_chunks_runs_is_measured(hooks, monkeypatch):
    """Where other microbatches than those of the arguments are trained, Megatron refuses none.

    Where the sequence of chunks counts, no order is looked for that memory would limit.
    """
    from envpipe_megatron.integrations.megatron import training

    config = SimpleNamespace(
        variable_seq_lengths=False,
        microbatch_group_size_per_vp_stage=4,
        overlap_moe_expert_parallel_comm=False,
    )
    args = argparse.Namespace(
        pipeline_model_parallel_size=4, perform_rl_step=True, train_iters=None
    )
    monkeypatch.setattr(training, "get_model_config", lambda chunk: config)
    monkeypatch.setattr(training, "num_microbatches_of", lambda args: 5)
    monkeypatch.setattr(training, "limits_of", lambda model: [])
    exchanged: list[Any] = []
    monkeypatch.setattr(training, "limits_of_ranks", lambda own: exchanged.extend(own) or own)
    monkeypatch.setattr(training, "of_all_ranks", lambda own: [own])
    monkeypatch.setattr(training, "facts_of", lambda args: {})
    group: Any = None
    with jobs_are_faked() as made:
        hooks.Training(args, given(), LIMITS, [gpt(), gpt(), gpt()], group)
        config.hidden_dropout = 0.1
        usual = given(
            type="optimal", scheduling="auto", reconfigure="default", max_in_flight="memory"
        )
        hooks.Training(args, usual, LIMITS, [gpt(), gpt(), gpt()], group)
    assert [job.level for job in made] == [Level.OBSERVE] * 2
    # Limits by a variable that one rank has are those of all: they would wait for each other.
    assert "reinforcement learning" in {limit.feature for limit in exchanged}
    assert pickle.loads(pickle.dumps(exchanged)) == exchanged
    assert (made[1].options.scheduling, made[1].options.max_in_flight) == ("1f1b", None)


def test_facts_are_those_of_the_language_model(hooks):
    """LLaVA's `seq_length` is what an image becomes; a profile of another model is of no use."""
    from envpipe_megatron.integrations.megatron.training import facts_of

    names = "tensor_model_parallel_size", "micro_batch_size", "num_layers", "hidden_size"
    args = argparse.Namespace(**dict.fromkeys(names, 1), global_batch_size=8, seq_length=256)
    assert facts_of(args)["bill"]["tokens_per_iteration"] == 8 * 256
    args.decoder_seq_length, args.hybrid_layer_pattern = 4096, "M-*"
    facts = facts_of(args)
    assert (facts["bill"]["tokens_per_iteration"], facts["sidecar"].sequence_length) == (
        8 * 4096,
        4096,
    )
    assert facts["same_job"]["hybrid_layer_pattern"] == "M-*"
    args.lengths_vary = True  # as in Megatron-Bridge's fine-tuning
    assert "tokens_per_iteration" not in facts_of(args)["bill"]
