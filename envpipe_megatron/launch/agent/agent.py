"""Runs the node's agent, which bills every GPU that the job's ranks on this node use.

It lives in the process that runs torchrun, on a thread with its own event loop. Ranks meter their
GPUs and send their windows (`runtime.energy.agent_link`); it bills what lies between them too,
writes the node's energy log and sends it to the job's collector, which is the agent of rank 0. It
opens GPUs for reading only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, TypeVar

from envpipe_megatron.formats.energy import JOB
from envpipe_megatron.gpu.guard.messages import GuardError, peer_uid_and_pid, receive, send
from envpipe_megatron.launch.agent.collector import Collector, Uplink
from envpipe_megatron.launch.agent.gpus import READ_S, NodeGpus
from envpipe_megatron.launch.agent.ledger import GpuLedger, NodeLog
from envpipe_megatron.launch.bill.bill import Bill

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: How often to show the bill so far.
_SHOW_S = 1.0
_ACCEPT_AGAIN_S = 0.2
_BACKLOG = 256
#: How often to check what the end waits for, and for how long at least: messages on this node
#: arrive in that time.
_LOOK_S, _LEAST_WAIT_S = 0.01, 0.5


class NodeAgent:
    """Bills this node from when it is made to `finish`.

    Args:
        output_dir: where the node's energy log goes.
        node: this node's name.
        socket_path: where ranks find the agent, in a folder of this user's own.
        show: called with the job's bill each second, on the agent of rank 0.

    Raises EnvPipeError if another agent writes this node's log, OSError if log or socket fail.
    """

    def __init__(
        self,
        output_dir: Path,
        node: str,
        socket_path: Path,
        show: Callable[[Bill], None] = lambda bill: None,
    ) -> None:
        self.socket_path = socket_path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as half_made:
            half_made.callback(self._listener.close)
            self._listener.bind(str(socket_path))
            half_made.callback(socket_path.unlink)
            self._listener.listen(_BACKLOG)
            self._listener.setblocking(False)
            self._gpus = NodeGpus(NodeLog(output_dir, node))
            half_made.pop_all()
        self._uplink = Uplink(self.log)
        self.log.grown = self._log_has_grown
        #: The job's control `file` and what is `asked` without it, where rank 0 is or was.
        self.control: dict[str, Any] | None = None
        self._show = show
        self._collector = Collector()
        #: The name of each connected rank.
        self._ranks: dict[socket.socket, str] = {}
        #: Until when this may wait at the end, by the monotonic clock.
        self._patient_until_s = math.inf
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="envpipe-agent", daemon=True)
        self._thread.start()

    @property
    def log(self) -> NodeLog:
        """Return the node's energy log."""
        return self._gpus.log

    @property
    def bill(self) -> Bill | None:
        """Return the job's bill, on the agent of rank 0 only. It grows until `finish`."""
        return self._collector.bill if self._collector.is_the_jobs else None

    @property
    def why_incomplete(self) -> str:
        """Return why the job's bill lacks lines that this node has written; empty if it has all."""
        return self._uplink.why_unknown()

    def ledgers(self) -> list[GpuLedger]:
        """Return the ledgers of all GPUs that ranks have used so far."""
        return self._gpus.ledgers()

    def snapshot(self) -> Bill | None:
        """Return the job's bill as it is now, on the agent of rank 0 only; None at its end."""
        if not self._collector.is_the_jobs or not self._thread.is_alive():
            return None

        async def taken() -> Bill:
            return self._collector.bill.snapshot()

        taking = asyncio.run_coroutine_threadsafe(taken(), self._loop)
        try:
            return taking.result(READ_S)
        except (TimeoutError, CancelledError):
            return None

    def connected(self) -> list[str]:
        """Return the names of the ranks that have not ended yet."""
        return list(self._ranks.values())

    def shorten_waits(self, to_s: float = 0.0) -> None:
        """Wait no longer than this from now on; may be called from a signal handler."""
        until_s = time.monotonic() + max(to_s, _LEAST_WAIT_S)
        self._patient_until_s = min(self._patient_until_s, until_s)

    def wait_until_none_is_connected(self, timeout_s: float) -> bool:
        """Wait until all ranks of this node have ended; False after a time."""
        return self._call(self._holds(lambda: not self._ranks, timeout_s))

    def finish(self, exit_code: int, wait_s: float) -> list[str]:
        """End the bill of this node, and on the agent of rank 0 that of the job.

        Hangs up on ranks that are still connected. Waits up to `wait_s` for the collector to know
        all, and again for other nodes to end; returns those late, on the agent of rank 0.
        """
        return self._call(self._finish(exit_code, wait_s))

    def close(self) -> None:
        """Stop; safe to call twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._listener.close()
        self.socket_path.unlink(missing_ok=True)
        self.log.close()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _run(self) -> None:
        self._start(self._accept())
        self._start(self._gpus.bill_long_gaps())
        self._start(self._show_bill())
        self._loop.run_forever()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    # --- on the loop ----------------------------------------------------------------------------

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self) -> None:
        await self._uplink.close()
        await self._collector.close()
        await self._hang_up()

    async def _hang_up(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in self._ranks:  # of tasks that had not begun: they do not end, either
            connection.close()
        self._ranks.clear()

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:  # too many open files, say
                logger.error("A rank cannot be billed by its node's agent yet: %s", error)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            uid, pid = peer_uid_and_pid(connection)
            if uid not in (os.geteuid(), 0):
                logger.warning("refused uid %d, pid %d", uid, pid)
                connection.close()
                continue
            connection.setblocking(False)
            self._ranks[connection] = f"process {pid}"
            self._start(self._serve(connection))

    async def _show_bill(self) -> None:
        """Show the bill now and then: in a large job a thousand lines come a second."""
        while True:
            await asyncio.sleep(_SHOW_S)
            if self._collector.is_the_jobs:
                self._show_now()

    def _show_now(self) -> None:
        try:
            self._show(self._collector.bill)
        except Exception:  # no thread can be started, say
            logger.exception("The bill is added up, but no longer shown while it grows")
            self._show = lambda bill: None

    async def _serve(self, connection: socket.socket) -> None:
        """Answer a rank's messages, until it ends."""
        ledger: GpuLedger | None = None
        try:
            while (message := await self._received(connection)) is not None:
                await asyncio.sleep(0)  # a rank that talks without end holds up no other
                match message.get("op"):
                    case "hello":
                        ledger = await self._gpus.welcome(message)
                        self._ranks[connection] = f"rank {message.get('rank')}"
                        send(connection, {"event": "welcome", "node": self.log.node})
                    case "collect":
                        self._collector.is_the_jobs, self.control = True, message.get("control")
                        endpoint = await self._collector.start(str(message["host"]))
                        send(connection, {"event": "collecting", "endpoint": endpoint})
                    case "send_to":
                        endpoint = message["endpoint"]
                        # Another agent collects if torchrun goes on with another rank 0.
                        self._collector.is_the_jobs = endpoint["token"] == self._collector.token
                        self._uplink.send_to(endpoint)
                    case "window" if ledger is not None:
                        self._gpus.write(ledger.take, message["line"])
                    case "clock" if ledger is not None:
                        del message["op"]
                        ledger.look(message)
                    case "job":
                        self._gpus.write(self.log.note, JOB, facts=message["facts"])
                    case "bye":
                        break
                    case other:
                        raise GuardError("Unknown message from a rank", value=other)
        except Exception as error:  # a rank's bad message ends its own connection only
            logger.error("%s: %r", self._ranks[connection], error)
        finally:
            connection.close()
            try:
                if ledger is not None:
                    await self._gpus.bill_up_to_now(ledger)
            finally:  # also if the agent ends just now
                del self._ranks[connection]

    async def _received(self, connection: socket.socket) -> dict[str, Any] | None:
        while True:
            with contextlib.suppress(BlockingIOError):
                return receive(connection)
            readable = asyncio.Event()
            self._loop.add_reader(connection, readable.set)
            try:
                await readable.wait()
            finally:
                self._loop.remove_reader(connection)

    def _log_has_grown(self) -> None:
        self._gpus.written()
        self._uplink.grown()

    async def _holds(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a condition, for a time that may be shortened; return whether it holds."""
        give_up_s = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < min(give_up_s, self._patient_until_s):
            await asyncio.sleep(_LOOK_S)
        return condition()

    async def _finish(self, exit_code: int, wait_s: float) -> list[str]:
        await self._hang_up()  # on ranks that no signal could end: nothing follows the last note
        await asyncio.gather(*map(self._gpus.bill_up_to_now, self.ledgers()))
        self._gpus.write(self.log.end, exit_code)
        if self._uplink.sends:
            await self._holds(self._uplink.knows_all, wait_s)
        if not self._collector.is_the_jobs:
            return []
        await self._holds(lambda: not self._collector.bill.running(), wait_s)
        await self._collector.close()  # the bill that is shown now stays as it is
        self._show_now()
        return self._collector.bill.running()
