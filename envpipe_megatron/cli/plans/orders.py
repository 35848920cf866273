"""Orders as options and files: `--schedule` of `envpipe plan`, and `envpipe export-schedule`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from envpipe_megatron.cli.common import EXISTING_FILE, OUTPUT_FILE, check_outputs
from envpipe_megatron.console import say
from envpipe_megatron.core.plan import read_order, read_order_and_groups
from envpipe_megatron.files import replace_files
from envpipe_megatron.formats.torch_csv import read_torch_csv, torch_csv
from envpipe_megatron.policies.schedules import SCHEDULES

_ENDINGS = (".json", ".csv")


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
    """What a `PlanRequest` takes of the options for order and microbatches; reads the file."""
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


@click.command("export-schedule")
@click.argument("plan_path", metavar="PLAN", type=EXISTING_FILE)
@click.option("--output", type=OUTPUT_FILE, help="CSV; without it, it is printed.")
def export_schedule(plan_path: Path, output: Path | None) -> None:
    """Write a plan's order as torch.distributed.pipelining reads it (format compute_only).

    Example:

      envpipe export-schedule plan.json --output order.csv
    """
    text = torch_csv(read_order(plan_path))
    if output is None:
        click.echo(text, nl=False)
        return
    check_outputs([output], [plan_path])
    replace_files({output: [text]})
    say(Console(), f"Order written to {output}")
