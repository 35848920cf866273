"""`envpipe launch` up to what it starts."""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launch_helpers import needs_shutdown_timeout, run, run_badly, run_well

from envpipe_megatron.cli.jobs.launch import launch
from envpipe_megatron.launch.node import TORCHRUN, NodeSettings

# `envpipe_megatron.cli` has the command under the name of its module.
launch_module = sys.modules["envpipe_megatron.cli.jobs.launch"]
OWN = [name for option in launch.params for name in option.opts]


@pytest.fixture(autouse=True)
def started(monkeypatch, tmp_path):
    """Return what would have been run, in a folder with a script train.py; nothing is."""
    calls = []
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)

    def run_node(arguments, settings):
        calls.append((list(arguments), settings))
        return 0

    def run_nodes(nodes, stop_grace_s):
        calls.append([nodes, stop_grace_s])
        return 0

    monkeypatch.setattr(launch_module, "run_node", run_node)
    monkeypatch.setattr(launch_module, "run_nodes", run_nodes)
    return calls


@pytest.fixture
def hosts(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("one slots=2\nme@two slots=3\n")
    return path


def test_a_node_gets_its_settings_and_torchrun_its_arguments(started):
    run_well(
        "--nnodes", 1, "--output", "out", "--node-name", "a",
        "--bill-interval=0", "--price", "0.25", "--grid-intensity", 400,
        "--prometheus-port", 9000, "--prometheus-address", "0.0.0.0", "--until-stdin-ends",
        "--job-name", "llama",
        "-m", "train", "--output", "mine", "--price", "high", "--dry-run", "--help",
    )  # fmt: skip
    settings = NodeSettings(Path("out"), "a", 0, 0.25, 400.0, 9000, "0.0.0.0", True, "llama")
    script = ["--", "train", "--output", "mine", "--price", "high", "--dry-run", "--help"]
    filled = ["--nproc-per-node=1"]
    options = ["--nnodes", "1", "-m"]
    assert started == [([*filled, *options, *script], settings)]


def test_settings_by_default(started, monkeypatch):
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    run_well("--node-name=", "train.py")  # as of a shell's variable that is not set
    settings = NodeSettings(Path("runs/launch"), socket.gethostname(), job_name="launch")
    assert started == [(["--nproc-per-node=2", "--", "train.py"], settings)]
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    run_well("train.py")
    assert started[1][1].job_name == "4711"


def test_the_exit_status_is_the_nodes(monkeypatch):
    monkeypatch.setattr(launch_module, "run_node", lambda arguments, settings: 17)
    assert run("train.py").exit_code == 17


def test_torchruns_empty_variables_do_not_reach_it(monkeypatch):
    # Kubeflow's operator sets PET_STANDALONE so, and torchrun alone would not start.
    for name, value in {"STANDALONE": "", "NNODES": "", "MAX_RESTARTS": "3"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    reached = []

    def run_node(arguments, settings):
        reached.extend(name for name in os.environ if name.startswith("PET_"))
        return 0

    monkeypatch.setattr(launch_module, "run_node", run_node)
    run_well("train.py")
    assert reached == ["PET_MAX_RESTARTS"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "training_script"),
        (["--nnodes", "2", "--"], "training_script"),
        (["--price", "nan", "train.py"], "--price"),
        (["--bill-interval", "-1", "train.py"], "--bill-interval"),
        (["--prometheus-port", "0", "train.py"], "--prometheus-port"),
        (["--hostfile", "missing", "train.py"], "--hostfile"),
        (["--dry-run=yes", "train.py"], "--dry-run"),
        # Ours are not abbreviated.
        (["--out", "x", "train.py"], "--out"),
        (["no.py", "--arg"], "no such script to run (got 'no.py')"),
        (["--run-path", "-m", "no.py"], "no such script"),
    ],
)
def test_bad_options_start_nothing(started, words, message):
    assert message in run_badly(*words)
    assert started == []


# --dry-run


def test_a_dry_run_tells_the_command_and_where_values_come_from(started, monkeypatch):
    for name, value in {"NNODES": "2", "NODE_RANK": "1", "PET_MASTER_ADDR": "first"}.items():
        monkeypatch.setenv(name, value)
    told = run_well("--dry-run", "--nproc-per-node", 4, "train.py", "--name", "it's a b").stdout
    assert started == []
    where, command, *settings = told.splitlines()
    assert where == "this node:"
    assert shlex.split(command) == [
        sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes=2", "--node-rank=1",
        "--master-addr=first", "--nproc-per-node", "4", "--", "train.py", "--name", "it's a b",
    ]  # fmt: skip
    assert [line.strip() for line in settings] == [
        "--nnodes 2: NNODES",
        "--node-rank 1: NODE_RANK",
        "--master-addr first: PET_MASTER_ADDR",
    ]


