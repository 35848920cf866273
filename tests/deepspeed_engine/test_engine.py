"""DeepSpeed's own engine, and EnvPipe's orders on it: the same results to the last bit.

CI trains some models by some orders on two ranks; with ENVPIPE_DEEPSPEED_FULL=1 four ranks train
all by all, with replicas and tensor parallelism, and run the whole loop.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from on_request import asked_for, on_request

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")
pytestmark = pytest.mark.xdist_group("launch")

RANK = Path(__file__).with_name("engine_rank.py")
MICROBATCHES = 6
FULL = asked_for("DEEPSPEED")
STEPS = 10 if FULL else 5
STAGES = 4 if FULL else 2
MODELS = ("gpt2", "llama", "bert")
IN_CI = ("gpt2", "mask", "varying lengths", "tuples of one")
ON_FOUR_RANKS = ("partitioned activations", "replicas in bf16")
CASES = (*IN_CI, *ON_FOUR_RANKS, *(f"all of {model}" for model in MODELS)) if FULL else IN_CI
LOOPS = tuple(f"loop of {model}" for model in MODELS)
WITHOUT = "loop of gpt2 without control"
Run = dict[str, Any]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return what each rank came to, by case and run."""
    folder = tmp_path_factory.mktemp("deepspeed")
    command = [sys.executable, str(RANK), str(folder), str(STAGES), str(STEPS), *CASES]
    command += (*LOOPS, WITHOUT) if FULL else ()
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=3000 if FULL else 400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(STAGES)]


@pytest.mark.parametrize("case", CASES)
def test_orders_change_no_bit(trained, case):
    """Losses, an evaluation between them, a larger batch and weights, on every rank.

    Also of a step behind the end of training, which is DeepSpeed's own.
    """
    for rank in trained:
        own = rank[case]["own"]
        assert len(own["losses"]) == STEPS + 2
        assert len(set(own["losses"])) == STEPS + 2, "something is learned"
        runs = {name: run for name, run in rank[case].items() if name != "own"}
        assert runs
        for ours in runs.values():
            for name in ("losses", "evaluated", "weights"):
                assert ours[name] == own[name]
            assert ours["steps"] == STEPS, "the first is DeepSpeed's own"
            assert ours["held"] == 0, "buffers hold nothing between steps"


def test_the_orders_are_those_that_were_asked_for(trained):
    forwards = [f"F{number}" for number in range(MICROBATCHES)]
    runs = trained[0]["gpt2"]
    assert runs["gpipe"]["units"][:MICROBATCHES] == forwards
    extra = runs["ours balanced"]["units"].index("B0")
    assert extra > STAGES, "forwards beyond those of 1F1B"
    assert trained[0]["varying lengths"]["ours balanced"]["units"] != []


@on_request("DEEPSPEED")
@pytest.mark.parametrize("loop", LOOPS)
def test_the_whole_loop_saves_energy(trained, loop):
    """Profile, plan, reconfigure: in emulated time, which the host's speed does not change."""
    found = trained[0][loop]["job"]["comparison"]
    assert found["saving_percent"] > 5
    assert found["slowdown_percent"] < 1


@on_request("DEEPSPEED")
def test_without_control_an_order_of_whole_backwards_is_looked_for(trained):
    """Stages that take as long as each other have none that is shorter than DeepSpeed's."""
    why, found = trained[0][WITHOUT]["notes"]
    assert why.endswith("the shortest order in place of least energy, and clocks stay as they are")
    assert found == "The framework's own order: no other is predicted to take less time"
    assert trained[0][WITHOUT]["clocks"]["changes"] == 0
