"""Makes the channel of a rank: what carries its messages. Called by each integration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from envpipe_megatron.core.channel_model import hardware_capacity
from envpipe_megatron.core.kinds import WHOLE, Kind
from envpipe_megatron.errors import first_line
from envpipe_megatron.runtime.channel import cuda_device
from envpipe_megatron.runtime.channel.carrier import ChannelError, Peers, TransferCarrier
from envpipe_megatron.runtime.channel.collectives import Collectives, of_all_ranks
from envpipe_megatron.runtime.channel.flag_page import FlagPage, create_page_file
from envpipe_megatron.runtime.channel.p2p import Carrier, P2PChannel
from envpipe_megatron.runtime.channel.puts import MEMORY_SHARE, PutCarrier, PutSide

#: A transfer whose peer is not ready yet spins, and holds its SMs while units compute. Measured on
#: four H200s (benchmarks/gpu/schedules.py): with NCCL's own choice 1F1B took 1.15 of the time of
#: megatron-core's, with four CTAs 1.06, with two 1.02; EnvPipe's order 1.03, 1.00 and 1.00. Fewer
#: make each transfer slower, which 1F1B feels.
MAX_CTAS = 2

#: The first tag of these messages; hosts of a pipeline send others with lower ones.
_FIRST_TAG = 1000


def make_channel(
    pipeline_group: dist.ProcessGroup,
    collectives: Collectives,
    *,
    timeout: timedelta,
    num_chunks: int = 1,
    carrier: str = "auto",
    vary: bool = False,
) -> P2PChannel:
    """Make the channel of this rank over a pipeline's process group.

    Every rank of the job calls this at the same point of the program.

    Args:
        pipeline_group: the ranks of the pipeline, in order of their stages.
        collectives: of the same job.
        timeout: time after which a silent neighbour is an error.
        num_chunks: with more than one, the last stage and the first are neighbours too.
        carrier: one of `channel_model.CARRIERS`; gloo has its own.
        vary: whether messages may carry another shape each time.

    Raises:
        ChannelError: another backend than NCCL and gloo, or a host that waits for each transfer.
        CollectivesError: a rank is gone or silent.
    """
    backend = backend_of(pipeline_group)
    if backend not in ("gloo", "nccl"):
        raise ChannelError(
            "EnvPipe sends between stages over NCCL and gloo only",
            value=backend,
            remedy="Make the pipeline's process group with one of them.",
        )
    # gloo has no communicators to bring up. Nothing is measured from the last stage to the first.
    maker = _Maker(pipeline_group, collectives, timeout, num_chunks > 1 or backend == "gloo")
    if backend == "gloo":
        return maker.over(pipeline_group)
    if carrier == "auto":
        return maker.between_gpus("messages vary in shape" if vary else None)
    return maker.between_gpus(f"asked for: {carrier}")


def backend_of(group: dist.ProcessGroup) -> str:
    """Return the backend for this process's device, where a group has one for each kind."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return parts.get(device, dist.get_backend(group))


def timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """Return how long a rank may be silent in a group, or in the default one if that is longer.

    Groups of EnvPipe's that give up sooner would end a job that goes on without it. torch's own
    time-out where neither has one.
    """
    found = []
    for each, device in product((group, dist.group.WORLD), ("cpu", "cuda")):
        with suppress(AttributeError, RuntimeError):  # no backend for the device, or no options
            backend = each._get_backend(torch.device(device))  # type: ignore[union-attr]  # made
            found.append(getattr(backend, "wrapped_pg", backend).options._timeout)
    return max(found, default=default_pg_timeout)


