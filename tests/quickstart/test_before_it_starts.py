"""What a quickstart checks, reads and keeps, without training."""

import importlib.util
import io
import itertools
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from quickstart_helpers import short_settings, write_text
from rich.console import Console

from envpipe_megatron.cli import main
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.quickstart import run as quickstart_run
from envpipe_megatron.quickstart.run import Progressed, run_quickstart
from envpipe_megatron.quickstart.settings import QuickstartError, Settings, load_text


@pytest.fixture
def never_starts(monkeypatch):
    def train(*arguments):
        raise AssertionError("training has begun")

    monkeypatch.setattr(quickstart_run, "_train", train)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(settings):
    with pytest.raises(EnvPipeError) as caught:
        run_quickstart(settings, Console(file=io.StringIO()))
    return str(caught.value)


@pytest.mark.usefixtures("never_starts")
class TestRefused:
    def test_too_little_text(self, tmp_path):
        short = write_text(tmp_path / "short.txt", size=10)
        settings = short_settings(tmp_path, text=str(short))
        message = refused(settings)
        assert f"Too little text to train on in {short}: {short.stat().st_size} bytes" in message
        assert "3200 bytes" in message
        assert not (tmp_path / "out").exists()

    def test_an_unknown_preset(self, tmp_path):
        message = refused(short_settings(tmp_path, preset="abacus"))
        assert "abacus" in message
        assert "a100-sxm" in message
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        "names",
        [["notes.txt"], ["settings.json", "notes.txt"], ["profile.csv"], ["emulated/mine.txt"]],
        ids="+".join,
    )
    def test_a_folder_with_other_files_is_left_untouched(self, tmp_path, names):
        settings = short_settings(tmp_path)
        for name in names:
            path = tmp_path / "out" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("mine")
        before = contents(tmp_path / "out")
        message = refused(settings)
        assert str(tmp_path / "out") in message
        assert "--output" in message
        assert contents(tmp_path / "out") == before

    def test_a_package_that_is_missing(self, tmp_path, monkeypatch):
        found = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == "megatron" else found(name)
        )
        message = refused(short_settings(tmp_path))
        assert "needs megatron-core, which is not installed" in message
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
            result = CliRunner().invoke(main, ["quickstart", *arguments])
            assert result.exit_code not in (0, None), arguments
            assert isinstance(result.exception, SystemExit), repr(result.exception)
            assert said in result.stderr, (arguments, result.stderr)


def test_the_folder_of_an_earlier_quickstart_is_used_again(tmp_path, monkeypatch):
    settings = short_settings(tmp_path)
    out = tmp_path / "out"
    (out / "emulated").mkdir(parents=True)
    for name in ("settings.json", "summary.json", "energy.jsonl", "emulated/gpu0.json"):
        (out / name).write_text("old")
    seen = []

    def train(settings, output, progressed, console):
        seen.extend(sorted(path.name for path in output.iterdir()))
        assert settings.text_copy.read_bytes() == Path(settings.text).read_bytes()
        raise QuickstartError("stop here")

    monkeypatch.setattr(quickstart_run, "_train", train)
    assert refused(settings) == "stop here"
    assert seen == ["settings.json", "text.bin"]
    assert Settings.read(out / "settings.json") == settings


RESULT = {
    "stages": [
        {
            "metered": {"warm-up": {"energy_j": 1.0}, "steady": {"energy_j": 100.0 + stage}},
            "executed": ["F0", "B0"], "clock_changes": 1,
        }
        for stage in range(4)
    ],
    "iterations": [
        {"phase": "warm-up", "iteration_time_s": 9.0, "wall_time_s": 9.0},
        {"phase": "steady", "iteration_time_s": 0.5, "wall_time_s": 0.6},
        {"phase": "steady", "iteration_time_s": 0.5, "wall_time_s": 0.6},
    ],
    "losses": [5.0, 4.0, 3.0], "schedule": "1f1b",
    "notes": [],
}  # fmt: skip


