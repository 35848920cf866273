"""Starts proofs on the fake NVML library, without a wait for imports: forks from what has them.

The test starts this file once. It asks for a command by its socket, and the command's ranks are
forked here too: what stands for torchrun is a small program (`LAUNCHER`) that asks for them, passes
signals on, and ends as they do.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

#: Stands for torchrun. Arguments: this file's socket, torchrun's, the settings.
LAUNCHER = """
import json, os, signal, socket, sys
pids, told = [], []
def stop(*_):
    told.append(True)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
signal.signal(signal.SIGTERM, stop)  # before there are ranks, as torchrun does
server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
request = {"what": "ranks", "settings": sys.argv[-1], "environment": dict(os.environ)}
socket.send_fds(server, [json.dumps(request).encode()], [1, 2])
pids += json.loads(server.recv(1 << 16))
if told:
    stop()
os.close(1)
sys.exit(int(server.recv(100) or 1))
"""
NUM_RANKS = 2
#: torchrun's own is 30 s: a rank that waits inside torch for another hears no SIGTERM.
GRACE_S = 10.0


def run_command(path: Path) -> None:
    """As `envpipe prove` on GPUs of the fake library, of which there are two."""
    from rich.console import Console

    from envpipe_megatron.launch import torchrun
    from envpipe_megatron.trials.machine import Machine
    from envpipe_megatron.trials.proof import Proof
    from envpipe_megatron.trials.run import run_trial
    from envpipe_megatron.trials.settings import Settings

    server = os.environ["PROVE_SOCKET"]
    torchrun.TORCHRUN = (sys.executable, "-S", "-c", LAUNCHER, server)
    settings = Settings.read(path)
    missing = "" if settings.changes_clocks else "the right of a test"
    machine = Machine(False, ("fake",) * NUM_RANKS, (), missing, {})
    run_trial(Proof(settings, machine, []), Console(file=io.StringIO()))


def run_rank(path: Path) -> None:
    """A rank, with the host's time in place of CUDA's, and short measurements."""
    from functools import partial

    import torch
    from host_executor import HostExecutor, HostKernelTimer

    from envpipe_megatron.gpu.backends import nvml
    from envpipe_megatron.gpu.devices import list_gpus
    from envpipe_megatron.integrations.device import Device, use_cpu
    from envpipe_megatron.runtime.clocks import latency
    from envpipe_megatron.runtime.clocks.rank_clock import open_rank_gpu
    from envpipe_megatron.runtime.job.options import JobOptions
    from envpipe_megatron.trials import worker
    from envpipe_megatron.tuning import shortest

    def open_device(collectives, num_stages, wanted, preset, *, require):
        uid = list_gpus()[collectives.stage].uid
        gpu, chosen = open_rank_gpu(uid, collectives, wanted, require=require)
        return Device(gpu, chosen, lambda settle: HostExecutor(), HostKernelTimer, {})

    def zeros(*args, device=None, make=torch.zeros, **options):
        return make(*args, device="cpu" if device == "cuda" else device, **options)

    use_cpu()
    # What megatron-core's own function needs besides.
    torch.zeros, torch.cuda.synchronize = zeros, lambda: None
    nvml.has_sys_admin = lambda: True
    nvml.in_user_namespace = lambda: False
    worker.open_device = open_device
    worker._LATENCY_REPEATS = 1
    shortest._WORTH = -9  # the best order is tried, however little it gains on this host
    latency.LONGEST_S = 0.05
    worker.JobOptions = partial(JobOptions, profile_steps=2, window_s=0.3)
    sys.argv = ["worker", str(path)]
    worker.main()


def main() -> None:
    """Serve until the test closes its end of the standard input."""
    import envpipe_megatron.trials.proof
    import envpipe_megatron.trials.worker  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers end unseen
    server = socket.socket(socket.AF_UNIX)
    server.bind(os.environ["PROVE_SOCKET"])
    server.listen()
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            server.close()
            _keep(connection)
        connection.close()


def _keep(connection: socket.socket) -> None:
    """Fork what is asked for, tell its processes, and how they end; ends this process."""
    content, fds, _, _ = socket.recv_fds(connection, 1 << 20, 2)
    request = json.loads(content)
    count = NUM_RANKS if request["what"] == "ranks" else 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(count):
        pids.append(os.fork())
        if pids[-1] == 0:
            connection.close()
            os.setsid()
            os.environ.update(
                request["environment"], RANK=str(rank), LOCAL_RANK=str(rank),
                WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            )  # fmt: skip
            _become(request, fds)
    for fd in fds:
        os.close(fd)  # or who reads there would wait for this process
    with Path(os.environ["PROVE_PIDS"]).open("a") as file:
        file.write(json.dumps({request["what"]: pids}) + "\n")
    connection.send(json.dumps(pids).encode())
    _await(connection, pids)
    os._exit(0)


def _become(request, fds) -> None:
    code = 1
    try:
        for number, fd in enumerate(fds):
            os.dup2(fd, number + 1)
        run = run_rank if request["what"] == "ranks" else run_command
        run(Path(request["settings"]))
        code = 0
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException as error:
        with contextlib.suppress(Exception):
            import traceback

            traceback.print_exception(error, file=sys.stderr)
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def _await(connection: socket.socket, pids: list[int]) -> None:
    """Reap all; while who asked lives, a failure of one ends the others, as torchrun ends them."""
    left, code, grace_over_s = set(pids), 0, None
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.01)
            if grace_over_s is not None and time.monotonic() > grace_over_s:
                _end(left, signal.SIGKILL)
            continue
        left.discard(pid)
        code = code or os.waitstatus_to_exitcode(status)
        if code and grace_over_s is None and not _is_closed(connection):
            _end(left, signal.SIGTERM)
            grace_over_s = time.monotonic() + GRACE_S
    with contextlib.suppress(OSError):
        connection.send(str(code).encode() if code >= 0 else b"1")


def _end(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


if __name__ == "__main__":
    main()
