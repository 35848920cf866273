"""`envpipe launch` up to what it starts."""

import json
import os
import shlex
import socket
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from launch_helpers import LONG_S, run, run_badly, run_well
from torch.distributed.run import get_args_parser

import envpipe_megatron.launch.node as node
from envpipe_megatron.cli.jobs.launch import launch
from envpipe_megatron.launch.hosts import CARRIED_NAMES, CARRIED_PREFIXES
from envpipe_megatron.launch.node import NodeSettings
from envpipe_megatron.launch.torchrun import TORCHRUN

# `envpipe_megatron.cli` has the command under the name of its module.
launch_module = sys.modules["envpipe_megatron.cli.jobs.launch"]
OWN = [name for option in launch.params for name in option.opts]


@pytest.fixture(autouse=True)
def started(monkeypatch, tmp_path):
    """What would have been run, in a folder with a script train.py; nothing is."""
    calls = []
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)

    def run_node(arguments, settings):
        calls.append((list(arguments), settings))
        return 0

    def run_nodes(nodes, stop_grace_s):
        calls.append([list(nodes), stop_grace_s])
        return 0

    monkeypatch.setattr(node, "run_node", run_node)
    monkeypatch.setattr(launch_module, "run_nodes", run_nodes)
    return calls


@pytest.fixture
def hosts(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("one slots=2\nme@two slots=3\n")
    return path


def test_a_node_gets_its_settings_and_torchrun_its_arguments(started):
    run_well(
        "--nnodes", 1, "--output", "out", "--nproc-per-node=2", "--node-name", "a",
        "--bill-interval=0", "--price", "0.25", "--grid-intensity", 400,
        "--prometheus-port", 9000, "--prometheus-address", "0.0.0.0", "--until-stdin-ends",
        "--job-name", "llama",
        "-m", "train", "--output", "mine", "--price", "high", "--dry-run", "--help",
    )  # fmt: skip
    settings = NodeSettings(Path("out"), "a", 0, 0.25, 400.0, 9000, "0.0.0.0", True, "llama")
    script = ["--", "train", "--output", "mine", "--price", "high", "--dry-run", "--help"]
    assert started == [(["--nnodes", "1", "--nproc-per-node=2", "-m", *script], settings)]


def test_settings_by_default(started, monkeypatch):
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    run_well("train.py")
    settings = NodeSettings(Path("runs/launch"), socket.gethostname(), job_name="launch")
    assert started == [(["--nproc-per-node=2", "--", "train.py"], settings)]


def test_a_job_under_slurm_is_named_by_its_number(started, monkeypatch):
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    run_well("train.py")
    assert started[0][1].job_name == "4711"


def test_the_exit_status_is_the_nodes(monkeypatch):
    monkeypatch.setattr(node, "run_node", lambda arguments, settings: 17)
    assert run("train.py").exit_code == 17


def test_torchruns_empty_variables_do_not_reach_it(monkeypatch):
    # Kubeflow's operator sets PET_STANDALONE so, and torchrun alone would not start.
    for name, value in {"STANDALONE": "", "NNODES": "", "MAX_RESTARTS": "3"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    reached = []

    def run_node(arguments, settings):
        reached.extend(name for name in os.environ if name.startswith("PET_"))
        return 0

    monkeypatch.setattr(node, "run_node", run_node)
    run_well("train.py")
    assert reached == ["PET_MAX_RESTARTS"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no SCRIPT"),
        (["--nnodes", "2", "--output", "out"], "no SCRIPT"),
        (["--nnodes", "2", "--"], "no SCRIPT"),
        (["--price", "-1", "train.py"], "--price"),
        (["--price", "nan", "train.py"], "--price"),
        (["--bill-interval", "-1", "train.py"], "--bill-interval"),
        (["--prometheus-port", "0", "train.py"], "--prometheus-port"),
        (["--node-name", "a/b", "train.py"], "--node-name"),
        (["--node-name=", "train.py"], "--node-name"),
        (["--hostfile", "missing", "train.py"], "--hostfile"),
        (["--dry-run=yes", "train.py"], "--dry-run"),
        (["--nodes", "2", "train.py"], "'--nodes'"),
    ],
)
def test_bad_options_start_nothing(started, words, message):
    assert message in run_badly(*words)
    assert started == []


def test_help_needs_no_torch():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from envpipe_megatron.cli.jobs.launch import launch\n"
        "launch(['--help'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG_S, check=True
    )
    for name in [*OWN, "--nnodes", "--rdzv-backend", "NPROC_PER_NODE", "SLURM", "Example"]:
        assert (name in done.stdout) == (name != "--until-stdin-ends"), name
    # What nodes get of the environment is told, because it can be read by others.
    for prefix in (*CARRIED_PREFIXES, *CARRIED_NAMES):
        assert prefix in done.stdout