def test_a_dry_run_tells_that_there_is_no_script(started):
    dry = run("--dry-run", "no.py")
    assert (dry.exit_code, "no such script" in dry.stderr) == (1, True)
    assert "this node:" in dry.stdout


@pytest.mark.parametrize(
    "words", [["-m", "json.tool"], ["--no-python", "sh"], ["--run-path", "train.py"], ["-"], ["."]]
)
def test_what_is_no_file_of_a_script_is_left_to_python(started, words):
    run_well(*words)
    assert len(started) == 1


# --hostfile


@needs_shutdown_timeout
def test_hosts_are_started_with_the_same_options(started, monkeypatch, tmp_path, hosts):
    monkeypatch.chdir(tmp_path)
    run_well(
        "--hostfile", hosts, "--output", "out", "--shutdown-timeout", 50, "--ssh", "ssh -p 22",
        "--python", "py", "--price", 2, "--master-port", 7, "train.py", "--output", "a b",
    )  # fmt: skip
    ((nodes, stop_grace_s),) = started
    assert stop_grace_s == 90 + 2 * 50
    assert list(nodes) == ["one", "two"]
    targets = ["one", "me@two"]
    for rank, ((host, command), target) in enumerate(zip(nodes.items(), targets, strict=True)):
        *ssh, given_target, there = command
        assert ssh[:3] == ["ssh", "-p", "22"]
        assert "BatchMode=yes" in ssh
        assert given_target == target
        cd, folder, then, *rest = shlex.split(there)
        assert (cd, folder, then) == ("cd", str(tmp_path), "&&")
        words = rest[rest.index("py") :]
        assert words == [
            "py", "-m", "envpipe_megatron.cli", "launch", "--until-stdin-ends",
            f"--node-name={host}", "--output=out", "--bill-interval=100",
            "--price=2.0", "--prometheus-address=127.0.0.1", "--job-name=out",
            f"--nproc-per-node={rank + 2}", "--nnodes=2", f"--node-rank={rank}",
            "--master-addr=one",
            "--shutdown-timeout", "50", "--master-port", "7", "--", "train.py", "--output", "a b",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--node-name", "a"], "--node-name names one node"),
        (["--node-rank", "0"], "--node-rank does not go with this --hostfile"),
        (["--nnodes", "3"], "--nnodes does not go with this --hostfile: the nodes are its 2 hosts"),
        (["--ssh", ""], "--ssh is empty"),
        (["--ssh", "ssh 'a"], "--ssh is not a command"),
        (["--export", "NOT_SET_ANYWHERE"], "'NOT_SET_ANYWHERE'"),
    ],
)
def test_what_does_not_go_with_a_hostfile(started, hosts, words, message):
    assert message in run_badly("--hostfile", hosts, *words, "train.py")
    assert started == []


# One real torchrun


def test_torchrun_gets_the_scripts_arguments_untouched(monkeypatch, tmp_path):
    """And no modules from this folder, where the script finds its own before all others."""
    (tmp_path / "torch.py").write_text("NAME = 'not torch'")
    script = tmp_path / "train.py"
    script.write_text(
        "import json, os, sys, torch\n"
        "from pathlib import Path\n"
        "names = ('RANK', 'WORLD_SIZE', 'GROUP_RANK')\n"
        "facts = [sys.argv[1:], [os.environ[name] for name in names], torch.NAME]\n"
        "Path(__file__).with_name(os.environ['RANK']).write_text(json.dumps(facts))\n"
    )
    monkeypatch.setattr(
        launch_module,
        "run_node",
        lambda arguments, settings: (
            subprocess.run([*TORCHRUN, *arguments], timeout=120, check=False).returncode
        ),
    )
    arguments = ["--output", "mine", "--max", "3", "--", "--nnodes", "it's"]
    run_well("--standalone", "--output", "out", "--nproc_per_node", 2, script, *arguments)
    for rank in ("0", "1"):
        facts = json.loads((tmp_path / rank).read_text())
        assert facts == [arguments, [rank, "2", "0"], "not torch"]
