"""Nodes that are started over ssh: what they get, how they end, and that they end together."""

import json
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sshd
from launch_helpers import LONG_S, Launcher, run_well

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.launch.hosts import (
    Host,
    carried_environment,
    run_nodes,
    ssh_command,
)

#: A node as the launcher knows it: it ends, with a last word, when its standard input does.
WAITS = "echo ready; cat; echo bye"
AWKWARD = ["a b", "it's", '"', "$HOME `id` \\", "two\nlines", "", "*", "é", "--max", ";reboot"]


def sh(script):
    return ["sh", "-c", script]


class Witness:
    """A pipe with a name that nodes keep open; it ends when the last of their processes has."""

    def __init__(self, folder):
        self.path = folder / "witness"
        os.mkfifo(self.path)
        self._pipe = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    def holding(self, script):
        """A script whose processes all hold it; none can be missed once the node said `ready`."""
        return sh(f"exec 9>{shlex.quote(str(self.path))}; {script}")

    def wait_until_none_is_left(self):
        ready, _, _ = select.select([self._pipe], [], [], LONG_S)
        assert ready, "a process is left"
        assert os.read(self._pipe, 1) == b""
        os.close(self._pipe)


@pytest.fixture
def witness(tmp_path):
    made = Witness(tmp_path)
    yield made
    made.wait_until_none_is_left()


class Go:
    """Something that nodes wait for."""

    def __init__(self, folder):
        self._path = folder / "go"
        os.mkfifo(self._path)
        self.waits = f"read go < {shlex.quote(str(self._path))}"

    def now(self):
        self._path.write_text("go\n")


@pytest.fixture
def go(tmp_path):
    return Go(tmp_path)


# Output


def test_lines_are_marked_with_their_host(capfdbinary):
    nodes = {"one": sh(r"printf 'a\n\nno text: \377\nlast'"), "two": sh("echo b; echo c >&2")}
    assert run_nodes(nodes) == 0
    out, err = capfdbinary.readouterr()
    assert sorted(out.splitlines(keepends=True)) == sorted(
        [b"[one] a\n", b"[one] \n", b"[one] no text: \xff\n", b"[one] last\n", b"[two] b\n"]
    )
    assert err == b"[two] c\n"


def test_a_progress_bar_is_printed_as_it_moves(capfdbinary):
    """It ends no line before all is over: weeks of it were kept in memory, and nothing was seen."""
    assert run_nodes({"one": sh(r"printf '\r1 %%\r2 %%\r\nend'")}) == 0
    assert capfdbinary.readouterr().out == b"[one] \r[one] 1 %\r[one] 2 %\r\n[one] end\n"


def test_lines_of_nodes_do_not_mix(capfdbinary):
    # Each line comes in pieces, the longer ones in more than one read.
    program = (
        "import sys\n"
        "for size in [10, 100_000] * 20:\n"
        "    for piece in (sys.argv[1] * size, sys.argv[1] * size, '\\n'):\n"
        "        sys.stdout.write(piece)\n"
        "        sys.stdout.flush()\n"
    )
    command = (sys.executable, "-c", program)
    assert run_nodes({host: (*command, host) for host in "abc"}) == 0
    lines = capfdbinary.readouterr().out.splitlines()
    for host in (b"a", b"b", b"c"):
        own = [line for line in lines if line.startswith(b"[%s] " % host)]
        assert own == [b"[%s] " % host + 2 * size * host for size in [10, 100_000] * 20]
    assert len(lines) == 3 * 40


# The end


def test_the_first_failure_stops_the_others_and_is_the_exit_status(witness, go):
    nodes = {
        "one": witness.holding(WAITS),
        "two": sh(f"{go.waits}; exit 3"),
        "three": witness.holding(f"{WAITS}; exit 4"),
    }
    with Launcher(nodes) as launcher:
        launcher.wait_for("[one] ready", "[three] ready")
        go.now()
        assert launcher.end() == 3
        assert "two failed, exit status 3. Stopping one, three.\n" in launcher.messages
        # They ended in order, and the later status changes nothing.
        assert launcher.output.count("bye") == 2
        assert "three failed" not in launcher.messages


def test_a_failure_while_others_are_started_stops_them(witness):
    nodes = {"one": sh("exit 3")} | {f"n{i}": witness.holding(WAITS) for i in range(5)}
    with Launcher(nodes) as launcher:
        assert launcher.end() == 3
        assert launcher.output.count("ready") == launcher.output.count("bye") == 5


@pytest.mark.parametrize(
    ("script", "status", "message"),
    [
        ("echo no route >&2; exit 255", 255, "one failed, exit status 255, which is ssh's own"),
        ("kill -9 $$", 128 + signal.SIGKILL, "its client was ended by SIGKILL"),
    ],
)
def test_why_a_client_failed_is_told(script, status, message):
    with Launcher({"one": sh(script)}) as launcher:
        assert launcher.end() == status
        assert message in launcher.messages


