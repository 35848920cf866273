"""`envpipe profile`: what it starts, and what becomes of what that leaves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run, run_badly

from envpipe_megatron.core.profile import read_profile

pytest.importorskip("torch")

#: A training script as the command sees it: it is given a folder for the profile.
SCRIPT = """
import sys
from pathlib import Path

assert sys.argv[1:4] == ["--train-iters", "7", "--envpipe"], sys.argv
assert "--envpipe-profile-only" in sys.argv
folder = Path(sys.argv[sys.argv.index("--envpipe-output") + 1])
{end}
"""
LEAVES = """
rows = [f"{s},{k},{f},{f / 1e5},{f / 100}" for s in (0, 1) for k in ("forward", "backward")
        for f in (1410, 1200)]
header = "stage,instruction,frequency,time,energy"
(folder / "profile.csv").write_text("\\n".join([header, *rows]) + "\\n")
(folder / "profile.json").write_text('{"format": "envpipe-profile/1", "gpu": "H200"}')
"""


def words(folder: Path, end: str, *torchrun: str) -> list[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(end=end))
    begin = ["profile", "--output", str(folder / "out.csv"), "--", *torchrun]
    return [*begin, str(script), "--train-iters", "7"]


def profile(folder: Path, end: str, *torchrun: str) -> tuple[int, str]:
    result = run(*words(folder, end, *(torchrun or ("--standalone",))))
    return result.exit_code, result.output


def test_the_profile_is_left_where_it_was_asked_for(tmp_path: Path) -> None:
    code, told = profile(tmp_path, LEAVES)
    assert code == 0, told
    assert "2 stages at 2 clocks" in told
    made = read_profile(tmp_path / "out.csv")
    assert made.num_stages == 2
    assert made.sidecar.gpu == "H200"
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "out.csv", "out.json"}


@pytest.mark.parametrize(
    ("options", "status", "code", "said"),
    [
        ([], 3, 1, "failed"),
        ([], 0, 1, "left no profile"),
        (["--node_rank=1"], 0, 0, "on the node of rank 0"),
        (["--nnodes=2"], 0, 0, "on the node of rank 0"),
    ],
)
def test_training_that_left_no_profile_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], status: int, code: int,
    said: str,
) -> None:  # fmt: skip
    command = sys.modules["envpipe_megatron.cli.jobs.profile"]
    monkeypatch.setattr(command, "run_torchrun", lambda *given: status)
    got, told = profile(tmp_path, "", "--standalone", *options)
    assert (got, said in told) == (code, True)
    assert {path.name for path in tmp_path.iterdir()} == {"train.py"}


def test_a_script_that_is_not_there_is_looked_for_before_torchrun_starts(tmp_path: Path) -> None:
    words = ("profile", "--output", tmp_path / "out.csv", "--", "--standalone", "none.py")
    assert "There is no such script to run (got 'none.py')" in run_badly(*words)


def test_what_ends_it_ends_the_training(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    os.mkfifo(told)
    trains_for_ever = f"""
import os, signal
Path({str(told)!r}).write_text(str(os.getpid()))
signal.pause()
"""
    command = [sys.executable, "-m", "envpipe_megatron.cli"]
    process = subprocess.Popen(
        [*command, *words(tmp_path, trains_for_ever, "--standalone")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    rank = int(told.read_text())  # it is there once the rank trains
    process.terminate()
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1
    assert b"failed" in output
    with pytest.raises(ProcessLookupError):
        os.kill(rank, 0)
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "pid"}
