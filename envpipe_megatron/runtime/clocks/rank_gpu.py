"""The GPU of a rank, under a back end that all ranks of the job can use."""

from __future__ import annotations

import logging

from envpipe_megatron.gpu.base import Gpu, GpuError
from envpipe_megatron.gpu.control import (
    ChosenControl,
    beside_power_profiles,
    choose_control,
    given_up,
    open_controlled,
)
from envpipe_megatron.gpu.guard.resetting import that_can_be_undone
from envpipe_megatron.gpu.site import SiteConfig, read_site
from envpipe_megatron.runtime.channel.collectives import Collectives

logger = logging.getLogger(__name__)


def open_rank_gpu(
    uid: str,
    collectives: Collectives,
    wanted: str,
    *,
    require: bool = False,
    one_clock: bool = False,
) -> tuple[Gpu, ChosenControl]:
    """Open this rank's GPU by the back end that its node allows; every rank of the job calls it.

    A pipeline follows one plan, so clocks are controlled on all of its GPUs or on none: if one
    rank has no control, or a site configuration that cannot be used, every rank opens its GPU for
    reading alone, and the planner logs why.
    Nothing is locked or held yet; the clock was reset, to see that it can be.

    Args:
        uid: the GPU's UUID (`gpu.devices.uid_of_cuda_device`); of an emulated one its
            folder and index.
        wanted: one of `gpu.control.CHOICES`.
        require: whether a job without control is an error instead of a warning.
        one_clock: whether the whole job has one clock, which a power profile does not stand
            against; see `gpu.control.beside_power_profiles`.

    Raises GpuError for a GPU that cannot be opened, or if control is required and not available;
    CollectivesError if another rank raised that.
    """

    def choose() -> tuple[SiteConfig, ChosenControl]:
        try:
            site = SiteConfig() if wanted == "emulated" else read_site()
        except GpuError as error:
            none, remedies = ChosenControl(wanted, None, ""), (f"{error.remedy}.",)
            return SiteConfig(), given_up(none, error.what, remedies, require=require)
        allowed = choose_control(wanted, site, require=require)
        if not one_clock:
            allowed = beside_power_profiles(allowed, uid, site, require=require)
        return site, allowed

    site, chosen = collectives.everywhere(choose)
    backends = collectives.to_planner({str(chosen.backend)}, lambda found: set().union(*found))
    first = collectives.first(chosen if chosen.backend is None else None)
    if first is None:  # all may lock; can all reset?
        chosen = collectives.everywhere(
            lambda: that_can_be_undone(chosen, uid, site, require=require)
        )
        first = collectives.first(chosen if chosen.backend is None else None)
    if first is not None:
        _, chosen = first
        if collectives.is_planner and chosen.warning is not None:
            logger.warning("%s", chosen.warning)
    gpu = collectives.everywhere(lambda: open_controlled(uid, chosen, site))
    if collectives.is_planner and chosen.backend is not None:
        names = ", ".join(sorted(set().union(*backends)))
        logger.info("clocks are controlled by %s: %s", names, chosen.why)
    return gpu, chosen