def test_nodes_that_end_well_do_not_stop_others(go):
    with Launcher({"one": sh("echo done"), "two": sh(f"{go.waits}; echo went")}) as launcher:
        launcher.wait_for("[one] done")
        go.now()
        assert launcher.end() == 0
        assert "[two] went\n" in launcher.output


@pytest.mark.usefixtures("signals_at_default")
@pytest.mark.parametrize(
    ("signum", "to_all"),
    [
        (signal.SIGINT, False),
        (signal.SIGTERM, False),
        (signal.SIGHUP, False),
        # Ctrl-C goes to the whole group of processes; a client that died of it would lose its node.
        (signal.SIGINT, True),
    ],
)
def test_a_signal_stops_all_nodes_in_order(signum, to_all, witness):
    nodes = {host: witness.holding(WAITS) for host in ("one", "two")}
    with Launcher(nodes, before_exec=os.setsid) as launcher:
        launcher.wait_for("[one] ready", "[two] ready")
        (os.killpg if to_all else os.kill)(launcher.process.pid, signum)
        assert launcher.end() == 128 + signum
        assert f"{signum.name} arrived" in launcher.messages
        assert "[one] bye\n" in launcher.output
        assert "[two] bye\n" in launcher.output


def test_what_is_ignored_stays_ignored():
    def ignore():  # as nohup does
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with Launcher({"one": sh(WAITS)}, before_exec=ignore) as launcher:
        launcher.wait_for("[one] ready")
        launcher.process.send_signal(signal.SIGHUP)
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.end() == 128 + signal.SIGTERM


#: Goes on when its standard input ends, in a process that another has started.
DEAF = "trap '' TERM; echo ready; cat; echo stays; tail -f /dev/null; true"


@pytest.mark.usefixtures("signals_at_default")
def test_a_second_interrupt_kills_at_once(witness):
    with Launcher({host: witness.holding(DEAF) for host in ("one", "two")}) as launcher:
        launcher.wait_for("[one] ready", "[two] ready")
        launcher.process.send_signal(signal.SIGINT)
        launcher.wait_for("[one] stays", "[two] stays")
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.end() == 128 + signal.SIGINT
        assert "Killing the connections to one, two." in launcher.messages


def test_a_node_that_does_not_end_is_killed_after_the_grace(witness):
    nodes = {"good": witness.holding(WAITS), "stays": witness.holding(DEAF)}
    with Launcher(nodes, grace_s=5) as launcher:  # a good one's end may take seconds under load
        launcher.wait_for("[good] ready", "[stays] ready")
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.end() == 128 + signal.SIGTERM
        assert "stays did not end within 5 s" in launcher.messages
        assert "good did not" not in launcher.messages
        assert "[good] bye\n" in launcher.output


def test_a_node_is_over_although_something_it_left_keeps_its_pipes(go):
    script = f"({go.waits}) </dev/null & echo end; cat"
    with Launcher({"one": sh(script)}, last_grace_s=0.05) as launcher:
        launcher.wait_for("[one] end\n")
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.end() == 128 + signal.SIGTERM
        go.now()


@pytest.mark.usefixtures("signals_at_default")
def test_nodes_end_when_nobody_reads_their_output(witness):
    # One never looks at its standard input, and has to be killed.
    talks = witness.holding("while echo more; do sleep 0.1; done")
    with Launcher({"one": talks, "two": witness.holding(WAITS)}) as launcher:
        launcher.wait_for("[one] more", "[two] ready")
        launcher.close_output()
        launcher.wait_for("The output cannot be written: Broken pipe. Stopping one, two.")
        launcher.process.send_signal(signal.SIGINT)
        launcher.wait_for("another one kills")
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.end() == 1


def test_a_client_that_cannot_be_started_stops_the_others(tmp_path, witness):
    missing = str(tmp_path / "no-such-ssh")
    with Launcher({"one": witness.holding(WAITS), "two": [missing]}) as launcher:
        assert launcher.end() == 1
        assert "two could not be started: " in launcher.messages
        assert missing in launcher.messages


@pytest.mark.parametrize("started", range(4))
def test_threads_that_cannot_be_started(monkeypatch, capfd, witness, started):
    """The job waited forever for a node of which nobody heard."""
    start, left = threading.Thread.start, iter(range(started))

    def limited(thread):
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    nodes = {"one": witness.holding(WAITS), "two": witness.holding(WAITS)}
    assert run_nodes(nodes) == 1
    assert (
        f"{'two' if started == 3 else 'one'} could not be started: can't" in capfd.readouterr().err
    )


# The command


