"""A proof on the two GPUs of the fake NVML library: the command and, under torchrun, its ranks."""

import io
import os
import sys
from pathlib import Path

NUM_RANKS = 2


def run_command(path: Path) -> None:
    """Run what `envpipe prove` does, with ranks of this file."""
    from rich.console import Console

    from envpipe_megatron.trials import ranks, run
    from envpipe_megatron.trials.machine import Machine
    from envpipe_megatron.trials.settings import Settings

    def run_ranks(num_ranks, program, *rest):
        ranks.run_ranks(num_ranks, [__file__, program[-1]], *rest)

    run.run_ranks = run_ranks
    settings = Settings.read(path)
    missing = "" if settings.changes_clocks else "the right of a test"
    machine = Machine(False, ("fake",) * NUM_RANKS, (), missing, {})
    run.run_trial(run.Trial(settings, machine, []), Console(file=io.StringIO()))


def run_rank() -> None:
    """Run a rank, with the host's time in place of CUDA's, and short measurements."""
    from functools import partial

    import torch

    from envpipe_megatron.gpu.backends import nvml
    from envpipe_megatron.gpu.registry import list_gpus
    from envpipe_megatron.integrations.device import Device, use_cpu
    from envpipe_megatron.runtime.clocks import latency
    from envpipe_megatron.runtime.clocks.rank_clock import open_rank_gpu
    from envpipe_megatron.runtime.job.options import JobOptions
    from envpipe_megatron.trials import worker
    from envpipe_megatron.tuning import shortest
    from host_executor import HostExecutor, HostKernelTimer

    def open_device(collectives, num_stages, options):
        uid = list_gpus()[collectives.stage].uid
        gpu, chosen = open_rank_gpu(
            uid, collectives, options.gpu_control, require=options.require_control
        )
        return Device(gpu, chosen, lambda settle: HostExecutor())

    def zeros(*args, device=None, make=torch.zeros, **options):
        return make(*args, device="cpu" if device == "cuda" else device, **options)

    use_cpu()
    # What megatron-core's own function needs besides.
    torch.zeros, torch.cuda.synchronize = zeros, lambda: None
    nvml.has_sys_admin = lambda: True
    nvml.in_user_namespace = lambda: False
    worker.open_device = open_device
    worker._LATENCY_REPEATS = 1
    shortest._WORTH = -9  # the best order is tried, however little it gains on this host
    latency.LONGEST_S, latency.CudaKernelTimer = 0.05, HostKernelTimer
    worker.JobOptions = partial(JobOptions, profile_steps=2, window_s=0.3)
    worker.main()


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank()
    else:
        run_command(Path(sys.argv[1]))
