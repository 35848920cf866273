"""Undoes what dead jobs left, as `envpipe clocks reset` does."""

from envpipe_megatron.gpu.base import GpuAddress
from envpipe_megatron.gpu.guard.lease import OpenGpu, list_leases, undo_lease


def undo_stale(open_gpu: OpenGpu) -> list[GpuAddress]:
    """Undo every stale lease; return the GPUs of those that are gone."""
    stale = [record for record in list_leases() if not record.live]
    return [record.address for record in stale if undo_lease(record, open_gpu)]