def test_no_option_is_one_of_torchruns_or_an_abbreviation_of_one():
    torchruns = [name for action in get_args_parser()._actions for name in action.option_strings]
    torchruns.remove("--help")
    assert len(torchruns) > 40
    for own in OWN:
        assert not [name for name in torchruns if name.startswith(own) or own.startswith(name)]


# --dry-run


def test_a_dry_run_tells_the_command_and_where_values_come_from(started, monkeypatch):
    for name, value in {"NNODES": "2", "NODE_RANK": "1", "PET_MASTER_ADDR": "first"}.items():
        monkeypatch.setenv(name, value)
    told = run_well("--dry-run", "--nproc-per-node", 4, "train.py", "--name", "it's a b").stdout
    assert started == []
    where, command, *settings = told.splitlines()
    assert where == "this node:"
    assert shlex.split(command) == [
        sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", "4",
        "--nnodes=2", "--node-rank=1", "--", "train.py", "--name", "it's a b",
    ]  # fmt: skip
    assert [line.strip() for line in settings] == [
        "--nnodes 2: NNODES",
        "--nproc-per-node 4: command line",
        "--node-rank 1: NODE_RANK",
        "--master-addr first: PET_MASTER_ADDR",
        "script train.py: is there",
        "rendezvous: first, port 29500, where the node of rank 0 listens",
    ]


# What is looked for before anything is started


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no.py", "--arg"], "no such script to run (got 'no.py')"),
        (["-m", "no_such.train"], "no such module to run (got 'no_such.train')"),
        (["-m", ".train"], "no such module to run (got '.train')"),
        (["-m", "train.py"], None),  # Python looks for train alone first
        (["-m", "json.tool"], None),
        (["--no-python", "no-such-program"], "no such program to run (got 'no-such-program')"),
        (["--no-python", "sh"], None),
        (["--no-python", "./train.py"], "no such program"),  # may not be executed
        (["--run-path", "no.py"], "no such script"),
        (["--run-path", "--no-python", "train.py"], None),  # which counts for more
        (["--run-path", "-m", "json.tool"], "no such script"),
        (["-"], None),  # of standard input
        (["."], None),  # a folder may have a __main__.py
    ],
)
def test_what_is_run_is_there(started, words, message):
    if message is None:
        run_well(*words)
        assert "is there" in run_well("--dry-run", *words).stdout
        assert len(started) == 1
        return
    assert message in run_badly(*words)
    dry = run("--dry-run", *words)
    assert (dry.exit_code, message in " ".join(dry.stderr.split())) == (1, True)
    assert "this node:" in dry.stdout
    assert started == []


def test_a_module_may_be_found_by_a_hook(monkeypatch):
    """As those of packages that are installed to be edited."""

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return ModuleSpec(name, None) if name == "edited" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    told = run_well("--dry-run", "-m", "edited.train").stdout
    assert "module edited.train: is there" in told


