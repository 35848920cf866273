"""From a rank to its node's agent, which bills the GPU.

The agent listens at the abstract Unix socket that ENVPIPE_AGENT_SOCKET names, which is no file that
could be cleaned up. Messages are JSON objects, as to a guard:

    rank  -> agent   {"op": "hello", "gpu_uid": ..., "gpu": ..., "rank": ..., ...,
                      "collect": {"host": ..., "control": ...}}  or null, but of rank 0
    agent -> rank    {"event": "welcome", "node": ...,    the GPU is metered from here on
                      "endpoint": {"host": ..., "port": ..., "token": ...}}  or null
    rank  -> agent   {"op": "send_to", "endpoint": ...}   where the job's energy is added up
    rank  -> agent   {"op": "window", "line": ...}        a line of the energy log, and the counter
    rank  -> agent   {"op": "clock", "requested_mhz": ...} the clock was looked at, `ClockState`
    rank  -> agent   {"op": "job", "facts": ...}          what the job says of itself
    rank  -> agent   {"op": "bye"}                        training is over on this GPU

No rank ever waits for its agent once training has begun: what does not fit into the socket's buffer
is dropped with a message, and the agent bills that time all the same, though not as training.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Any

from envpipe_megatron.gpu.base import ClockState, Gpu
from envpipe_megatron.gpu.guard.messages import (
    AGENT_VARIABLE,
    GuardError,
    peer_uid_and_pid,
    receive,
    send,
)

if TYPE_CHECKING:  # agents import this module, and do without torch
    from envpipe_megatron.runtime.channel.collectives import Collectives

logger = logging.getLogger(__name__)

#: Begins the name of a rank's own log where an agent goes on billing its GPU, which it does not
#: reach: `energy*.jsonl` are summed.
_UNBILLED = "unbilled-energy"

#: How long to wait for an answer, before training.
_ANSWER_S = 30.0


def own_log_name() -> str:
    """Return the first part of the name of the energy log that a rank writes itself."""
    return _UNBILLED if os.environ.get(AGENT_VARIABLE) else "energy"


class AgentLink:
    """A connection to the node's agent. Made by `connect_to_agent`.

    `node` is this node's name, as the agent says it.
    """

    def __init__(self, connection: socket.socket, node: str) -> None:
        self.node = node
        self._connection = connection
        self._failing = False

    def clock(self, state: ClockState) -> None:
        """Send what a look at the clock has seen; another thread than training's may call it.

        A look that is lost, or comes when training is over, is nobody's loss.
        """
        with contextlib.suppress(OSError, ValueError):
            self._connection.setblocking(False)
            send(self._connection, {"op": "clock", **asdict(state)})

    def close(self) -> None:
        """Say that training is over on this GPU; safe to call twice."""
        if self._connection.fileno() >= 0:
            self.post("bye")
            self._connection.close()

    def post(self, op: str, **said: object) -> None:
        """Send a message, or drop it if the agent is slow or gone; never waits."""
        try:
            self._connection.setblocking(False)
            send(self._connection, {"op": op, **said})
            self._failing = False
        except (OSError, TypeError, ValueError) as error:  # facts may be none of JSON's
            if not self._failing:  # logged once while it lasts
                logger.error("The node's agent does not take %s: %s", op, error)
            self._failing = True


def connect_to_agent(
    gpu: Gpu,
    labels: Mapping[str, object],
    collectives: Collectives,
    control: Mapping[str, object] | None = None,
) -> AgentLink | None:
    """Have this rank's GPU billed by its node's agent; every rank of the job calls it.

    `labels` are what lines of the energy log say of the GPU, and `control` is of the planning rank:
    `ControlFile.about`. None on a node without an agent, or with one that does not answer, which is
    logged.
    """
    link, endpoint = None, None
    if address := os.environ.get(AGENT_VARIABLE):
        asked = {"host": os.environ.get("MASTER_ADDR", ""), "control": control}
        collect = asked if collectives.is_planner else None
        hello = {**labels, "op": "hello", "gpu_uid": gpu.address.uid, "collect": collect}
        link, endpoint = _connected(address, hello)
    billed = None if link is None else (link.node, gpu.address.uid)
    endpoint = collectives.from_planner(endpoint)
    gpus = list(chain.from_iterable(collectives.all_to_planner(billed)))
    if link is not None and endpoint is not None:
        link.post("send_to", endpoint=endpoint)
    if link is not None and collectives.is_planner:
        # Ranks may share a GPU. What no agent bills is missing from the job's bill.
        link.post("job", facts={"num_gpus": len(set(gpus) - {None}) + gpus.count(None)})
    return link


def _connected(address: str, hello: Mapping[str, object]) -> tuple[AgentLink | None, Any]:
    """Return a link to the agent, None if it does not answer, and where it adds up the job's."""
    try:
        with contextlib.ExitStack() as failing:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            failing.enter_context(connection)
            connection.settimeout(_ANSWER_S)
            connection.connect(f"\0{address}")
            if peer_uid_and_pid(connection)[0] not in (os.geteuid(), 0):
                raise GuardError("Another user listens there", value=address)
            send(connection, hello)
            if (answer := receive(connection)) is None:
                raise ConnectionError("it hung up")
            failing.pop_all()
    except Exception as error:  # of any kind: other ranks wait
        why = "The node's agent does not answer, so this rank writes its own log, %s*.jsonl: %s"
        logger.error(why, _UNBILLED, error)
        return None, None
    return AgentLink(connection, str(answer.get("node"))), answer.get("endpoint")
