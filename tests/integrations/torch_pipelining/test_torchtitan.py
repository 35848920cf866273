"""torchtitan's trainer with EnvPipe hooked in, and the command in place of torchtitan's own."""

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from envpipe_megatron.integrations.levels import JobError
from envpipe_megatron.integrations.options import divided
from envpipe_megatron.integrations.torch_pipelining import torchtitan
from envpipe_megatron.integrations.torch_pipelining.orders import AttachError


@dataclass
class Parts:
    """A configuration's section."""

    name: str = "llama3"
    seq_len: int = 64
    steps: int = 10


@dataclass
class Config:
    """As of releases; those since call the model otherwise, and have no `job`."""

    job: Any
    model: Parts = field(default_factory=Parts)
    training: Parts = field(default_factory=Parts)


class Trainer:
    """Stands in for what the hooks need of torchtitan's."""

    def __init__(self, folder, fails=False, schedule="schedule"):
        self.job_config = Config(SimpleNamespace(dump_folder=str(folder)))
        self.told: list[Any] = []
        self.pp_schedule = schedule
        self.metrics_processor = SimpleNamespace(log=self._log)
        self.checkpointer = SimpleNamespace(
            save=lambda step, last_step=False: self.told.append(f"save {step}"),
            _should_save=lambda step, last=False: step == 2 or last,
        )
        self.fails = fails

    def _log(self, step, loss, most, norm, extra_metrics):
        self.told.append((step, loss, extra_metrics))

    def train(self, returned="trained"):
        self.metrics_processor.log(1, 0.5, 0.6, 0.7, {"lr": 1})
        self.checkpointer.save(1)
        self.checkpointer.save(2)
        if self.fails:
            raise RuntimeError("of a test")
        self.checkpointer.save(3, True)
        return returned


class Pipeline:
    """Stands in for what `attach` returns; tells the trainer what it is asked for."""

    def __init__(self, told):
        report = SimpleNamespace(line=lambda: " energy |", scalars=lambda: {"envpipe": 2})
        self.report = lambda: report
        self.say = lambda text: told.append(text)
        self.pause = lambda: told.append("pause")
        self.end_training = lambda: told.append("end")
        self.close = lambda: told.append("close")


@pytest.fixture
def hooked(monkeypatch):
    """A class of trainers with hooks, and what it attached to."""
    attached: list[Any] = []

    def make(**settings):
        kind = type("Trainer", (Trainer,), {})
        torchtitan.hook(kind, **settings)
        return kind, attached

    def attach(schedule, **how):
        attached.append((schedule, how))
        return Pipeline(trainer_of[0].told)

    trainer_of: list[Any] = []
    train = torchtitan._train
    monkeypatch.setattr(
        torchtitan, "_train", lambda self, *rest: (trainer_of.append(self), train(self, *rest))[1]
    )
    monkeypatch.setattr(torchtitan, "attach", attach)
    return make


def test_a_trainer_trains_with_energy_in_its_metrics_and_no_checkpoint_in_the_bill(
    hooked, tmp_path
):
    kind, attached = hooked(level="units")
    trainer = kind(tmp_path)
    assert trainer.train("by its own argument") == "by its own argument"
    metrics = (1, 0.5, {"lr": 1, "envpipe": 2})
    assert trainer.told[:3] == ["energy", metrics, "save 1"]
    assert trainer.told[3:] == ["pause", "save 2", "pause", "save 3", "end", "close"]
    ((schedule, how),) = attached
    assert (schedule, how["level"], how["output"]) == ("schedule", "units", tmp_path / "envpipe")
    assert how["facts"]["model"] == "llama3"


@pytest.mark.parametrize(
    ("log", "logged", "seen"),
    [
        (lambda *losses: losses, lambda log: log(1, 0.5, 0.6, 0.7, 0.8, 0.9), (1, 0.5)),
        (
            lambda step, global_avg_loss, extra_metrics=None: (step, extra_metrics),
            lambda log: log(step=1, global_avg_loss=0.5),
            (1, {"envpipe": 2}),
        ),
        (
            lambda step, **more: (step, more),
            lambda log: log(1, extra_metrics={"lr": 1}),
            (1, {"extra_metrics": {"lr": 1, "envpipe": 2}}),
        ),
    ],
)
def test_functions_of_the_users_are_called_with_their_own_arguments(
    hooked, tmp_path, log, logged, seen
):
    """Metrics of a user's own, and a checkpoint that is told more than when it is saved."""
    kind, _ = hooked()
    trainer = kind(tmp_path)
    own = SimpleNamespace(save=lambda step, metrics: "saved", _should_save=lambda step: False)
    trainer.metrics_processor, trainer.checkpointer = SimpleNamespace(log=log), own
    done: list[Any] = []
    kind.log_and_save = lambda self: done.extend(
        (logged(self.metrics_processor.log)[:2], self.checkpointer.save(1, metrics={}))
    )
    torchtitan._train(trainer, trainer.log_and_save, {})
    assert done == [seen, "saved"]
    assert trainer.told[:2] == ["energy", "pause"]


