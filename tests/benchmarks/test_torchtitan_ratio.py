"""Arms of torchtitan take turns; here a stand-in for torchtitan that trains nothing."""

import json
import os

import pytest
from click.testing import CliRunner
from on_request import on_request

pytest.importorskip("torch")
from benchmarks.torch_pipelining import torchtitan_ratio

STAND_IN = {
    "train.py": """
import sys
from types import SimpleNamespace
import torch


def option(name):
    return next(int(a.split("=")[1]) for a in sys.argv if a.startswith(f"--training.{name}="))


class Trainer:
    step = 0

    def __init__(self):
        names = ("steps", "seq_len", "local_batch_size")
        self.job_config = SimpleNamespace(
            training=SimpleNamespace(**{name: option(name) for name in names})
        )
        self.metrics_processor = SimpleNamespace(
            ntokens_since_last_log=0, data_loading_times=[]
        )

    def train_step(self, data_iterator):
        self.forward_backward_step(inputs=next(data_iterator)[0]["input"])

    def forward_backward_step(self, inputs):
        return inputs.float().mean()


def main(trainer_class):
    trainer = trainer_class()
    while trainer.step < trainer.job_config.training.steps:
        trainer.step += 1
        trainer.train_step(iter(()))
""",
    "models/llama3/model/args.py": "TransformerModelArgs = dict\n",
    "protocols/train_spec.py": """
from dataclasses import dataclass, field


@dataclass
class Spec:
    model_args: dict = field(default_factory=dict)


def get_train_spec(name):
    return Spec()


def register_train_spec(name, spec):
    assert "tiny" in spec.model_args
""",
}


@on_request("LM")
def test_arms_take_turns_and_losses_are_compared(tmp_path, monkeypatch):
    for name, text in STAND_IN.items():
        path = tmp_path / "stand_in" / "torchtitan" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    python_path = os.pathsep.join([str(tmp_path / "stand_in"), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", python_path.rstrip(os.pathsep))
    options = "--ranks 2 --arm again --rounds 2 --turn-steps 2 --warmup-steps 3 --flavor tiny"
    options += f" --sequence 8 --output {tmp_path / 'out'} -- --some.option={{braces}}"
    ran = CliRunner().invoke(torchtitan_ratio.main, options.split())
    assert ran.exit_code == 0, ran.output
    assert "torchtitan, again: losses equal in 7 steps" in ran.output
    state = json.loads((tmp_path / "out" / "state.json").read_text())
    assert [sorted(found["turns_s"]) for found in state["rounds"]] == 2 * [["again", "stock"]]
