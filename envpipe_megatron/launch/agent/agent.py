"""Runs the node's agent, which bills every GPU that the job's ranks on this node use.

It lives in the process that runs torchrun, on a thread with its own event loop. Ranks meter their
GPUs and send their windows (`runtime.energy.agent_link`); it bills what lies between them too,
writes the node's energy log and sends it to the job's collector, which is the agent of rank 0. It
only reads GPUs, and asks drivers in threads, since one may hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from envpipe_megatron.formats.bill import Bill, NodeBill
from envpipe_megatron.formats.energy import ENDED, JOB
from envpipe_megatron.gpu.base import GpuAddress
from envpipe_megatron.gpu.guard.messages import GuardError, peer_uid_and_pid, receive, send
from envpipe_megatron.gpu.registry import READ_ONLY, open_gpu
from envpipe_megatron.launch.agent.collector import Collector, Uplink
from envpipe_megatron.launch.agent.ledger import GpuLedger, NodeLog
from envpipe_megatron.runtime.energy.meter import CounterAt

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ACCEPT_AGAIN_S = 0.2
_BACKLOG = 256
#: How often to check what the end waits for, and for how long at least: messages on this node
#: arrive in that time.
_LOOK_S, _LEAST_WAIT_S = 0.01, 0.5
#: How long to wait for the last messages of ranks that have ended.
_LAST_WORDS_S = 5.0
#: How often to look for GPUs without windows.
_TICK_S = 10.0
#: How long to wait for a reading of a counter, which back ends give up after three seconds.
_READ_S = 5.0


class NodeAgent:
    """Bills this node from when it is made to `finish`.

    Args:
        output_dir: where the node's energy log goes.
        node: this node's name.

    Attributes:
        address: where ranks find the agent, among this machine's abstract Unix sockets.
        log: the node's energy log.
        gpus: their ledgers; any thread may ask for these.
        uplink: sends the log to the job's bill.
        control: the job's control `file` and what is `asked` without it, where rank 0 is or was.

    Raises OSError if log or socket fail.
    """

    def __init__(self, output_dir: Path, node: str) -> None:
        self.log = NodeLog(output_dir, node)
        self.address = f"envpipe-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self.gpus = NodeGpus(self.log)
        self.uplink = Uplink(self.log)
        self.control: dict[str, Any] | None = None
        self._collector = Collector()
        #: The task that serves each connected rank, named as it; and those that serve them all.
        self._ranks: set[asyncio.Task[None]] = set()
        self._lasting: list[asyncio.Task[None]] = []
        #: Until when this may wait at the end, by the monotonic clock.
        self._patient_until_s = math.inf
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="envpipe-agent", daemon=True)
        self._thread.start()

    @property
    def bill(self) -> Bill | None:
        """Return the job's bill, on the agent of rank 0 only; until `finish`, take snapshots."""
        return self._collector.bill if self._collector.is_the_jobs else None

    def connected(self) -> list[str]:
        """Return the names of the ranks that have not ended yet."""
        return [task.get_name() for task in list(self._ranks)]

    def shorten_waits(self, to_s: float = 0.0) -> None:
        """Wait no longer than this from now on; may be called from a signal handler."""
        until_s = time.monotonic() + max(to_s, _LEAST_WAIT_S)
        self._patient_until_s = min(self._patient_until_s, until_s)

    def finish(self, exit_code: int, wait_s: float) -> list[str]:
        """End the bill of this node, and on the agent of rank 0 that of the job.

        Waits for the last messages of ranks, up to `wait_s` for the collector to know all, and
        again for other nodes to end; returns those late, on the agent of rank 0.
        """
        coroutine = self._finish(exit_code, wait_s)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """Stop; safe to call twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_READ_S)  # the log's disk may hang
        self._listener.close()
        self.log.close()

    def _run(self) -> None:
        lasting = self._accept(), self.gpus.bill_long_gaps()
        self._lasting = [self._loop.create_task(each) for each in lasting]
        self._loop.run_forever()
        self._loop.run_until_complete(self._collector.close())
        self._loop.run_until_complete(_cancel(*asyncio.all_tasks(self._loop)))
        self._loop.close()

    # --- on the loop ----------------------------------------------------------------------------

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
            self._start(connection, f"process {pid}")

    def _start(self, connection: socket.socket, name: str) -> None:
        task = self._loop.create_task(self._serve(connection), name=name)
        self._ranks.add(task)
        task.add_done_callback(self._ranks.discard)
        task.add_done_callback(lambda _: connection.close())  # also if cancelled before it begins

    async def _serve(self, connection: socket.socket) -> None:
        """Answer a rank's messages, until it ends."""
        ledger: GpuLedger | None = None
        task = asyncio.current_task()
        assert task is not None
        try:
            while (message := await self._received(connection)) is not None:
                await asyncio.sleep(0)  # a rank that talks without end holds up no other
                match message.get("op"):
                    case "hello":
                        ledger = await self.gpus.welcome(message)
                        task.set_name(f"rank {message.get('rank')}")
                        endpoint = None
                        if asked := message.get("collect"):
                            self._collector.is_the_jobs, self.control = True, asked["control"]
                            endpoint = await self._collector.start(str(asked["host"]))
                        welcome = {"event": "welcome", "node": self.log.node, "endpoint": endpoint}
                        send(connection, welcome)
                    case "send_to":
                        endpoint = message["endpoint"]
                        # Another agent collects if torchrun goes on with another rank 0.
                        self._collector.is_the_jobs = endpoint["token"] == self._collector.token
                        self.uplink.send_to(endpoint)
                    case "window" if ledger is not None:
                        self.log.attempt(ledger.take, message["line"])
                    case "clock" if ledger is not None:
                        del message["op"]
                        ledger.look(message)
                    case "job":
                        self.log.attempt(self.log.note, JOB, facts=message["facts"])
                    case "bye":
                        break
                    case other:
                        raise GuardError("Unknown message from a rank", value=other)
        except Exception as error:  # a rank's bad message ends its own connection only
            logger.error("%s: %r", task.get_name(), error)
        finally:
            connection.close()  # at once, though reading the counter takes long
            if ledger is not None:
                await self.gpus.bill_up_to_now(ledger)

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

    async def _holds(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a condition, for a time that may be shortened; return whether it holds."""
        give_up_s = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < min(give_up_s, self._patient_until_s):
            await asyncio.sleep(_LOOK_S)
        return condition()

    async def _finish(self, exit_code: int, wait_s: float) -> list[str]:
        await self._holds(lambda: not self._ranks, min(wait_s, _LAST_WORDS_S))
        # Ranks that no signal could end are hung up on: nothing follows the last note.
        await _cancel(*self._lasting, *self._ranks)
        await asyncio.gather(*map(self.gpus.bill_up_to_now, self.gpus.ledgers()))
        self.log.attempt(self.log.note, ENDED, exit_code=exit_code)
        if self.uplink.endpoint is not None:
            await self._holds(self.uplink.knows_all, wait_s)
        if not self._collector.is_the_jobs:
            return []
        await self._holds(lambda: not self._collector.bill.running(), wait_s)
        await self._collector.close()  # the bill stays as it is now
        if not self.uplink.knows_all():  # nor has the bill this node's end, or all of its lines
            self._collector.bill.nodes.setdefault(self.log.node, NodeBill()).running = True
        return self._collector.bill.running()


class NodeGpus:
    """The ledgers of all GPUs that ranks of this node have used, which write to its log."""

    def __init__(self, log: NodeLog) -> None:
        self._log = log
        self._ledgers: dict[str, GpuLedger] = {}
        #: Whose counter a thread waits for: a driver may hang.
        self._reading: set[GpuLedger] = set()
        self._opening: dict[str, asyncio.Lock] = {}

    def ledgers(self) -> list[GpuLedger]:
        """Return the ledgers of all GPUs so far."""
        return list(self._ledgers.values())

    async def welcome(self, hello: Mapping[str, Any]) -> GpuLedger:
        """Return the ledger of a rank's GPU, opened now if it is new; GpuError if it cannot be."""
        uid = str(hello["gpu_uid"])
        async with self._opening.setdefault(uid, asyncio.Lock()):  # ranks may share a GPU
            if uid not in self._ledgers:
                self._ledgers[uid] = await _in_thread(
                    lambda: GpuLedger(open_gpu(GpuAddress(READ_ONLY, uid)), hello, self._log.append)
                )
        self._ledgers[uid].know(hello)
        return self._ledgers[uid]

    async def bill_long_gaps(self) -> None:
        """Bill GPUs without windows, now and then, for ever."""
        while True:
            await asyncio.sleep(_TICK_S)
            for ledger in self.ledgers():
                if ledger.is_behind() and ledger not in self._reading:
                    await self.bill_up_to_now(ledger)

    async def bill_up_to_now(self, ledger: GpuLedger) -> None:
        """Bill up to a reading, unless the driver hangs: that thread is left behind."""

        def read() -> CounterAt | None:
            self._reading.add(ledger)
            reading = ledger.read()
            self._reading.discard(ledger)
            return reading

        reading = None
        with contextlib.suppress(TimeoutError, RuntimeError):  # no thread can be started
            reading = await asyncio.wait_for(_in_thread(read), _READ_S)
        self._log.attempt(ledger.bill_up_to, reading)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _in_thread(call: Callable[[], T]) -> T:
    """Ask a driver in a thread that the end of this process does not wait for."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def ask() -> None:
        try:
            said = partial(answer.set_result, call())
        except Exception as error:
            said = partial(answer.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: answer.done() or said())

    threading.Thread(target=ask, name="envpipe-reading", daemon=True).start()
    return await answer