class _Maker:
    """Boundary b lies between stage b and the next; its side 0 is stage b."""

    def __init__(
        self, group: dist.ProcessGroup, collectives: Collectives, timeout: timedelta, wraps: bool
    ) -> None:
        self._ranks = dist.get_process_group_ranks(group)
        self._stage = stage = collectives.stage
        self._collectives = collectives
        self._timeout = timeout
        self._boundaries = range(len(self._ranks) - (not wraps))
        before = (stage - 1) % len(self._ranks)
        #: Those of this stage, in an order in which all stages may meet their neighbours.
        self._own = sorted({before, stage} & set(self._boundaries)) if len(self._ranks) > 1 else []

    def over(self, group: dist.ProcessGroup) -> P2PChannel:
        """Have the pipeline's own group carry both kinds, by tags."""
        peers = [self._peers(boundary) for boundary in self._own]
        carriers: dict[Kind, Carrier] = {
            each.receives: TransferCarrier(
                each,
                (group, group),
                self._collectives.pipeline,
                timeout=self._timeout,
                ahead=True,
            )
            for each in peers
        }
        return P2PChannel(self._ranks, self._stage, carriers)

    def between_gpus(self, why: str | None) -> P2PChannel:
        """Use one-sided copies where both sides can, else NCCL; only that if there is a reason."""
        carriers: dict[Kind, Carrier] = {}
        side, obstacles = None, dict.fromkeys(self._boundaries, why or "")
        if why is None:
            side, obstacles = self._put_carriers(carriers)
        # Where all boundaries of the job are one-sided, no pipeline's orders need be lowered.
        all_put = self._collectives.on_all(not obstacles)
        capacity = None if all_put else hardware_capacity(os.environ)
        groups = []
        if not all_put:
            groups = self._transfers(carriers, obstacles, ahead=capacity is not None)
        if side is not None:
            side.watch()
        about = [
            f"NCCL between stages {b} and {self._after(b)}, whose waits slow the units "
            f"beside them ({reason})"
            for b, reason in sorted(obstacles.items())
        ]
        if len(obstacles) < len(self._boundaries):
            about.append("one-sided copies")
        return P2PChannel(
            self._ranks,
            self._stage,
            carriers,
            side=side,
            groups=groups,
            capacity=capacity,
            about="; ".join(about),
        )

    def _after(self, boundary: int) -> int:
        """Return a boundary's second stage."""
        return (boundary + 1) % len(self._ranks)

    def _peers(self, boundary: int) -> Peers:
        after = self._after(boundary)
        if self._stage == boundary:
            return Peers(self._stage, after, self._ranks[after], Kind.BACKWARD)
        return Peers(self._stage, boundary, self._ranks[boundary], Kind.FORWARD)

    def _put_carriers(self, carriers: dict[Kind, Carrier]) -> tuple[PutSide | None, dict[int, str]]:
        """Make those that both sides can have; for each other boundary, why it has none.

        All stages go through the same exchanges, so that both sides of a boundary decide alike.
        """
        memory = torch.cuda.mem_get_info()[1]
        own = cuda_device.obstacle(), memory, cuda_device.uuid()
        facts = self._collectives.in_pipeline(own)
        found = {b: facts[b][0] or facts[self._after(b)][0] for b in self._boundaries}
        obstacles = {b: why for b, why in found.items() if why}
        if len(obstacles) == len(self._boundaries):
            return None, obstacles
        budget = int(MEMORY_SHARE / 2 * min(fact[1] for fact in facts))
        side = PutSide(cuda_device.CudaDevice(self._exchange), self._timeout, budget)
        path = create_page_file()
        put: dict[int, PutCarrier] = {}
        try:
            paths = self._collectives.in_pipeline(path)

            def open_page(boundary: int) -> None:
                cuda_device.check_distance(own[2], facts[self._peers(boundary).neighbour][2])
                peers = self._peers(boundary)
                page = FlagPage(paths[boundary], int(self._stage != boundary), peers)
                put[boundary] = PutCarrier(page, side, boundary)

            for step in (open_page, lambda boundary: put[boundary].probe()):
                failed: dict[int, str] = {}
                for boundary in self._own:
                    if boundary not in obstacles:
                        try:
                            step(boundary)
                        except FileNotFoundError:
                            failed[boundary] = "no common /dev/shm: other machines or containers"
                        except Exception as error:  # of any kind: others must not wait
                            failed[boundary] = first_line(error)
                for failures in self._collectives.in_pipeline(failed):
                    obstacles |= failures
            for boundary in sorted(put.keys() & obstacles.keys()):
                put.pop(boundary).close()
        finally:
            with suppress(OSError):  # a folder that is read-only says so of what is not there, too
                path.unlink()
        for boundary in self._own:
            if boundary not in obstacles:
                side.carriers.append(put[boundary])
                carriers[self._peers(boundary).receives] = put[boundary]
        return side if side.carriers else None, obstacles

    def _exchange(self, boundary: int, side: int, value: Any) -> Any:
        """Give a value to the other side's host, and return what it gives."""
        hosts, neighbour = self._collectives.pipeline, self._peers(boundary).neighbour
        tags = _FIRST_TAG + 2 * boundary, _FIRST_TAG + 2 * boundary + 1
        sent = hosts.send(value, neighbour, tags[side])
        received = hosts.receive(neighbour, tags[1 - side])
        for work, _ in sent:
            work.wait()
        return received

    def _transfers(
        self, carriers: dict[Kind, Carrier], boundaries: dict[int, str], *, ahead: bool
    ) -> list[dist.ProcessGroup]:
        """Make a two-rank communicator for each kind across each boundary that needs them.

        Returns those of this rank.

        NCCL has no tags and runs a communicator's transfers one after another. All ranks of the job
        take part in making every group of the job, in one order: where communicators are brought up
        eagerly, making one splits the job's own. Each has a first exchange, since they block both
        hosts when they come into being.
        """
        blocks = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0"
        everyone = of_all_ranks((tuple(self._ranks), tuple(boundaries), blocks))
        if any(blocks for *_, blocks in everyone):
            raise ChannelError(
                "With CUDA_LAUNCH_BLOCKING a receive stops the host for ever",
                remedy="Leave it out, or debug without EnvPipe.",
            )
        groups: dict[tuple[int, Kind], dist.ProcessGroup] = {}
        for pipeline, needed, _ in sorted(set(everyone)):
            for boundary in needed:
                pair = sorted((pipeline[boundary], pipeline[(boundary + 1) % len(pipeline)]))
                for kind in WHOLE:
                    group = _new_group(pair, kind, self._timeout)
                    if pipeline == tuple(self._ranks) and boundary in self._own:
                        groups[boundary, kind] = group
        for boundary in self._own:
            if boundary in boundaries:
                peers = self._peers(boundary)
                carriers[peers.receives] = TransferCarrier(
                    peers,
                    (groups[boundary, peers.receives], groups[boundary, peers.sends]),
                    self._collectives.pipeline,
                    timeout=None,
                    ahead=ahead,
                )
                for kind in WHOLE:
                    probe = torch.zeros(1, device=torch.cuda.current_device())
                    exchange = dist.recv if kind is peers.receives else dist.send
                    exchange(probe, peers.rank, group=groups[boundary, kind])
        torch.cuda.synchronize()
        return list(groups.values())


def _new_group(pair: Sequence[int], kind: Kind, timeout: timedelta) -> dist.ProcessGroup:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout  # torch warns of another one than it is given
    options.config.max_ctas = MAX_CTAS
    options.config.min_ctas = 1
    group: dist.ProcessGroup = dist.new_group(
        pair, timeout=timeout, pg_options=options, group_desc=f"envpipe-{kind.value}"
    )
    return group