def test_what_is_carried_of_the_environment():
    carried = {
        "ENVPIPE_TYPE": "a", "NCCL_DEBUG": "b", "GLOO_X": "c", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCH_LOGS": "d", "OMP_NUM_THREADS": "2", "MKL_X": "e", "PET_MAX_RESTARTS": "3",
        "PYTHONPATH": "f", "LD_LIBRARY_PATH": "g",
    }  # fmt: skip
    of_this_machine = {
        "ENVPIPE_AGENT_SOCKET": "x", "CUDA_VISIBLE_DEVICES": "0",
        "PATH": "x", "HOME": "x", "WANDB_API_KEY": "x", "MY_NCCL_X": "x", "PYTHONPATHS": "x",
    }  # fmt: skip
    environ = carried | of_this_machine
    assert carried_environment(environ, []) == carried
    for name in of_this_machine:
        assert carried_environment(environ, [name]) == carried | {name: of_this_machine[name]}
    with pytest.raises(EnvPipeError, match="'WANDB'"):
        carried_environment(environ, ["WANDB"])


# A real ssh server


@pytest.fixture(scope="module")
def ssh(tmp_path_factory):
    return sshd.ssh_command(tmp_path_factory.mktemp("sshd"))


#: Stands for the Python of a node, and says what it got.
STUB = """#!{python}
import json, os, sys
facts = [sys.argv[1:], os.getcwd(), {{n: os.environ.get(n) for n in ("NCCL_X", "OWN", "NOT")}}]
print(json.dumps(facts), flush=True)
"""


def program(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_two_hosts_from_the_command_line_to_the_end(ssh, tmp_path, monkeypatch):
    stub = program(tmp_path / "it's a stub", STUB.format(python=sys.executable))
    folder = tmp_path / "a folder's name"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name, value in {"NCCL_X": "a 'b'\n$c", "OWN": "exported", "NOT": "carried"}.items():
        monkeypatch.setenv(name, value)
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 slots=2\nlocalhost slots=2\n")
    words = ["--hostfile", hosts, "--ssh", ssh, "--python", stub, "--export", "OWN"]
    lines = run_well(*words, "train.py", *AWKWARD).stdout.splitlines()
    for rank, host in enumerate(("127.0.0.1", "localhost")):
        mark = f"[{host}] "
        (told,) = (line.removeprefix(mark) for line in lines if line.startswith(f"{mark}["))
        arguments, cwd, variables = json.loads(told)
        assert arguments[:5] == [
            "-m", "envpipe_megatron.cli", "launch", "--until-stdin-ends", f"--node-name={host}",
        ]  # fmt: skip
        assert f"--node-rank={rank}" in arguments
        assert arguments[arguments.index("--") :] == ["--", "train.py", *AWKWARD]
        assert cwd == str(folder)
        assert variables == {"NCCL_X": "a 'b'\n$c", "OWN": "exported", "NOT": None}


def over_ssh(ssh, host, python):
    where = Host(host, 1, "hosts:1")
    return list(ssh_command(ssh, where, [], python=python, folder=Path("/"), environ={}))


def test_a_launcher_without_an_output(tmp_path):
    """As by `>&-`: no node was heard of again."""
    hosts, ssh = tmp_path / "hosts", program(tmp_path / "ssh", "#!/bin/sh\necho said; exit 3\n")
    hosts.write_text("one slots=1\n")
    words = [
        sys.executable,
        "-m",
        "envpipe_megatron.cli",
        "launch",
        "--hostfile",
        hosts,
        "--ssh",
        ssh,
    ]
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *words, "train.py"]
    ended = subprocess.run(closed, stderr=subprocess.PIPE, text=True, timeout=LONG_S, check=False)
    assert ended.returncode == 3
    assert "one failed, exit status 3" in ended.stderr


@pytest.fixture
def held_stub(tmp_path, witness):
    """The stub, with its processes held by the witness."""
    return str(program(tmp_path / "held", f"#!/bin/sh\nexec 9>{witness.path}\n{WAITS}\n"))


def test_a_killed_launcher_leaves_nothing_over_ssh(ssh, witness, held_stub):
    with Launcher({"localhost": over_ssh(ssh, "localhost", held_stub)}) as launcher:
        launcher.wait_for("[localhost] ready")
        launcher.process.kill()


def test_a_host_that_is_not_reached(ssh, witness, held_stub):
    # Nobody listens at that port.
    refused = ssh.replace(" -F none", " -F none -o ProxyCommand=none -p 1")
    nodes = {
        "localhost": over_ssh(ssh, "localhost", held_stub),
        "127.0.0.1": over_ssh(refused, "127.0.0.1", held_stub),
    }
    with Launcher(nodes) as launcher:
        assert launcher.end() == 255
        assert "Connection refused" in launcher.messages
        assert "127.0.0.1 failed, exit status 255, which is ssh's own" in launcher.messages


def test_nobody_is_asked_for_a_password(ssh):
    unknown = ssh.replace("user_key", "no_key")
    with Launcher({"localhost": over_ssh(unknown, "localhost", "python3")}) as launcher:
        assert launcher.end() == 255
        assert "Permission denied" in launcher.messages