@pytest.mark.parametrize("told", [0, 1, 2], ids=["nothing", "an iteration", "the baseline"])
@pytest.mark.parametrize("end", [KeyboardInterrupt, QuickstartError("lost"), OSError("disk full")])
def test_what_was_told_is_kept_however_it_ends(tmp_path, monkeypatch, end, told):
    def train(settings, output, progressed: Progressed, console):
        if told:
            progressed.iterations["baseline"] = [{"loss": 5.0}]
        if told == 2:
            progressed.results["baseline"] = RESULT
        raise end

    monkeypatch.setattr(quickstart_run, "_train", train)
    screen = io.StringIO()
    with pytest.raises(end if isinstance(end, type) else type(end)):
        run_quickstart(short_settings(tmp_path), Console(file=screen))
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["complete"] is False
    assert summary["losses"] == ({"baseline": [5.0]} if told else {})
    rows = (tmp_path / "out" / "results.csv").read_text().splitlines()
    assert len(rows) == 1 + (told == 2)
    if told == 2:
        baseline = summary["runs"]["baseline"]
        assert baseline["energy_j"] == 406
        assert baseline["energy_per_iteration_j"] == 203
        assert baseline["iteration_time_s"] == 0.5
        assert baseline["average_power_w"] == 406
    assert ("Interrupted" in screen.getvalue()) == (end is KeyboardInterrupt)


def test_ranks_that_end_well_but_tell_nothing_are_no_success(tmp_path, monkeypatch):
    monkeypatch.setattr(quickstart_run, "_train", lambda *arguments: None)
    message = refused(short_settings(tmp_path))
    assert "without reporting their results" in message
    assert str(tmp_path / "out" / "log.txt") in message


@pytest.mark.parametrize("different", ["losses_bit_equal", "weights_bit_equal"])
def test_a_changed_result_is_no_success(tmp_path, monkeypatch, different):
    summary = {"complete": True, "losses_bit_equal": True, "weights_bit_equal": True}
    monkeypatch.setattr(quickstart_run, "_train", lambda *arguments: None)
    monkeypatch.setattr(
        quickstart_run, "write_results", lambda *arguments: {**summary, different: False}
    )
    assert "changed the result of training" in refused(short_settings(tmp_path))


class TestText:
    def test_a_file_as_it_is(self, tmp_path):
        path = tmp_path / "book"
        path.write_bytes(b"\xff\x00any bytes")
        assert load_text(path, 1) == b"\xff\x00any bytes"

    def test_a_folder_in_order_of_names_not_of_the_file_system(self, tmp_path, monkeypatch):
        for name in ("b.txt", "a/z.py", "c.md", "a.rst"):
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(name)
        (tmp_path / "picture.png").write_bytes(b"not text")
        (tmp_path / "folder.txt").mkdir()
        in_order = load_text(tmp_path, 1)
        assert in_order == b"a/z.py\na.rst\nb.txt\nc.md"
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
        with pytest.raises(QuickstartError, match=r"a\.txt: Permission denied"):
            load_text(tmp_path / "a.txt", 1)


@pytest.mark.xdist_group("megatron")
def test_microbatches_depend_on_the_iteration_alone(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    from envpipe_megatron.quickstart.model import microbatches

    settings = short_settings(tmp_path)
    text = Path(settings.text).read_bytes()

    def iteration(number):
        return list(microbatches(settings, text, number))

    first = iteration(0)
    assert len(first) == 6
    assert all(m.shape == (2, 33) and m.dtype == torch.int64 for m in first)
    for rows in first:
        assert all(bytes(row.tolist()) in text for row in rows)
    torch.manual_seed(99)  # whatever a rank has drawn before
    iteration(1)
    assert all(torch.equal(a, b) for a, b in zip(first, iteration(0), strict=True))
    distinct = [*first, *iteration(1), *iteration(2)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(distinct, 2))


def test_the_last_stage_is_slower_by_its_output_layer():
    # A stage of 2 layers: 2 x (24 x 64^2 + 4 x 64 x 64) = 229,376 operations a token; the output
    # layer's 2 x 64 x 256 = 32,768 are a seventh of that.
    settings = Settings("out", "text")
    assert settings.forward_times_s == pytest.approx([0.03, 0.03, 0.03, 0.03 * 8 / 7])


def test_settings_survive_their_file(tmp_path):
    settings = short_settings(tmp_path)
    settings.write(tmp_path / "settings.json")
    assert Settings.read(tmp_path / "settings.json") == settings
    assert settings.minibatch_size == 12
    assert settings.baseline_iterations == 4
    assert settings.text_copy == tmp_path / "out" / "text.bin"
