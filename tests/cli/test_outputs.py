"""What commands write: never over another's file, and never a file that is cut short."""

import subprocess
import sys

import pytest
from cli_helpers import plan_for
from commands import run, run_badly, run_well
from energy_lines import window
from whole_layers import write_layers

from envpipe_megatron.cli import main
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.formats.energy import append_line

COMMANDS = {
    "profile": ["--", "train.py"],
    "partition": ["--num-stages", 2, "--num-microbatches", 4, "--layers", "layers.json"],
}


@pytest.fixture
def folder(tmp_path, profile_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_layers(tmp_path / "layers.json", {str(n): (0.1, 0.1) for n in range(4)})
    (tmp_path / "train.py").write_text("raise SystemExit('was started')")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_profile_cannot_have_its_sidecars_name(folder, command):
    message = run_badly(command, "--output", "x.json", *COMMANDS[command])
    assert "x.json" in message
    assert "overwrite" in message
    assert not (folder / "x.json").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_profiles_sidecar_overwrites_no_plan(folder, profile_path, command):
    plan_for(profile_path, folder / "plan9.json")
    before = (folder / "plan9.json").read_bytes()
    message = run_badly(command, "--output", "plan9.csv", *COMMANDS[command])
    assert "plan9.json" in message
    assert "was started" not in message
    assert (folder / "plan9.json").read_bytes() == before
    assert not (folder / "plan9.csv").exists()


def test_a_profile_is_written_again_with_its_sidecar(folder):
    for _ in range(2):
        run_well("partition", "--output", "p.csv", *COMMANDS["partition"], "--blocking-power", 80)
    assert read_profile(folder / "p.csv").num_stages == 2


@pytest.mark.parametrize("command", ["partition", "quickstart", "simulate"])
def test_an_output_of_a_variable_that_is_not_set_is_refused(folder, command):
    result = run(command, "--output", "", *COMMANDS.get(command, ()))
    assert result.exit_code == 2
    assert "'--output': a path is wanted, and this is empty" in result.output
    result = run(command, "--output", "-", *COMMANDS.get(command, ()))
    assert "'--output': a path is wanted, and this is -" in result.output


@pytest.mark.parametrize("command", ["partition", "quickstart", "simulate"])
@pytest.mark.parametrize("name", ["loop", "loop/in"])
def test_an_output_in_a_circle_of_links_is_refused(folder, command, name):
    (folder / "loop").symlink_to("loop")
    result = run(command, "--output", name, *COMMANDS.get(command, ()))
    assert result.exit_code == 2
    assert f"'--output': {name} leads in a circle of symbolic links" in result.output


#: What each command reads, before and behind the option of its output.
INPUTS = {
    "plan": ("--num-microbatches 4 --blocking-power 80 --profile {} --schedule {}", "p.csv o.csv"),
    "partition": ("--num-stages 2 --num-microbatches 4 --layers {}", "layers.json"),
    "straggler": ("--factor 1.1 --profile {} --frontier {}", "p.csv front.jsonl"),
    "import-freqs": (
        "--num-microbatches 4 --blocking-power 80 --profile {} --freqs {}", "p.csv freqs.py",
    ),
    "export-freqs": ("--profile {} --plan {}", "p.csv plan.json"),
    "export-schedule": ("{}", "plan.json"),
}  # fmt: skip


@pytest.fixture
def inputs(folder, profile_path):
    """A file of each kind, whose names are those of `INPUTS`."""
    profile_path.rename("p.csv")
    (folder / "p.json").write_text('{"format": "envpipe-profile/1"}')
    optimal = ("--schedule", "auto", "--policy", "optimal", "--frontier", "front.csv")
    plan_for("p.csv", "optimal.json", *optimal, "--frontier-points", 2, microbatches=4)
    plan_for("p.csv", "plan.json", microbatches=4)
    run_well("export-freqs", "--profile", "p.csv", "--plan", "plan.json", "--output", "freqs.py")
    run_well("export-schedule", "plan.json", "--output", "o.csv")
    return folder


def test_no_command_writes_over_what_it_reads(inputs):
    before = {path: path.read_bytes() for path in inputs.iterdir()}
    for command, (words, names) in INPUTS.items():
        sidecar = ["p.json"] * ("p.csv" in names and command != "export-freqs")
        for output in [*names.split(), *sidecar]:
            given = words.format(*names.split()).split()
            message = run_badly(command, *given, "--output", output)
            assert "overwrite" in message, (command, output)
            assert output in message
    assert {path: path.read_bytes() for path in inputs.iterdir()} == before


def test_a_frontier_overwrites_nothing_but_an_earlier_one(folder, profile_path):
    def plan():
        return run(
            "plan", "--profile", profile_path, "--num-microbatches", 2, "--blocking-power", 80,
            "--schedule", "auto", "--policy", "optimal", "--output", "plan.json",
            "--frontier", "front.csv",
        )  # fmt: skip

    for beside in (folder / "front.jsonl", folder / "front.png"):
        beside.write_text("mine")
        refused = plan()
        assert refused.exit_code == 1
        assert beside.name in " ".join(refused.stderr.split())
        assert beside.read_text() == "mine"
        assert not (folder / "plan.json").exists()
        beside.unlink()
    for _ in range(2):
        assert plan().exit_code == 0
        assert (folder / "front.png").stat().st_size > 100


def test_pictures_overwrite_nothing_but_earlier_ones(folder, profile_path):
    plan_for(profile_path, folder / "plan.json", microbatches=1)
    (folder / "timeline.png").write_text("mine")
    words = ["simulate", "--profile", profile_path, "--plan", "plan.json", "--output"]
    message = run_badly(*words, folder)
    assert "timeline.png" in message
    assert (folder / "timeline.png").read_text() == "mine"
    for _ in range(2):
        run_well(*words, folder / "pictures")


SAID = "Error: Cannot read or write the output: No space left on device. Make room there"
PRINTING = {
    "help": "--help",
    "tables": "simulate --profile profile.csv --plan plan.json",
    "text": "export-schedule plan.json",
    "bill": "energy sum energy.jsonl",
}


@pytest.fixture
def shown(folder, profile_path):
    """Return what these commands print."""
    plan_for(profile_path, "plan.json")
    append_line(folder / "energy.jsonl", window())


@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize("command", PRINTING)
def test_output_to_a_full_disk_is_an_error_in_a_line(monkeypatch, capsys, command):
    with open("/dev/full", "w") as full:  # noqa: PTH123  # what it still holds may not fail at its end
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as end:
            main(PRINTING[command].split(), "envpipe")
    assert end.value.code == 1
    *before, said = capsys.readouterr().err.splitlines()
    assert said.startswith(SAID)
    assert before in ([], ["Simulating plan.json ..."])


@pytest.mark.usefixtures("shown")
def test_the_interpreter_has_nothing_to_add():
    command = [sys.executable, "-m", "envpipe_megatron.cli", *PRINTING["text"].split()]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith(SAID)
    assert ended.stderr.count("\n") == 1


def test_names_that_a_terminal_cannot_show(tmp_path, monkeypatch, profile_path):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    for name in ("pl\u00e4n.json", "pl\udce4n.json"):  # the other is Latin-1's, as of an old disk
        plan_for(profile_path, tmp_path / name)
        words = ["compare", tmp_path / name, "--profile", profile_path]
        command = [sys.executable, "-m", "envpipe_megatron.cli", *words]
        ended = subprocess.run(command, capture_output=True, check=True, text=True)
        assert name.encode("ascii", "backslashreplace").decode() in ended.stdout


def test_a_plan_for_a_device_that_is_full(profile_path):
    words = ["plan", "--profile", profile_path, "--num-microbatches", 4, "--blocking-power", 80]
    assert "/dev/full: No space left on device" in run_badly(*words, "--output", "/dev/full")


@pytest.mark.usefixtures("profile_path")
def test_a_working_folder_that_is_gone_is_named(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    words = ["plan", "--profile", "../profile.csv", "--num-microbatches", 4]
    assert "the working folder: No such file or directory" in run_badly(*words)
