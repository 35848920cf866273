"""Emulated GPUs seen from several processes and threads, some of which are killed."""

import fcntl
import itertools
import multiprocessing
import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.emulated.store import parse_state

FORK = multiprocessing.get_context("fork")


def start(gpu, count):
    """Another process that runs so many units, or units for ever."""

    def run():
        for _ in range(count) if count else itertools.count():
            gpu.run_unit("forward", 0.0625, 0.0)

    process = FORK.Process(target=run)
    process.start()
    return process


def test_concurrent_units_are_all_counted(tmp_path, round_preset):
    gpu = EmulatedGpu.create(round_preset, 0, tmp_path)
    processes = [start(gpu, 150) for _ in range(2)]
    with ThreadPoolExecutor(4) as pool:  # threads exclude each other, too
        list(pool.map(lambda _: gpu.run_unit("forward", 0.0625, 0.0), range(100)))
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert gpu.committed_end_s() == 400 * 0.0625
    assert gpu._file.read().energy_j == 400 * 0.0625 * 300


def test_state_is_whole_after_a_kill_at_any_point(tmp_path, round_preset):
    gpu = EmulatedGpu.create(round_preset, 0, tmp_path)
    delays = random.Random(20240924)
    last_end_s = 0.0
    for _ in range(4):
        process = start(gpu, None)
        try:
            deadline_s = time.monotonic() + delays.uniform(0.001, 0.04)
            while time.monotonic() < deadline_s or gpu.committed_end_s() == last_end_s:
                parse_state(gpu._file.path.read_bytes())  # a reader never sees half a state
        finally:
            process.kill()
            process.join(30)
        state = parse_state(gpu._file.path.read_bytes())
        assert state.energy_j == state.end_s * 300  # exact: binary fractions
        assert state.end_s % 0.0625 == 0
        assert state.end_s >= last_end_s
        last_end_s = state.end_s
        # The dead writer's lock is gone with it, and the next writer carries on.
        assert gpu.run_unit("forward", 0.0625, 0.0)[1] == last_end_s + 0.0625
    assert last_end_s > 0
    assert sorted(p.suffix for p in tmp_path.glob("gpu0*")) in (
        [".json", ".lock"],
        [".json", ".lock", ".new"],
    )


def test_whatever_a_signal_handler_raises_no_lock_is_kept(tmp_path):
    """At a random instant of a change: the way out changes the same GPU, and must not wait for it.

    The exception is kept, as one that is on its way out is: its traceback holds what frames hold.
    """
    gpu = EmulatedGpu.create("a100-sxm", 0, tmp_path)
    randomness = random.Random(20)
    before = signal.signal(signal.SIGALRM, lambda *_: sys.exit(1))
    try:
        for _ in range(500):
            try:
                signal.setitimer(signal.ITIMER_REAL, randomness.uniform(1e-6, 3e-4))
                while True:
                    gpu.lock_frequency(1200)
            except SystemExit as error:
                with (tmp_path / "gpu0.lock").open() as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # else: BlockingIOError
                del error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    gpu.reset_frequency()
    assert gpu.requested_frequency_mhz is None


def test_a_child_that_was_forked_in_a_change_does_not_keep_the_lock(tmp_path):
    """As a data loader's worker may be, while another thread changes the clock."""
    file = EmulatedGpu.create("a100-sxm", 0, tmp_path)._file
    keeps, ends = os.pipe()

    def fork_meanwhile(state):
        if os.fork() == 0:
            os.close(ends)
            os.read(keeps, 1)
            os._exit(0)

    try:
        file.change(fork_meanwhile)
        with (tmp_path / "gpu0.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(ends)
        os.close(keeps)
        os.wait()
