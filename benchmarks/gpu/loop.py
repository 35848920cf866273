"""The whole loop on real GPUs whose clocks stay as they are: warm-up, profile, plan, reconfigure.

GPUs are opened as a job opens them (UUID from CUDA, meters from NVML), with the dry-run back end.
Energies do not change with clocks that are not set, so the plan means nothing; shown are the
meters, the waiting power, the hops and tails that a real pipeline gives, and that the loop runs.

    ENVPIPE_FORBID_CLOCK_CONTROL=1 torchrun --nproc-per-node 2 benchmarks/gpu/loop.py --output DIR
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

from benchmarks.gpu.schedules import Bench, join_pipeline
from envpipe_megatron.core.channel_model import CARRIERS
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.base import FORBID_VARIABLE, clock_control_forbidden
from envpipe_megatron.gpu.devices import uid_of_cuda_device
from envpipe_megatron.integrations.megatron.core import ForwardBackward
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.runtime.clocks.rank_clock import open_rank_gpu
from envpipe_megatron.runtime.execution.executor import CudaExecutor
from envpipe_megatron.runtime.job.session import Session, SessionConfig
from envpipe_megatron.tuning.sweep import ProfilerSettings


@click.command()
@click.option("--layers", default=8, show_default=True)
@click.option("--hidden", default=2048, show_default=True)
@click.option("--sequence", default=2048, show_default=True)
@click.option("--microbatch-size", default=1, show_default=True)
@click.option("--num-microbatches", default=8, show_default=True)
@click.option("--carrier", type=click.Choice(CARRIERS), default="auto", show_default=True)
@click.option("--steady", default=20, show_default=True, help="Iterations after the phases.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder.")
def main(**options: Any) -> None:
    """Run the loop and leave what it measured in a folder."""
    if not clock_control_forbidden():
        raise click.ClickException(f"Set {FORBID_VARIABLE}=1: this only reads.")
    join_pipeline()
    bench = Bench(options)
    result = run_loop(bench, options["output"])
    if dist.get_rank() == 0:
        (options["output"] / "loop.json").write_text(json.dumps(result, indent=1) + "\n")
        click.echo(json.dumps(result, indent=1))
    bench.close()
    dist.barrier()
    dist.destroy_process_group()


def run_loop(bench: Bench, output: Path) -> dict[str, Any]:
    """Run a session through all phases and some steady iterations; what every stage measured."""
    output.mkdir(parents=True, exist_ok=True)
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    gpu, chosen = open_rank_gpu(uid_of_cuda_device(str(uuid)), bench.collectives, "dry_run")
    said: list[str] = []
    session = Session(
        SessionConfig(
            PlanRequest(bench.options["num_microbatches"], "envpipe", "envelope", "balanced"),
            profiler=ProfilerSettings(1, 3),
            output_dir=output,
        ),
        gpu,
        lambda settle: CudaExecutor(),
        bench.channel,
        bench.collectives,
        say=said.append,
    )
    bench.sessions["loop"] = session
    bench.functions["loop"] = ForwardBackward(session)
    while session.state.phase is not Phase.STEADY:
        bench.run_steps("loop", 1)
    bench.run_steps("loop", bench.options["steady"])
    session.close()
    mine = {
        "gpu": gpu.name,
        "uid": gpu.address.uid,
        "clock": session.clock_summary(),
        "metered": {phase: asdict(total) for phase, total in session.energy_log.totals.items()},
    }
    stages = bench.collectives.in_pipeline(mine)
    return {"control": chosen.why, "said": said, "notes": session.state.notes, "stages": stages}


if __name__ == "__main__":
    main()
