"""Runs torchrun on one node, also with an agent that bills its GPUs.

What ends the one ends the other: a signal to this process ends torchrun, which ends its ranks;
its death does the same; and ranks that outlive a torchrun that was killed are ended here. Guards,
which ranks start, outlive them and bring the clocks back. They are waited for: where this is the
first process of a container, or of a batch system's step, its end kills all that is left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

from envpipe_megatron import child
from envpipe_megatron.child import LOOK_S, TORCHRUN_MARK, Signals
from envpipe_megatron.console import say_as_launcher
from envpipe_megatron.formats.account import Tariff
from envpipe_megatron.gpu.base import GpuError
from envpipe_megatron.gpu.guard.lease import list_leases
from envpipe_megatron.gpu.guard.lease_file import JOB_NAME_VARIABLE, LeaseRecord
from envpipe_megatron.gpu.guard.messages import AGENT_VARIABLE, wait_readable
from envpipe_megatron.launch.agent.agent import NodeAgent
from envpipe_megatron.launch.bill import BillReport
from envpipe_megatron.launch.options import handled_signals, read, shutdown_s

logger = logging.getLogger(__name__)

#: Starts torchrun. Without -P, Python would look for its modules in this folder first.
TORCHRUN = (sys.executable, "-P", "-m", "torch.distributed.run")
#: How much longer torchrun has to end than its ranks have. While it waits for nodes that were
#: lost, it handles no signal for minutes.
_PATIENCE_S = 10.0
#: Until processes are looked for again: those that were found may have started others.
_LOOK_AGAIN_S = 0.1
#: How often to look whether the bill has grown.
_BILL_LOOK_S = 1.0
#: How long the bill waits for other nodes, which may hang in collectives until these time out.
_OTHERS_END_S = 30.0
#: How long to wait for ranks and files beyond that.
_DISK_S = 30.0
#: How long the bill still waits after a signal; a second one ends the wait.
_HURRIED_S = 5.0
#: How long to wait for guards of ranks that have ended. A reset takes milliseconds, by a command
#: or without persistence mode seconds.
_GUARDS_S = 30.0


@dataclass(frozen=True)
class NodeSettings:
    """Settings of a node.

    Args:
        output_dir: folder for the node's energy log and, on the node of rank 0, the job's bill.
        bill_interval: iterations between live lines of the bill; 0 for none.
        grid_g_per_kwh: g of CO2.
        job_name: label of Prometheus' metrics, the same on all nodes.
        until_stdin_ends: end the job when standard input ends, as for a node started over ssh.
    """

    output_dir: Path
    node_name: str
    bill_interval: int = 100
    price_per_kwh: float | None = None
    grid_g_per_kwh: float | None = None
    prometheus_port: int | None = None
    prometheus_address: str = "127.0.0.1"
    until_stdin_ends: bool = False
    job_name: str = ""


def run_node(torchrun_arguments: Sequence[str], settings: NodeSettings) -> int:
    """Run torchrun to its end, and bill it; return its exit status, 128 and the signal if killed.

    Raises OSError if the output folder cannot be written.
    """
    tariff = Tariff(settings.price_per_kwh, settings.grid_g_per_kwh)
    with contextlib.ExitStack() as last:
        last.callback(_wait_for_guards)
        agent = NodeAgent(settings.output_dir, settings.node_name)
        last.callback(agent.close)
        folder, node = settings.output_dir, agent.log.node
        report = BillReport(folder, tariff, settings.bill_interval, node)
        if agent.log.earlier_bytes:
            say_as_launcher(f"{agent.log.path} is continued; a new job needs another --output")
        also = handled_signals(read(torchrun_arguments))
        signals = last.enter_context(Signals(also, until_stdin_ends=settings.until_stdin_ends))
        codes: SimpleQueue[int] = SimpleQueue()
        billing = threading.Thread(target=_bill, args=(agent, report, codes), daemon=True)
        try:
            billing.start()
        except RuntimeError as error:  # no more threads: training does not need this one
            logger.error("The bill is shown at the end only: %s", error)
        code = 1
        try:
            if settings.prometheus_port is not None:
                from envpipe_megatron.launch.agent.prometheus import serve_metrics

                where = settings.prometheus_address, settings.prometheus_port
                last.callback(serve_metrics(agent, *where, settings.job_name, tariff))
            named = {AGENT_VARIABLE: agent.address, JOB_NAME_VARIABLE: settings.job_name}
            code = run_torchrun(torchrun_arguments, {**os.environ, **named}, signals)
        finally:
            signals.call(lambda: agent.shorten_waits(_HURRIED_S), agent.shorten_waits)
            codes.put(code)
            if billing.ident is None:
                _bill(agent, report, codes)
            else:
                until_s = time.monotonic() + 2 * _OTHERS_END_S + _DISK_S
                while billing.is_alive() and time.monotonic() < until_s:
                    billing.join(LOOK_S)  # a signal that came just before one is heard after it
        if billing.is_alive():
            why = "There is no bill: the disk of %s, or who reads what is printed, does not answer"
            logger.error(why, folder)
        else:
            report.show()
    return code


def _wait_for_guards() -> None:
    """Wait until this user's ranks that have ended have their clocks back."""
    until_s = time.monotonic() + _GUARDS_S
    leases: list[LeaseRecord] = []
    with contextlib.suppress(GpuError, OSError):
        leases = list_leases()
    for lease in leases:
        # Of one that cannot be seen from here, as another container's, the guard cannot be either.
        if lease.rank is None or lease.rank.is_alive() is not False or not lease.live:
            continue
        # A guard that has just ended has no descriptor; nor has any before Linux 5.3.
        with contextlib.suppress(OSError, AttributeError):
            if lease.uid == os.geteuid() and not _ends(lease.guard.pid, until_s):
                logger.warning("%s is not reset yet by its guard", lease.address.uid)


