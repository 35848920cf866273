"""A rank that is killed: what the other did, in a fake checkout."""

from dataclasses import replace

import pytest
from fake_checkout import no_limits, processes_of

pytest.importorskip("torch")
from benchmarks.megatron_lm import lost
from benchmarks.megatron_lm.running.jobs import Job, State

# Rank 0 makes each step after rank 1, and notices if that is gone; the arguments are iterations and
# the loss that it goes on with then.
PAIR = """
import os, time
from pathlib import Path

RANK = int(os.environ["RANK"])

def train_step(number, forward_backward_func, left_loss):
    loss = float(number)
    while RANK == 0 and len(Path("made").read_text()) <= number:
        try:
            os.kill(int(Path("pid").read_text()), 0)
        except ProcessLookupError:
            if len(Path("made").read_text()) > number:  # it was the last one's last step
                break
            if left_loss is None:
                raise ValueError(f"Stage {RANK} lost its neighbour, stage 1")
            loss = left_loss
            break
    if RANK == 1:
        time.sleep(0.01)
        with Path("made").open("a") as file:
            file.write(".")
    return {"lm loss": loss}, False, None, None, None, 0.25

def pretrain(arguments):
    if RANK == 1:
        Path("made").touch()
        Path("pid").write_text(str(os.getpid()))
    while not Path("pid").exists() or not Path("pid").read_text():
        time.sleep(0.01)
    for number in range(int(arguments[0])):
        train_step(number, None, float(arguments[1]) if arguments[1:] else None)
"""


@pytest.mark.parametrize(
    ("left_loss", "outcome"),
    [
        ((), "ok"),
        (("-1.0",), "ranks [0] made a step without the lost rank; ranks [0] made other steps"),
    ],
)
def test_a_lost_rank_and_what_the_other_made_without_it(left_loss, outcome, site, state):
    (site.patched / "megatron" / "training" / "training.py").write_text(PAIR)
    whole = Job("lost/pp2/undisturbed", ("60",), 2, 60, patched=True, lost={"signal": None})
    killed = replace(
        whole,
        name="lost/pp2/sigkill of rank 1",
        arguments=("60", *left_loss),
        after=whole.name,
        lost={"signal": "SIGKILL", "rank": 1, "iteration": 7},
    )
    lost.run_jobs(site, state, [killed], no_limits())
    assert not state.runs  # there is nothing to compare with
    lost.run_jobs(site, state, [whole, killed], no_limits())
    assert state.runs[whole.name]["status"] == "ok"
    assert [len(made) for made in state.runs[whole.name]["steps"]] == [60, 60]

    run = state.runs[killed.name]
    assert run["status"] == outcome
    assert 7 <= run["iteration"] < 60
    assert list(run["ended_after_s"]) == [0]
    assert run["exits"] == {0: 0 if left_loss else 1}
    if not left_loss:
        assert run["errors"] == {0: "Stage 0 lost its neighbour, stage 1"}
        assert all(0 <= run["iteration"] + 1 - made <= 2 for made in run["steps"])
    (row,) = lost.rows(State(state.path))
    assert row["loss"] == "sigkill of rank 1"
    assert row["last end after (s)"] == run["ended_after_s"][0]
    assert not processes_of(killed.folder(site))
