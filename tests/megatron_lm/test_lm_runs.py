"""What tests rely on when they read a run of Megatron-LM, or end one."""

from __future__ import annotations

import pytest
from lm_cases import full
from lm_runs import iterations_in, run_pretrain
from torchrun_ranks import started_by

TIME = "[2026-05-04 10:11:12.131415]"
LINE = (
    " {time} iteration {number:8}/      12 | consumed samples: 8 | "
    "elapsed time per iteration (ms): 827.5 |{more} learning rate: 9.9E-04 | "
    "global batch size: 8 |{loss} loss scale: 2.0 |"
    "{norm} number of skipped iterations:   {skipped} | number of nan iterations:   0 |"
)


def line(number: int, loss: str | None = "4.874699E+00", more: str = "") -> str:
    return LINE.format(
        time=TIME,
        number=number,
        more=more,
        loss=f" lm loss: {loss} |" if loss else "",
        norm=" grad norm: 1.439 |" if loss else "",
        skipped=int(loss is None),
    )


def test_what_envpipe_adds_is_no_difference():
    more = " envpipe phase: steady | envpipe energy per GPU (J/iter/GPU): 2.5 |"
    more += " energy per GPU (J/iter/GPU): 3.5 |"
    (patched,) = iterations_in(line(1, more=more))
    (stock,) = iterations_in(line(1))
    assert (patched.phase, patched.energy_j) == ("steady", 3.5)
    assert patched.digits == stock.digits


@pytest.mark.parametrize("field", ["lm loss: 4.874699E+00", "grad norm: 1.439", "9.9E-04"])
def test_a_last_digit_makes_a_difference(field):
    other = field[:-1] + "8"
    (stock,) = iterations_in(line(1))
    (changed,) = iterations_in(line(1).replace(field, other))
    assert changed.digits != stock.digits


@full
def test_a_run_that_hangs_is_ended_with_its_stacks(checkout, tmp_path, monkeypatch):
    script = tmp_path / "hangs.py"
    script.write_text(
        "import threading\n\n\ndef waits_for_ever():\n    threading.Event().wait()\n\n\n"
        "waits_for_ever()\n"
    )
    (tmp_path / "megatron").symlink_to(checkout("core_v0.16.1") / "megatron")
    marks: list[str] = []
    monkeypatch.setattr(
        "torchrun_ranks.started_by", lambda mark: marks.append(mark) or started_by(mark)
    )
    run = run_pretrain(tmp_path, "", tmp_path / "run", nproc=2, script="hangs.py", timeout_s=60)
    assert run.returncode is None
    assert all("waits_for_ever" in output for output in run.outputs)
    assert marks
    assert not started_by(marks[0])
    with pytest.raises(AssertionError, match="took too long"):
        run.require_success()
