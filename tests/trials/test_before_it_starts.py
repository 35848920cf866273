"""What a quickstart and a proof check, read and keep, without training."""

import importlib.util
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import run_badly
from energy_lines import json_lines
from locked_file import locked_file
from rich.console import Console
from trials_helpers import short_settings, turn, write_text

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.control import Control
from envpipe_megatron.trials import machine as trial_machine
from envpipe_megatron.trials import run as trial_run
from envpipe_megatron.trials.machine import emulated_machine, real_machine
from envpipe_megatron.trials.run import Trial, run_trial
from envpipe_megatron.trials.settings import ARMS, ORDER_ARMS, RUNS, Settings, load_text


@pytest.fixture
def never_starts(monkeypatch):
    def train(*arguments):
        raise AssertionError("training has begun")

    monkeypatch.setattr(trial_run, "_train", train)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def quickstart(settings):
    return Trial(settings, emulated_machine(settings.preset, settings.num_stages, None))


def proof(settings):
    return quickstart(settings.as_proof(1, 3, changes_clocks=True))


def refused(settings, kind=quickstart):
    with pytest.raises(EnvPipeError) as caught:
        run_trial(kind(settings), Console(file=io.StringIO()))
    return str(caught.value)


@pytest.mark.parametrize(
    ("remedy", "said"),
    [("Unset it", "it is forbidden. Unset it. Or leave"), ("", "it is forbidden. Or leave")],
)
def test_clocks_that_may_not_be_changed(monkeypatch, remedy, said):
    none = Control("auto", None, "it is forbidden", remedy)
    monkeypatch.setattr(trial_machine, "choose_control", lambda *_: none)
    with pytest.raises(EnvPipeError, match=said):
        real_machine(with_clocks=True)


@pytest.mark.usefixtures("never_starts")
class TestRefused:
    def test_too_little_text(self, tmp_path):
        short = write_text(tmp_path / "short.txt", size=10)
        settings = short_settings(tmp_path, text=str(short))
        message = refused(settings)
        assert f"Too little text to train on in {short}: {short.stat().st_size} bytes" in message
        assert "3200 bytes" in message
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("kind", "names"),
        [
            (quickstart, ["notes.txt"]),
            (quickstart, ["earlier/1/settings.json", "notes.txt"]),
            (quickstart, ["profile.csv"]),
            (quickstart, ["emulated/mine.txt"]),
            (quickstart, ["settings.json", ".git/config"]),  # an editor's settings
            (proof, ["settings.json"]),
        ],
    )
    def test_a_folder_with_other_files_is_left_untouched(self, tmp_path, kind, names):
        settings = short_settings(tmp_path)
        for name in names:
            path = tmp_path / "out" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text('{"editor": "mine"}')
        before = contents(tmp_path / "out")
        message = refused(settings, kind)
        assert str(tmp_path / "out") in message
        assert "--output" in message
        assert contents(tmp_path / "out") == before

    def test_a_package_that_is_missing(self, tmp_path, monkeypatch):
        found = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == "megatron" else found(name)
        )
        message = refused(short_settings(tmp_path))
        assert "`envpipe quickstart` needs megatron-core, which is not installed" in message
        assert "pip install" in message
        assert not (tmp_path / "out").exists()

    def test_the_command_says_so_without_a_traceback(self, tmp_path):
        text = write_text(tmp_path / "text.txt")
        (tmp_path / "short.txt").write_text("short")
        out, file = str(tmp_path / "out"), str(text)
        for arguments, said in (
            (["--text", str(tmp_path / "gone"), "--output", out], "does not exist"),
            (["--text", str(tmp_path / "short.txt"), "--output", out], "Too little text"),
            (["--text", file, "--output", out, "--gpu", "abacus"], "abacus"),
            (["--text", file, "--output", file], "is a file"),
            (["--text", file, "--output", file + "/out"], "Not a directory"),
        ):
            assert said in run_badly("quickstart", *arguments)


@pytest.mark.parametrize("kind", [quickstart, proof])
def test_what_earlier_runs_left_is_set_aside(tmp_path, monkeypatch, kind):
    settings = short_settings(tmp_path)
    trial, out = kind(settings), tmp_path / "out"
    file = trial.settings.file
    seen = []

    def train(results, console):
        seen.append(contents(out))
        assert settings.text_copy.read_bytes() == Path(settings.text).read_bytes()
        raise EnvPipeError("stop here")

    monkeypatch.setattr(trial_run, "_train", train)
    for run in ("first", "second", "third"):
        assert refused(settings, kind) == "stop here"
        assert Settings.read(file) == trial.settings
        (out / "emulated").mkdir()
        for name in ("emulated/gpu0.json", "notes.txt"):
            (out / name).write_text(run)
    assert set(seen[0]) == {file, settings.text_copy, out / ".trial.lock"}
    assert {path for path in seen[2] if path.parent == out} == set(seen[0])
    for number, run in ((1, "first"), (2, "second")):
        for name in ("emulated/gpu0.json", "notes.txt"):
            assert seen[2][out / "earlier" / str(number) / name] == run.encode()


def test_two_runs_do_not_share_a_folder(tmp_path):
    settings = short_settings(tmp_path)
    lock = tmp_path / "out" / ".trial.lock"
    lock.parent.mkdir()
    with locked_file(lock):
        assert f"Another run writes to {lock.parent}" in refused(settings)
    assert list(lock.parent.iterdir()) == [lock]