def test_another_python_may_have_other_modules(monkeypatch):
    monkeypatch.setenv("PYTHON_EXEC", "/opt/python")
    assert "not looked for" in run_well("--dry-run", "-m", "no_such.train").stdout


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["--master-port={port}"], None),
        (["--nnodes=2", "--node-rank=0", "--master-addr=else", "--master-port={port}"], None),
        (["--nnodes=2", "--node-rank=0", "--rdzv-endpoint=else:{port}"], None),
        (
            ["--nnodes=2", "--node-rank=1", "--master-addr=first", "--master-port={port}"],
            "first, port {port}, where the node of rank 0 listens",
        ),
        (
            ["--nnodes=2", "--node-rank=1", "--rdzv-endpoint=first:{port}"],
            "first, port {port}, where the node of rank 0 listens",
        ),
        # It is joined.
        (
            ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:{port}"],
            "c10d at localhost:{port}",
        ),
        (["--rdzv-backend=c10d", "--nnodes=2"], "c10d at its default"),
        (["--standalone", "--master-port={port}"], "torchrun takes a free port of this node"),
        (["--nnodes=1:1"], "torchrun takes a free port of this node"),
        ([], "torchrun takes a free port of this node"),
    ],
)
def test_the_node_of_rank_0_needs_its_port(started, words, where):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = [word.format(port=port) for word in words]
        if where is None:
            assert f"listens at the port of the rendezvous (got {port})" in run_badly(
                *words, "train.py"
            )
            assert started == []
        else:
            run_well(*words, "train.py")
    run_well(*words, "train.py")
    told = run_well("--dry-run", *words, "train.py").stdout
    free = "port {port} of this node is free"
    assert told.splitlines()[-1] == f"  rendezvous: {(where or free).format(port=port)}"


def test_a_port_may_be_taken_again_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as other:
            server.accept()[0].close()  # first, so that the kernel keeps this end for a while
            assert other.recv(1) == b""
    run_well(f"--master-port={port}", "train.py")


def test_a_port_that_cannot_be_looked_at_is_left_to_torchrun(monkeypatch):
    def refuse(self, address):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    run_well("--master-port=80", "train.py")


def test_ports_are_torchruns_own(monkeypatch):
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "first")
    assert "has no port (got 'first')" in run_badly("train.py")
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "first:70000")
    assert "has no port" in run_badly("train.py")
    monkeypatch.setenv("PET_RDZV_BACKEND", "c10d")
    assert "c10d at first:70000" in run_well("--dry-run", "train.py").stdout


# --hostfile


def test_hosts_are_started_with_the_same_options(started, monkeypatch, tmp_path, hosts):
    monkeypatch.chdir(tmp_path)
    run_well(
        "--hostfile", hosts, "--output", "out", "--shutdown-timeout", 50, "--ssh", "ssh -p 22",
        "--python", "py", "--price", 2, "--master-port", 7, "train.py", "--output", "a b",
    )  # fmt: skip
    ((nodes, stop_grace_s),) = started
    assert stop_grace_s == 90 + 2 * 50
    assert [node.host for node in nodes] == ["one", "two"]
    for rank, (node_process, target) in enumerate(zip(nodes, ["one", "me@two"], strict=True)):
        *ssh, given_target, there = node_process.command
        assert ssh[:3] == ["ssh", "-p", "22"]
        assert "BatchMode=yes" in ssh
        assert given_target == target
        cd, folder, then, *rest = shlex.split(there)
        assert (cd, folder, then) == ("cd", str(tmp_path), "&&")
        words = rest[rest.index("py") :]
        assert words == [
            "py", "-m", "envpipe_megatron.cli", "launch", "--until-stdin-ends",
            f"--node-name={node_process.host}", "--output=out", "--price=2",
            "--shutdown-timeout", "50", "--master-port", "7", "--nnodes=2",
            f"--nproc-per-node={rank + 2}", f"--node-rank={rank}", "--master-addr=one",
            "--", "train.py", "--output", "a b",
        ]  # fmt: skip


def test_a_node_understands_what_it_is_started_with(started, monkeypatch, hosts):
    run_well("--hostfile", hosts, "--bill-interval", 7, "--", "train.py", "--max", 3)
    ((nodes, _),) = started
    words = shlex.split(nodes[1].command[-1])
    started.clear()
    run_well(*words[words.index("launch") + 1 :])
    ((arguments, settings),) = started
    assert settings == NodeSettings(
        Path("runs/launch"), "two", 7, until_stdin_ends=True, job_name="launch"
    )
    assert arguments[-4:] == ["--", "train.py", "--max", "3"]
    assert "--node-rank=1" in arguments


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--node-name", "a"], "--node-name names one node"),
        (["--node-rank", "0"], "--node-rank does not go with --hostfile"),
        (["--nnodes", "3"], "--nnodes is 3, and the hostfile names 2 hosts"),
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
        node,
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