def test_a_trainer_that_fails_gives_clocks_back_and_asks_nobody(hooked, tmp_path):
    kind, _ = hooked(output="elsewhere")
    trainer = kind(tmp_path, fails=True)
    with pytest.raises(RuntimeError, match="of a test"):
        trainer.train()
    assert trainer.told[-1] == "close"


def test_a_schedule_that_is_none_of_torchs_trains_by_itself(hooked, tmp_path, monkeypatch, caplog):
    def refuse(schedule, **how):
        raise AttachError("No schedule of a test")

    kind, _ = hooked()
    monkeypatch.setattr(torchtitan, "attach", refuse)
    assert kind(tmp_path).train() == "trained"
    assert "EnvPipe does nothing: No schedule of a test" in caplog.text


def test_without_a_pipeline_nothing_is_attached(hooked, tmp_path, caplog):
    kind, attached = hooked()
    trainer = kind(tmp_path, schedule=None)
    assert trainer.train() == "trained"
    assert not attached
    assert "has no pipeline" in caplog.text


def test_facts_change_with_what_units_cost_and_not_with_how_long_they_run(tmp_path):
    def digest(**training):
        config = Config(SimpleNamespace(dump_folder="x"), training=Parts(**training))
        return torchtitan._facts(config)["configuration"]

    assert digest() == digest(steps=99) != digest(seq_len=65)


def test_facts_are_those_of_the_next_start_too():
    """No address in memory is in them, no order of a set, and a class is known by its name."""

    @dataclass
    class Sizes:
        width: int

    class Converter:
        pass

    names = ["wq", "wk", "wv", "wo", "w1", "w2", "w3"]

    def plain(names):
        return torchtitan._plain([Sizes, Sizes(3), Converter(), frozenset(names)])

    assert plain(names) == plain(names[::-1])
    assert plain(names)[0].endswith("Sizes")
    assert plain(names)[3] == sorted(names)


def test_a_command_line_is_divided():
    words = ["--a", "1", "--envpipe-level", "units", "--envpipe-sweep", "--envpipe-output=x", "b"]
    settings = {"level": "units", "sweep": True, "output": "x"}
    assert divided(words) == (settings, ["--a", "1", "b"])
    with pytest.raises(JobError, match="--envpipe-level: expected one argument"):
        divided(["--envpipe-level"])
    with pytest.raises(JobError, match=r"No such option .*got --envpipe-levels=3"):
        divided(["--envpipe-levels=3"])


@pytest.mark.parametrize("takes_trainer", [True, False])
def test_the_command_hooks_the_trainer_and_runs_torchtitans_own(monkeypatch, hooked, takes_trainer):
    ran: list[Any] = []
    train = ModuleType("torchtitan.train")
    train.Trainer = type("Trainer", (Trainer,), {})  # type: ignore[attr-defined]
    own = train.Trainer.train
    if takes_trainer:
        train.main = lambda trainer: ran.append(trainer)  # type: ignore[attr-defined]
    else:
        train.main = lambda: ran.append(train.Trainer)  # type: ignore[attr-defined]
    package = ModuleType("torchtitan")
    package.train = train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchtitan", package)
    monkeypatch.setitem(sys.modules, "torchtitan.train", train)
    monkeypatch.setattr(sys, "argv", ["titan", "--model", "m", "--envpipe-level", "units"])
    torchtitan.main()
    assert ran == [train.Trainer]
    assert train.Trainer.train is not own
    assert sys.argv == ["titan", "--model", "m"]


def test_a_missing_torchtitan_and_a_wrong_class_are_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    monkeypatch.setattr(sys, "argv", ["titan"])
    with pytest.raises(SystemExit, match="torchtitan cannot be imported"):
        torchtitan.main()
    with pytest.raises(AttachError, match="has a method train"):
        torchtitan.hook(int)