@pytest.mark.parametrize("told", [0, 1, 2], ids=["nothing", "an iteration", "the baseline"])
@pytest.mark.parametrize("end", [KeyboardInterrupt, EnvPipeError("lost"), OSError("disk full")])
def test_what_was_told_is_kept_however_it_ends(tmp_path, monkeypatch, end, told):
    def train(results, console):
        results.begin(console)
        if told:
            event = {"event": "iteration", "arm": "baseline", "number": 1, "phase": "steady"}
            event["loss"] = 5.0
            results.take(event)
        if told == 2:
            results.take(turn(RUNS[0].name))
        raise end

    monkeypatch.setattr(trial_run, "_train", train)
    screen = io.StringIO()
    with pytest.raises(end if isinstance(end, type) else type(end)):
        run_trial(quickstart(short_settings(tmp_path)), Console(file=screen))
    claims = json.loads((tmp_path / "out" / "claims.json").read_text())
    assert claims["complete"] is False
    if told == 2:
        (kept,) = json_lines(tmp_path / "out" / "turns.jsonl")
        assert (kept["arm"], kept["step"]["time_s"]) == ("baseline", 0.5)
    assert ("Interrupted: clocks are reset" in screen.getvalue()) == (end is KeyboardInterrupt)
    assert not (tmp_path / "out" / "text.bin").exists()


@pytest.mark.parametrize("kind", [quickstart, proof])
def test_ranks_that_end_well_but_tell_nothing_are_no_success(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(trial_run, "_train", lambda *arguments: None)
    message = refused(short_settings(tmp_path), kind)
    assert "without reporting all turns" in message
    assert str(tmp_path / "out" / "log.txt") in message
    # Its own folder is used again.
    assert "without reporting all turns" in refused(short_settings(tmp_path), kind)


@pytest.mark.parametrize("different", ["losses", "stages"])
@pytest.mark.parametrize(("kind", "arms"), [(quickstart, RUNS), (proof, ARMS)])
def test_a_changed_result_is_no_success(tmp_path, monkeypatch, kind, arms, different):
    def train(results, console):
        results.turns += [turn(arm.name) for arm in arms]
        other = results.turns[-1]
        if different == "losses":
            other["losses"] = [[4.0, 3.5], [3.0, np.nextafter(2.5, 3.0)]]
        else:
            other["stages"][1] = {**other["stages"][1], "weights_sha256": "b"}

    monkeypatch.setattr(trial_run, "_train", train)
    monkeypatch.setattr(Trial, "write", lambda self: None)
    monkeypatch.setattr(Trial, "show", lambda self, console: None)
    assert "changed the result of training" in refused(short_settings(tmp_path), kind)


@pytest.mark.parametrize("changes", [True, False])
def test_ranks_that_leave_clocks_alone_may_change_no_gpu(tmp_path, monkeypatch, changes):
    def run_ranks(num_ranks, program, environment, log_path, take):
        assert environment.get("ENVPIPE_FORBID_CLOCK_CONTROL") == (None if changes else "1")
        raise EnvPipeError("stop here")

    monkeypatch.delenv("ENVPIPE_FORBID_CLOCK_CONTROL", raising=False)
    monkeypatch.setattr(trial_run, "run_ranks", run_ranks)
    settings = replace(short_settings(tmp_path), changes_clocks=changes)
    assert refused(settings) == "stop here"


class TestText:
    def test_a_folder_in_order_of_names_not_of_the_file_system(self, tmp_path, monkeypatch):
        for name in ("b.txt", "a/z.py", "c.md", "a.rst"):
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(name)
        (tmp_path / "picture.png").write_bytes(b"not text")
        (tmp_path / "folder.txt").mkdir()
        in_order = load_text(tmp_path, 1)
        assert in_order == b"a/z.py\na.rst\nb.txt\nc.md"
        assert load_text(tmp_path / "picture.png", 1) == b"not text", "a file is taken as it is"
        found = Path.rglob
        monkeypatch.setattr(
            Path, "rglob", lambda self, pattern: reversed(list(found(self, pattern)))
        )
        assert load_text(tmp_path, 1) == in_order

    def test_unreadable_files_of_a_folder_are_passed_over(self, tmp_path, monkeypatch):
        for name in ("a.txt", "b.txt"):
            (tmp_path / name).write_text(name)
        read = Path.read_bytes

        def read_bytes(path):
            if path.name == "a.txt":
                raise PermissionError(13, "Permission denied", str(path))
            return read(path)

        monkeypatch.setattr(Path, "read_bytes", read_bytes)
        assert load_text(tmp_path, 1) == b"b.txt"
        with pytest.raises(EnvPipeError, match=r"a\.txt: Permission denied"):
            load_text(tmp_path / "a.txt", 1)


def test_the_last_stage_is_slower_by_its_output_layer():
    # A stage of 2 layers: 2 x (24 x 64^2 + 4 x 64 x 64) = 229,376 operations a token; the output
    # layer's 2 x 64 x 256 = 32,768 are a seventh of that.
    settings = Settings("out", "text")
    assert settings.forward_times_s == pytest.approx([0.03, 0.03, 0.03, 0.03 * 8 / 7])


def test_every_other_round_of_a_proof_goes_backwards():
    assert Settings("out", "text").turns == [(0, arm) for arm in RUNS]
    settings = Settings("out", "text", preset=None)
    for arms in (ARMS, ORDER_ARMS):
        two_rounds = settings.as_proof(2, 3, changes_clocks=arms is ARMS).turns
        assert two_rounds == [(0, arm) for arm in arms] + [(1, arm) for arm in arms[::-1]]
