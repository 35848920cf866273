"""What the ranks of the tests of clock control run, by a job itself and by an operator."""

import ctypes
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import plain_stages
import step_ranks
import torch.distributed as dist
from fake_gpu import look_until
from plain_stages import iterate, options
from waiting_plans import ask, asked_often, plans_are_waited_for

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.backends import nvml
from envpipe_megatron.gpu.base import FORBID_VARIABLE, Gpu, GpuError, ReadOnlyGpu
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.guard.lease import list_leases
from envpipe_megatron.gpu.guard.messages import AGENT_VARIABLE
from envpipe_megatron.gpu.registry import list_gpus
from envpipe_megatron.runtime.clocks.rank_clock import RankClock, hold_everywhere, open_rank_gpu
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.runtime.job.session import Session


def use_guards_of(root: Path, name: str) -> None:
    """Let this process's guard and leases live below a folder, as those of one job."""
    (root / "run").mkdir(mode=0o700, exist_ok=True)
    os.environ.update(
        XDG_RUNTIME_DIR=str(root / "run"),
        ENVPIPE_LEASE_DIR=str(root / "leases"),
        TORCHELASTIC_RUN_ID=name,
    )


def _guarded_session(rank: int, config: JobOptions, root: Path) -> tuple[Session, EmulatedGpu]:
    """A session on an emulated node that has guards: one with an agent, which bills nothing."""
    with patch.dict(os.environ, {AGENT_VARIABLE: ""}):
        return plain_stages.session(rank, config, root)


def train_guarded(rank: int, root: Path, kill_guard: bool) -> Any:
    """Train with the guard, which dies in the middle or not.

    Returns:
        leases and this rank's lock while it trained, and the lock when a child that it forked has
        left the way it leaves itself; what the clock came to.
    """
    use_guards_of(root, "guarded")
    session, gpu = _guarded_session(rank, options(root, gpu="a100-sxm"), root)
    try:
        iterate(session, rank, 2)
        leases = sorted(record.address.uid for record in list_leases() if record.live)
        locked_mhz = gpu.requested_frequency_mhz
        child = os.fork()
        if child == 0:
            session.close()
            os._exit(0)
        os.waitpid(child, 0)
        forked_mhz = gpu.requested_frequency_mhz
        dist.barrier()
        if kill_guard:
            hold = session.clock._hold
            assert hold is not None
            os.kill(hold.guard_pid, signal.SIGKILL)
            look_until(lambda: session.clock.summary()["error"] is not None)
            look_until(lambda: gpu.requested_frequency_mhz is None)
        iterate(session, rank, 2)
        after_mhz = gpu.requested_frequency_mhz
    finally:
        session.close()
    return leases, locked_mhz, forked_mhz, after_mhz, session.clock.summary()["error"]


def be_refused(rank: int, root: Path, require: bool) -> Any:
    """Train where another job holds rank 1's GPU, or get the error."""
    use_guards_of(root, "refused")
    config = options(root, require_control=require)
    try:
        session, gpu = _guarded_session(rank, config, root)
    except EnvPipeError as error:
        return f"{type(error).__name__}: {error}"
    requested = gpu.requested_frequency_mhz if rank != 1 else None  # that of the other job
    iterate(session, rank, 4)
    session.close()
    energy_j = session.energy.log.totals["steady"].energy_j
    return session.state.phase.value, session.state.notes, requested, energy_j


def be_without_a_folder(rank: int, root: Path, victim: int) -> tuple[str, bool]:
    """Train where one rank cannot make its output folder; whether a clock was changed."""
    use_guards_of(root, "no folder")
    output = root / "file" / "output" if rank == victim else root / "output"
    config = options(output)
    session, _ = _guarded_session(rank, config, root)
    iterate(session, rank, 3)
    session.close()
    return session.state.phase.value, session.clock.summary()["changes"] > 0


def choose(
    rank: int, library: str, environment: dict[str, str], wanted: str, without: int, require: bool
) -> Any:
    """Open and hold a rank's fake NVIDIA GPU where one rank's environment may forbid control.

    Args:
        library: the fake NVML library, which every rank loads.
        environment: what leads it to its node.
        without: the rank that may not change clocks, -1 for none.

    Returns:
        back end of the GPU, and why it does not control the clock; or the error.
    """
    os.environ.update(environment)
    ctypes.CDLL(library)
    if rank == without:
        os.environ[FORBID_VARIABLE] = "1"
    else:
        os.environ.pop(FORBID_VARIABLE, None)
    nvml.has_sys_admin = lambda: True  # whoever runs the tests; the library is a fake
    nvml.in_user_namespace = lambda: False
    stages = dist.get_world_size()
    collectives = plain_stages.lone_pipeline(stages)
    try:
        uid = list_gpus()[rank].uid
        gpu, chosen = open_rank_gpu(uid, collectives, wanted, require=require)
        gpu.read_energy()
        clock, gpu, refused = hold_everywhere(gpu, collectives, RankClock, required=require)
        clock.close()
    except EnvPipeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.pop(FORBID_VARIABLE, None)
    return gpu.address.backend, chosen.warning or refused


def train_asked(
    rank: int,
    root: Path,
    steps: int,
    options: Mapping[str, Any],
    asks: Mapping[int, str | None],
    pauses: Sequence[int] = (),
    lost: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Train, and ask before these steps; after some there is an evaluation.

    Args:
        options: `reads_only` and `guarded` are of the GPU.
        lost: the rank, and the step before which its clock control ends.

    Returns:
        of each step its phase, the lock behind it and its units; locks in evaluations, and live
        leases; what the session says in the end.
    """
    said: list[str] = []
    options = dict(options)
    reads_only, guarded = (options.pop(name, False) for name in ("reads_only", "guarded"))
    root.mkdir(exist_ok=True)
    if guarded:
        use_guards_of(root, "asked")

    def seen(gpu: EmulatedGpu) -> Gpu:
        few = step_ranks.with_few_clocks(gpu)
        return ReadOnlyGpu(few) if reads_only else few

    with (
        asked_often(),
        plans_are_waited_for(),
        patch.dict(os.environ, {AGENT_VARIABLE: ""} if guarded else {}),
    ):
        wanted = replace(step_ranks.config(root / "output", **options), fingerprint={"of": "test"})
        made = step_ranks.framework(rank, wanted, root, seen_as=seen, say=said.append)
        session, ran, paused = made.session, [], []
        with closing(session):
            for number in range(steps):
                if number in asks:
                    ask(session, asks[number])
                if (rank, number) == lost:
                    session.clock.stop(GpuError("the driver of a test"))
                made.step()
                phase = session.state.phase.value
                ran.append((phase, made.gpu.requested_frequency_mhz, session.executed))
                if number in pauses:
                    made.evaluate()
                    leases = sum(record.live for record in list_leases()) if guarded else 0
                    paused.append((made.gpu.requested_frequency_mhz, leases))
    return {
        "ran": ran,
        "paused": paused,
        "said": said,
        "notes": session.state.notes,
        "wishes": session.state.wishes,
        "summary": session.summary(),
        "sums": session.energy.sums(),
        "after": made.gpu.requested_frequency_mhz,
    }
