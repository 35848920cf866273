"""Makes the channel of a rank: the process groups of its links. Called by each integration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from envpipe_megatron.core.channel_model import hardware_capacity
from envpipe_megatron.core.schedule import Kind
from envpipe_megatron.runtime.channel.collectives import all_pipelines
from envpipe_megatron.runtime.channel.host_group import HostGroup
from envpipe_megatron.runtime.channel.p2p import ChannelError, P2PChannel

#: A transfer whose peer is not ready yet spins, and holds its SMs while units compute. Measured on
#: four H200s (benchmarks/gpu/schedules.py): with NCCL's own choice 1F1B took 1.15 of the time of
#: megatron-core's, with four CTAs 1.06, with two 1.02; EnvPipe's order 1.03, 1.00 and 1.00. Fewer
#: make each transfer slower, which 1F1B feels.
MAX_CTAS = 2


def make_channel(
    pipeline_group: dist.ProcessGroup,
    *,
    timeout: timedelta,
    num_chunks: int = 1,
    max_ctas: int = MAX_CTAS,
    hosts: HostGroup | None = None,
) -> P2PChannel:
    """Make the channel of this rank over a pipeline's process group.

    On gloo the pipeline's own group carries both directions, told apart by tags. NCCL has no tags
    and runs a communicator's transfers one after another, so each link gets a two-rank group. Every
    rank of the job calls this at the same point of the program: the groups are made and brought up
    in one order, with a first exchange, since they block both hosts when they come into being.

    Args:
        pipeline_group: the ranks of the pipeline, in order of their stages.
        timeout: time after which a silent neighbour is an error.
        num_chunks: with more than one, the last stage and the first are neighbours too.
        max_ctas: thread blocks, and so SMs, that one NCCL transfer may hold.
        hosts: host group of the same ranks in the same order; needed for messages that vary.

    Raises:
        ChannelError: another backend than NCCL and gloo, or a host that waits for each transfer.
    """
    ranks = dist.get_process_group_ranks(pipeline_group)
    stage = dist.get_group_rank(pipeline_group, dist.get_rank())
    backend = dist.get_backend(pipeline_group)
    if backend not in ("nccl", "gloo"):
        raise ChannelError(
            "EnvPipe sends between stages over NCCL and gloo alone",
            value=backend,
            remedy="Make the pipeline's process group with one of them.",
        )
    if backend == "nccl":
        if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
            raise ChannelError(
                "With CUDA_LAUNCH_BLOCKING a posted receive stops the host for ever",
                remedy="Leave it out, or debug without EnvPipe.",
            )
        links = _nccl_links(ranks, stage, timeout, wraps=num_chunks > 1, max_ctas=max_ctas)
        capacity = hardware_capacity(os.environ)
        return P2PChannel(ranks, stage, links, timeout=None, capacity=capacity, hosts=hosts)
    groups = {(kind, sender): pipeline_group for kind in Kind for sender in range(len(ranks))}
    return P2PChannel(ranks, stage, groups, timeout=timeout, hosts=hosts)


def _nccl_links(
    ranks: Sequence[int], stage: int, timeout: timedelta, *, wraps: bool, max_ctas: int
) -> dict[tuple[Kind, int], dist.ProcessGroup]:
    """A two-rank communicator for each link of this stage.

    All ranks of the job take part in making every group of the job, in one order: where
    communicators are brought up eagerly, making one splits the job's own.
    """
    size = len(ranks)
    hops = [
        (kind, sender, (sender + step) % size)
        for kind, step in ((Kind.FORWARD, 1), (Kind.BACKWARD, -1))
        for sender in range(size)
        if wraps or 0 <= sender + step < size
    ]
    groups: dict[tuple[Kind, int], dist.ProcessGroup] = {}
    for pipeline in all_pipelines(ranks):
        for kind, sender, receiver in hops:
            pair = sorted((pipeline[sender], pipeline[receiver]))
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = max_ctas
            options.config.min_ctas = 1
            group = dist.new_group(
                pair, timeout=timeout, pg_options=options, group_desc=f"envpipe-{kind.value}"
            )
            if pipeline == tuple(ranks) and stage in (sender, receiver):
                groups[kind, sender] = group
    for kind, sender, receiver in hops:
        if stage in (sender, receiver):
            probe = torch.zeros(1, device=torch.cuda.current_device())
            exchange, peer = (dist.send, receiver) if stage == sender else (dist.recv, sender)
            exchange(probe, ranks[peer], group=groups[kind, sender])
    torch.cuda.synchronize()
    return groups
