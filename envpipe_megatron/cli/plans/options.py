"""Options of `envpipe plan` for the order of units, and for what surrounds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from envpipe_megatron.cli.common import (
    EXISTING_FILE,
    Finite,
    amounts,
    counts,
    known_blocking_power,
)
from envpipe_megatron.core.conditions import SIDECAR_FIELDS, Conditions, make_conditions
from envpipe_megatron.core.fields import ENERGY, POWER, SHORT_TIME, TIME
from envpipe_megatron.core.plan import read_order_and_groups
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.formats.torch_csv import read_torch_csv
from envpipe_megatron.policies.schedules import SCHEDULES

Command = TypeVar("Command", bound=Callable[..., Any])

_EACH = "one number, or one for each stage."
_OPTIONS = (
    click.option(
        "--blocking-power",
        type=amounts(of=POWER),
        help=f"Power of a GPU that waits in a receive, W; {_EACH} Default: what the profile's "
        "sidecar knows at the highest clock, or 0.",
    ),
    click.option(
        "--use",
        type=click.Choice(list(SIDECAR_FIELDS)),
        multiple=True,
        help="Take this, too, from the profile's sidecar; repeat for more. The latency is "
        "always taken where it is known.",
    ),
    click.option(
        "--p2p-latency",
        type=amounts(of=SHORT_TIME),
        help="Latency of a p2p hop, s; one number, or one for each boundary between stages.",
    ),
    click.option(
        "--tail-time",
        type=amounts(of=TIME),
        help=f"Time after a stage's last unit (gradient reduction, optimizer), s; {_EACH}",
    ),
    click.option(
        "--tensor-parallel",
        type=counts(),
        help=f"Tensor-parallel degree, GPUs that follow one plan; {_EACH}",
    ),
    click.option(
        "--change-time",
        type=Finite(of=SHORT_TIME),
        help="Time from the request of a clock until it runs, s.",
    ),
    click.option(
        "--change-energy", type=Finite(of=ENERGY), help="Energy of a change of clock on one GPU, J."
    ),
)

#: Names of the options' values, as commands get them.
CONDITION_NAMES = (
    "blocking_power", "use", "p2p_latency", "tail_time", "tensor_parallel", "change_time",
    "change_energy",
)  # fmt: skip

_ENDINGS = (".json", ".csv")


def conditions_options(command: Command) -> Command:
    """Add the options; the command gets them by name, for `read_conditions`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_conditions(profile: Profile, **values: Any) -> Conditions:
    """The conditions of a profile's job, from the options' values by `CONDITION_NAMES`."""

    def single(name: str) -> Any:
        """One number as itself, for all stages."""
        given = values[name]
        return given[0] if given is not None and len(given) == 1 else given

    return make_conditions(
        profile,
        blocking_power_w=known_blocking_power(profile, single("blocking_power")),
        use=values["use"],
        latency_s=single("p2p_latency"),
        tail_time_s=single("tail_time"),
        gpus_per_stage=single("tensor_parallel"),
        change_time_s=values["change_time"],
        change_energy_j=values["change_energy"],
    )


class _NameOrFile(click.Choice[str]):
    """The name of an order, or the path of a file that holds one."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Read the name; the file is read by `job_options`."""
        path = Path(value)
        if str(value).lower() in self.choices or not (path.suffix in _ENDINGS or path.is_file()):
            return super().convert(value, param, ctx)
        return EXISTING_FILE.convert(path, param, ctx)


SCHEDULE_OPTION = click.option(
    "--schedule",
    type=_NameOrFile(tuple(SCHEDULES), case_sensitive=False),
    metavar=f"[{'|'.join(SCHEDULES)}|FILE]",
    help="Order of units; 'ours' is EnvPipe's own name for 'envpipe', and 'auto', the default with "
    "the optimal policy, is planned together with the frequencies. Or a file with any order: a "
    "plan JSON, or a CSV of torch.distributed.pipelining (format compute_only). With other "
    "policies the default is 1f1b.",
)


def job_options(
    schedule: str | Path | None, num_microbatches: int | None, policy: str
) -> dict[str, Any]:
    """Fields of a `PlanRequest` from the options for order and microbatches; reads the file."""
    if isinstance(schedule, Path):
        group_size = None
        if schedule.suffix == ".json":
            order, group_size = read_order_and_groups(schedule)
        else:
            order = read_torch_csv(schedule)
        num_microbatches = num_microbatches or order.num_microbatches
        return {"order": order, "group_size": group_size, "num_microbatches": num_microbatches}
    if num_microbatches is None:
        raise click.UsageError("Missing option '--num-microbatches'.")
    usual = "auto" if policy == "optimal" else "1f1b"
    return {"schedule": schedule or usual, "num_microbatches": num_microbatches}
