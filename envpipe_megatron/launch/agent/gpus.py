"""Bills the GPUs of a node, for its agent: a ledger for each, drivers asked in threads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from envpipe_megatron.gpu.base import GpuAddress
from envpipe_megatron.gpu.devices import open_reader
from envpipe_megatron.launch.agent.ledger import GpuLedger, NodeLog
from envpipe_megatron.runtime.energy.meter import CounterAt

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: How often to look for GPUs without windows.
_TICK_S = 10.0
#: For a reading of a counter, which back ends give up after three seconds.
READ_S = 5.0


class NodeGpus:
    """The ledgers of all GPUs that ranks of this node have used, which write to its log.

    What is asynchronous runs on the agent's event loop.
    """

    def __init__(self, log: NodeLog) -> None:
        self.log = log
        self._ledgers: dict[str, GpuLedger] = {}
        #: Whose counter a thread waits for: a driver may hang.
        self._reading: set[GpuLedger] = set()
        self._opening: dict[str, asyncio.Lock] = {}
        #: Why the log took no line; None since the last that it took.
        self._failure: str | None = None

    def ledgers(self) -> list[GpuLedger]:
        """Return the ledgers of all GPUs so far; any thread may ask."""
        return list(self._ledgers.values())

    async def welcome(self, hello: Mapping[str, Any]) -> GpuLedger:
        """Return the ledger of a rank's GPU, opened now if it is new; GpuError if it cannot be."""
        labels = {k: v for k, v in hello.items() if k not in ("op", "backend")}
        uid = str(hello["gpu_uid"])
        async with self._opening.setdefault(uid, asyncio.Lock()):  # ranks may share a GPU
            if uid not in self._ledgers:
                address = GpuAddress(str(hello["backend"]), uid)
                self._ledgers[uid] = await _in_thread(
                    lambda: GpuLedger(open_reader(address), labels, self.log.append)
                )
        self._ledgers[uid].know(labels)
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
            reading = await asyncio.wait_for(_in_thread(read), READ_S)
        self.write(ledger.bill_up_to, reading)

    def write(self, action: Callable[..., None], *arguments: Any, **named: Any) -> None:
        """Do what writes to the log, and log a failure once while it lasts.

        The next line that can be written has the energy.
        """
        try:
            action(*arguments, **named)
        except Exception as error:
            if repr(error) != self._failure:
                logger.exception("The node's energy log cannot take a line")
            self._failure = repr(error)

    def written(self) -> None:
        """Note that the log has taken a line."""
        self._failure = None


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
