"""What the subcommands share: options' types, errors as messages, tables."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.plan import Plan
from envpipe_megatron.profile import Profile

EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
OUTPUT_FILE = click.Path(dir_okay=False, path_type=Path)
OUTPUT_FOLDER = click.Path(file_okay=False, path_type=Path)

logger = logging.getLogger(__name__)


class ErrorsAsMessages(click.Group):
    """Prints EnvPipe's errors as one message, and exits 0 on success alone."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except EnvPipeError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            if error.filename is None:
                raise
            raise click.ClickException(
                f"Cannot read or write {error.filename}: {error.strerror}. "
                "Check that its folder exists and is yours to write."
            ) from error


class Counts(click.ParamType):  # type: ignore[type-arg]  # generic in click's stubs alone
    """`N` or `N,N,...`."""

    name = "N[,N...]"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        """Read the counts."""
        if isinstance(value, tuple):
            return value
        try:
            counts = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            counts = ()
        if not counts or min(counts) < 1:
            self.fail(f"{value!r} is not a positive number, or one for each stage", param, ctx)
        return counts


def say(console: Console, text: str) -> None:
    """Print text that holds paths: they are neither broken over lines nor read as markup."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def known_blocking_power(profile: Profile, given_w: float | None) -> float | tuple[float, ...]:
    """The blocking power that was given, or the sidecar's, or 0 with a warning, in W."""
    if given_w is not None:
        return given_w
    if profile.sidecar.wait_power_w is not None:
        return tuple(curve[max(curve)] for curve in profile.sidecar.wait_power_w)
    logger.warning(
        "No blocking power is known: waiting is taken to cost nothing, and savings are off. "
        "Give --blocking-power (an A100 SXM waits at 83.6 W, an A40 at 70.4 W)."
    )
    return 0.0


def summary_table(plan: Plan) -> Table:
    """A plan beside its baseline."""
    baseline = plan.baseline
    table = Table(title=f"{plan.policy} on {plan.schedule.name}")
    for column in ("", "plan", f"baseline ({baseline.schedule.name})"):
        table.add_column(column, justify="right" if column else "left")

    def spread(counts: Iterable[int]) -> str:
        return " ".join(str(count) for count in counts)

    table.add_row(
        "iteration time (s)",
        f"{plan.cost.iteration_time_s:.4f}",
        f"{baseline.cost.iteration_time_s:.4f}",
    )
    table.add_row("energy (J)", f"{plan.cost.energy_j:.1f}", f"{baseline.cost.energy_j:.1f}")
    table.add_row("saving (%)", f"{plan.cost.saving_percent(baseline.cost):.2f}", "")
    table.add_row("slowdown (%)", f"{plan.cost.slowdown_percent(baseline.cost):.3f}", "")
    if plan.schedule.num_chunks == 1:
        table.add_row("extra forwards by stage", spread(plan.schedule.extra_forwards), "")
    table.add_row(
        "peak in flight by stage",
        spread(plan.schedule.peak_in_flight),
        spread(baseline.schedule.peak_in_flight),
    )
    return table
