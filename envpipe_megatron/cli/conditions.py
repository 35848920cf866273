"""Options for what surrounds the units, shared by the subcommands that plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from envpipe_megatron.cli.common import amounts, counts, known_blocking_power
from envpipe_megatron.conditions import SIDECAR_FIELDS, Conditions, make_conditions
from envpipe_megatron.profile import Profile

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--blocking-power",
        type=amounts(),
        help="Power of a GPU that waits in a receive, W, or for each stage. Default: the profile's "
        "sidecar, or 0.",
    ),
    click.option(
        "--use",
        type=click.Choice(list(SIDECAR_FIELDS)),
        multiple=True,
        help="Take this from the profile's sidecar; repeat for more. Default: the latency, where "
        "it is known.",
    ),
    click.option("--p2p-latency", type=amounts(), help="Of a hop, s, or of each boundary."),
    click.option("--tail-time", type=amounts(), help="After a stage's last unit, s, or for each."),
    click.option("--tensor-parallel", type=counts(), help="GPUs of a stage, or of each."),
    click.option("--change-time", type=click.FloatRange(min=0), help="Of a clock change, s."),
    click.option("--change-energy", type=click.FloatRange(min=0), help="Of a clock change, J."),
)


def conditions_options(command: Command) -> Command:
    """Add the options; the command gets them by name, for `read_conditions`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_conditions(
    profile: Profile,
    *,
    blocking_power: tuple[float, ...] | None,
    use: tuple[str, ...],
    p2p_latency: tuple[float, ...] | None,
    tail_time: tuple[float, ...] | None,
    tensor_parallel: tuple[int, ...] | None,
    change_time: float | None,
    change_energy: float | None,
) -> Conditions:
    """The conditions of a profile's job from the options' values."""
    return make_conditions(
        profile,
        blocking_power_w=known_blocking_power(profile, _single(blocking_power)),
        use=use or None,
        latency_s=_single(p2p_latency),
        tail_time_s=_single(tail_time),
        gpus_per_stage=_single(tensor_parallel),
        change_time_s=change_time,
        change_energy_j=change_energy,
    )


def _single(values: tuple[Any, ...] | None) -> Any:
    """One number as itself, for all stages."""
    return values[0] if values is not None and len(values) == 1 else values