def _ends(pid: int, until_s: float) -> bool:
    process = os.pidfd_open(pid)
    try:
        return wait_readable([process], until_s - time.monotonic())
    finally:
        os.close(process)


def _bill(agent: NodeAgent, report: BillReport, codes: SimpleQueue[int]) -> None:
    """Show and write the bill as it grows, and end it when torchrun has ended with a code.

    A stopped terminal or a disk that hangs delays only this; lines are left out meanwhile.
    """
    code, look_s = None, _BILL_LOOK_S
    while code is None:
        try:
            if agent.bill is not None:
                report.look(agent.bill)
        except Exception:
            logger.exception("The bill is shown at the end only")
            look_s = threading.TIMEOUT_MAX
        with contextlib.suppress(Empty):
            code = codes.get(timeout=look_s)
    try:
        late = agent.finish(code, _OTHERS_END_S)
        if agent.bill is not None:
            for name in late:
                why = "%s did not end in time; `envpipe energy sum` adds its log up later"
                logger.warning(why, name)
            report.end(agent.bill)
        elif ledgers := agent.gpus.ledgers():
            own_j = sum(ledger.energy_j for ledger in ledgers)
            say_as_launcher(f"{own_j:.1f} J on this node, in {agent.log.path}")
            if why := agent.uplink.why_unknown():
                say_as_launcher(f"the job's bill may lack them: {why}")
        elif not code:  # else what torchrun said matters
            say_as_launcher(
                "no rank of this node reported any training, so there is no bill: is EnvPipe on?"
            )
    except Exception:  # training has its own exit status
        logger.exception("There is no bill")


def run_torchrun(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    signals: Signals,
    *,
    take: Callable[[str], object] | None = None,
    log: IO[str] | None = None,
) -> int:
    """Run torchrun to its end; return its exit status, 128 plus the signal if it was killed.

    The first signal is passed on and ends it with its ranks; a second one, or 10 s more than its
    `--shutdown-timeout`, kills it. On Linux the death of this process ends it, too. Ranks that
    outlive a torchrun that was signalled or killed are ended here, and have as long: one that is
    interrupted while it starts them leaves them behind.

    Args:
        arguments: torchrun's options, the script and its arguments.
        environment: torchrun's and the ranks'.
        signals: to this process.
        take: gets each line of the ranks' standard output, in a thread; what it raises ends them,
            and is raised here.
        log: of their standard error, else this process's.
    """
    mark = uuid.uuid4().hex
    ranks_s = shutdown_s(read(arguments))
    process = subprocess.Popen(
        [sys.executable, "-P", child.__file__, str(os.getpid()), *TORCHRUN, *arguments],
        env={**environment, TORCHRUN_MARK: mark},
        stdin=subprocess.DEVNULL if signals.until_stdin_ends else None,
        stdout=subprocess.PIPE if take else None,
        stderr=log,
        text=True,
        start_new_session=True,  # a terminal's Ctrl-C comes here only, and is passed on once
    )
    patience = threading.Timer(ranks_s + _PATIENCE_S, process.kill)
    asked = False
    raised: list[BaseException] = []

    def end() -> None:
        nonlocal asked
        if asked:
            return
        asked = True
        process.send_signal(signals.to_pass_on)
        patience.start()
        say_as_launcher("ending the ranks (once more: kill them)")

    def read_lines(take: Callable[[str], object]) -> None:
        try:
            for line in process.stdout or ():
                take(line)
        except BaseException as error:  # raised again where others can handle it
            raised.append(error)
            end()

    signals.call(end, process.kill)
    reader = threading.Thread(target=read_lines, args=(take,), daemon=True)
    if take:
        reader.start()
    code = None
    while code is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(LOOK_S)
    patience.cancel()
    if asked or code < 0:
        _end_marked(mark, ranks_s)
    if take:
        reader.join(_PATIENCE_S)  # what outlives the ranks may keep the pipe open
    if raised:
        raise raised[0]
    return code if code >= 0 else 128 - code


def _end_marked(mark: str, grace_s: float) -> None:
    """End what a killed torchrun has started, by SIGTERM and then, after the grace, by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        end_s = time.monotonic() + grace_s
        signalled: set[int] = set()
        while left := _marked(mark):
            for pid in left:
                if pid not in signalled:
                    signalled.add(pid)
                    logger.warning("Process %d has outlived torchrun: %s", pid, number.name)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            if time.monotonic() >= end_s:
                break
            time.sleep(_LOOK_AGAIN_S)


def _marked(mark: str) -> list[int]:
    """Return processes of this machine that inherited the mark; none without /proc."""
    entry = f"{TORCHRUN_MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
