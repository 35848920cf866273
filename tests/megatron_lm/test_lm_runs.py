"""What tests rely on when they read a run of Megatron-LM, or end one."""

import pytest
from lm_cases import full
from lm_runs import iterations_in, run_pretrain
from torchrun_ranks import started_by

LINE = (
    " [2026-05-04 10:11:12.131415] iteration        1/      12 | consumed samples: 8 | "
    "learning rate: 9.9E-04 | lm loss: 4.874699E+00 | loss scale: 2.0 | grad norm: 1.439 | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |"
)


@pytest.mark.parametrize("field", ["lm loss: 4.874699E+00", "grad norm: 1.439", "9.9E-04"])
def test_a_last_digit_makes_a_difference_and_what_envpipe_adds_none(field):
    more = " envpipe phase: steady | envpipe energy per GPU (J/iter/GPU): 2.5 |"
    (stock,), (patched,) = iterations_in(LINE), iterations_in(LINE + more)
    assert patched.digits == stock.digits
    assert patched.phase == "steady"
    (changed,) = iterations_in(LINE.replace(field, field[:-1] + "8"))
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
