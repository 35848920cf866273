"""Rounds of the guard's fault table: start jobs, let something go wrong at a random point, look.

Each round ends with nothing of it running, no clock locked and no lease left, or it raises.
"""

import json
import os
import random
import resource
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fake_nvml.fake_nvml import FakeNvml
from guard_ranks import Rank, RankServer
from lease_helpers import undo_stale

from envpipe_megatron.gpu.base import GpuAddress
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.guard.hold import guard_log
from envpipe_megatron.gpu.guard.lease import list_leases
from envpipe_megatron.gpu.guard.lease_file import LeaseRecord, lease_name, new_lease_folder
from envpipe_megatron.gpu.guard.messages import runtime_folder
from envpipe_megatron.gpu.registry import open_gpu

NUM_GPUS = 4
DEADLINE_S = 120.0  # of what must come, on however busy a machine


class Node:
    """Emulated GPUs and fake NVIDIA ones, with folders of their own for leases and sockets."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.nvml = FakeNvml(folder / "nvml", library, ["a100"] * NUM_GPUS)
        emulated = [EmulatedGpu.create("a100-sxm", i, folder / "emulated") for i in range(NUM_GPUS)]
        self.addresses = {
            "emulated": [gpu.address for gpu in emulated],
            "nvml": [GpuAddress("nvml", uid) for uid in self.nvml.uuids],
        }
        self._emulated = {gpu.address: gpu for gpu in emulated}
        self._folder = folder
        (folder / "run").mkdir(mode=0o700)
        self.environment = {
            "ENVPIPE_LEASE_DIR": str(folder / "leases"),
            "XDG_RUNTIME_DIR": str(folder / "run"),
        }

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """This process, and the ranks and guards that it starts, are on this node."""
        with patch.dict(os.environ, self.environment), self.nvml.used_here():
            self.ranks = RankServer()
            try:
                yield
            finally:
                self.ranks.close()

    def locked_mhz(self, address: GpuAddress) -> object:
        if address.backend == "nvml":
            return self.nvml.locked_mhz(address.uid)
        return self._emulated[address].requested_frequency_mhz


def until(condition: Callable[[], object], what: str, every_s: float = 0.002) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"in vain: {what}; leases {list_leases()}")
        time.sleep(every_s)


@dataclass
class Outcome:
    """Findings of a round: clocks locked and leases left at its end, and how long resets took."""

    locked: int = 0
    leases: int = 0
    reset_s: list[float] = field(default_factory=list)


class Round:
    """One round: jobs to start, processes to look after, and what to await."""

    def __init__(self, node: Node, fault: str, number: int, seed: int) -> None:
        self.node = node
        self.number = number
        self.random = random.Random(f"{seed} {fault} {number}")
        self.job = f"{fault} {seed} {number} {os.getpid()}"
        self.is_nvml = number % 2 == 1
        self.addresses = self.node.addresses["nvml" if self.is_nvml else "emulated"]
        self.ranks: list[Rank] = []
        self.outcome = Outcome()

    def begin(
        self,
        address: GpuAddress,
        job: str | None = None,
        settings: dict[str, float] | None = None,
        **how: Any,
    ) -> Rank:
        """Start a rank of a job, whose guard is still to come."""
        patient = {"heartbeat_s": 120.0, "give_up_s": 240.0}
        rank = self.node.ranks.start(
            address=[address.backend, address.uid],
            job=job or self.job,
            seed=self.random.getrandbits(32),
            settings={**patient, **(settings or {})},
            **how,
        )
        self.ranks.append(rank)
        return rank

    def start(self, count: int = 3, first: int = 0, **how: Any) -> list[Rank]:
        """Start ranks of a job on the GPUs from `first` on; return at a random time after they have
        locked, so that what follows meets them at a random point.
        """
        ranks = [self.begin(address, **how) for address in self.addresses[first : first + count]]
        for rank in ranks:
            rank.hear("held")
        self.pause()
        return ranks

    def guards(self) -> list[int]:
        """The processes of this round's guards that live, also of those that are starting."""
        found = []
        for command in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if json.dumps(self.job)[1:-1].encode() in command.read_bytes():
                    found.append(int(command.parent.name))
        return found

    def pause(self, longest_s: float = 0.02) -> None:
        """Let a random time pass."""
        end_s = time.monotonic() + self.random.uniform(0, longest_s)
        while time.monotonic() < end_s:
            pass

    def await_back(self, *ranks: Rank) -> None:
        """Wait until their GPUs' clocks are unlocked and the leases gone; note how long."""
        start_s = time.monotonic()
        waiting = {rank.address for rank in ranks}

        def back() -> bool:
            leased = {record.address for record in list_leases()}
            for address in sorted(waiting - leased, key=str):
                assert self.node.locked_mhz(address) is None, f"{address} lost its lease locked"
                waiting.remove(address)
            return not waiting

        until(back, f"clocks of {waiting} back", 0.0005)
        self.outcome.reset_s.append(time.monotonic() - start_s)

    def finish(self, ranks: list[Rank]) -> None:
        for rank in ranks:
            rank.tell("finish")
        for rank in ranks:
            rank.wait()

    def await_guards(self) -> None:
        """Wait until the guards have ended."""
        until(lambda: not self.guards(), "the end of guards")

    def end(self) -> None:
        """Wait until the guards have ended, and look at everything."""
        self.await_guards()
        locked, leased = self.left()
        assert not locked
        assert not leased

    def left(self) -> tuple[list[GpuAddress], list[LeaseRecord]]:
        """Return the GPUs whose clocks are locked, and the leases that are there; note both."""
        leased = list_leases()
        locked = [a for a in self.addresses if self.node.locked_mhz(a) is not None]
        self.outcome.locked, self.outcome.leases = len(locked), len(leased)
        return locked, leased

    def close(self) -> None:
        for pid in self.guards():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for rank in self.ranks:
            rank.close()
        self.left()
        undo_stale(open_gpu)  # so that a round that failed does not spoil the next


# --- the faults ----------------------------------------------------------------------------------


def sigkill_of_one_rank(round_: Round) -> None:
    ranks = round_.start()
    victim = ranks.pop(round_.random.randrange(3))
    victim.kill(signal.SIGKILL)
    round_.await_back(victim)
    round_.finish(ranks)


def sigkill_of_all_ranks(round_: Round) -> None:
    ranks = round_.start()
    for rank in round_.random.sample(ranks, 3):
        rank.kill(signal.SIGKILL)
    round_.await_back(*ranks)


def sigkill_of_a_rank_with_a_child(round_: Round) -> None:
    (rank,) = round_.start(1, with_child=True)
    child = os.pidfd_open(rank.hear("child")[1])
    round_.pause()
    rank.kill(signal.SIGKILL)
    round_.await_back(rank)
    assert not select.select([child], [], [], 0)[0], "the child should have outlived the reset"
    signal.pidfd_send_signal(child, signal.SIGKILL)
    os.close(child)


def sigkill_of_a_rank_in_mid_request(round_: Round) -> None:
    """Between its asking for a clock and the time at which that is due."""
    (rank,) = round_.start(1, steady=True, delay_s=round_.random.choice([1e-3, 0.02, 3600.0]))
    rank.tell("ask")
    rank.hear("asked")
    round_.pause()
    rank.kill(signal.SIGKILL)
    round_.await_back(rank)
    round_.pause(0.05)
    assert round_.node.locked_mhz(rank.address) is None, "locked when nobody was there"


def end_of_a_ranks_child(round_: Round) -> None:
    """It leaves the rank's guard alone, although it has all that the rank has."""
    (rank,) = round_.start(1, with_child=True, steady=True)
    clock = round_.node.locked_mhz(rank.address)
    child = os.pidfd_open(rank.hear("child")[1])
    round_.pause()
    signal.pidfd_send_signal(child, round_.random.choice([signal.SIGKILL, signal.SIGTERM]))
    assert select.select([child], [], [], DEADLINE_S)[0]
    os.close(child)
    round_.pause()
    assert round_.node.locked_mhz(rank.address) == clock is not None
    rank.tell("go on")
    rank.hear("set")
    round_.finish([rank])
    round_.await_back(rank)


def sigkill_of_the_guard(round_: Round) -> None:
    """Of one rank or of all."""
    ranks = round_.start()
    victims = round_.random.sample(ranks, round_.random.choice([1, 3]))
    for rank in victims:
        rank.kill_guard()
    round_.await_back(*victims)
    for rank in victims:
        rank.hear("lost")
    round_.finish(ranks)


def sigkill_of_a_rank_and_its_guard(round_: Round) -> None:
    """The guards of the others find what they left."""
    ranks = round_.start()
    victim = ranks.pop(round_.random.randrange(3))
    kill_in_any_order(round_, victim.kill, victim.kill_guard)
    round_.await_back(victim)
    round_.finish(ranks)


def sigkill_of_all_guards_and_one_rank(round_: Round) -> None:
    """Where no guard is left, ranks without one do what guards do."""
    ranks = round_.start()
    victim = round_.random.choice(ranks)
    kill_in_any_order(round_, victim.kill, *(rank.kill_guard for rank in ranks))
    round_.await_back(*ranks)
    round_.finish([rank for rank in ranks if rank is not victim])


def kill_in_any_order(round_: Round, *kills: Callable[[], None]) -> None:
    for kill in round_.random.sample(kills, len(kills)):
        kill()
        round_.pause(0.001)


def sigkill_of_everything(round_: Round) -> None:
    """Then the next start, or an explicit undo, finds what was left."""
    ranks = round_.start()
    kills = [rank.kill_guard for rank in ranks]
    kills += [partial(rank.kill, signal.SIGKILL) for rank in ranks]
    for kill in round_.random.sample(kills, len(kills)):
        kill()
    for rank in ranks:
        rank.wait()
        rank.wait_for_guard()
    if round_.number % 4 < 2:
        undo_stale(open_gpu)
    else:
        round_.finish(round_.start(job=f"{round_.job} again"))
    round_.await_back(*ranks)


def begin_and_pause(round_: Round) -> Rank:
    """A rank whose guard has no lease yet, or one whose file is there, written or not."""
    rank = round_.begin(round_.addresses[0])
    if round_.random.random() < 0.5:
        round_.pause(0.2)
    else:
        until((new_lease_folder() / lease_name(rank.address)).exists, "a lease", 0.0)
        round_.pause(0.002)
    return rank


def sigkill_of_a_guard_that_starts(round_: Round) -> None:
    """Before it has the lease, or between that and its answer; or just after that."""
    rank = begin_and_pause(round_)
    for pid in round_.guards():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if rank.hear("refused", "held")[0] == "held":  # before the fault, or it came before the guard
        round_.finish([rank])
    rank.wait()
    round_.await_back(rank)


def guard_that_cannot_start(round_: Round) -> None:
    """No program, a folder of leases that is unsafe, or a driver that refuses to reset."""
    address, leases = round_.addresses[0], new_lease_folder()
    leases.mkdir(exist_ok=True)
    how = round_.random.choice(["no program", "no leases", *["no reset"] * round_.is_nvml])
    if how == "no reset":
        round_.node.nvml.set_fault(address.uid, "no_permission")
    try:
        leases.chmod(0o777 if how == "no leases" else 0o1777)
        rank = round_.begin(address, guard=["-m", "nothing"] if how == "no program" else None)
        rank.hear("refused")
        rank.wait()
    finally:
        leases.chmod(0o1777)
        round_.node.nvml.clear_faults()
    round_.await_back(rank)


def sigkill_of_a_rank_whose_guard_starts(round_: Round) -> None:
    rank = begin_and_pause(round_)
    rank.kill(signal.SIGKILL)
    rank.wait()
    round_.await_guards()
    round_.await_back(rank)


def exception_in_the_training_step(round_: Round) -> None:
    ranks = round_.start(polite=round_.random.random() < 0.5)
    victim = ranks.pop(round_.random.randrange(3))
    victim.tell("raise")
    round_.await_back(victim)
    round_.finish(ranks)


def sigterm_to_the_ranks(round_: Round) -> None:
    ranks = round_.start(polite=round_.random.random() < 0.5)
    for rank in ranks:
        rank.kill(signal.SIGTERM)
    round_.await_back(*ranks)


def sigterm_to_everything(round_: Round) -> None:
    ranks = round_.start(polite=round_.random.random() < 0.5)
    kills = [partial(rank.kill_guard, signal.SIGTERM) for rank in ranks]
    kills += [partial(rank.kill, signal.SIGTERM) for rank in ranks]
    kill_in_any_order(round_, *kills)
    round_.await_back(*ranks)


def sigterm_to_the_guard(round_: Round) -> None:
    """It resets, and ends; the ranks go on."""
    ranks = round_.start()
    for rank in ranks:
        rank.kill_guard(round_.random.choice([signal.SIGTERM, signal.SIGHUP, signal.SIGINT]))
    round_.await_back(*ranks)
    for rank in ranks:
        rank.hear("lost")
    round_.finish(ranks)


def sigstop_of_a_rank(round_: Round) -> None:
    """Stopped for longer than the heartbeat; when it goes on, it is served again."""
    ranks = round_.start(2, settings={"heartbeat_s": 0.3})
    victim = ranks[0]
    victim.kill(signal.SIGSTOP)
    start_s = time.monotonic()
    until(lambda: round_.node.locked_mhz(victim.address) is None, "a silent rank's reset", 0.0005)
    round_.outcome.reset_s.append(time.monotonic() - start_s)
    leased = victim.address in {record.address for record in list_leases()}
    victim.kill(signal.SIGCONT)
    victim.tell("go on")
    # On a busy machine the guard may be silent for as long, which is a lost one.
    if victim.hear("set", "unset") == ["set"]:
        assert leased, "it may be locked again"
    round_.finish(ranks)


def sigstop_of_the_guard(round_: Round) -> None:
    """For longer than the heartbeat, which is a lost guard; or shorter, and it goes on."""
    is_long = round_.random.random() < 0.5
    (rank,) = round_.start(1, settings={"heartbeat_s": 0.3} if is_long else {})
    rank.kill_guard(signal.SIGSTOP)
    if is_long:
        rank.hear("lost")
        round_.await_back(rank)
    else:
        round_.pause()
        rank.kill_guard(signal.SIGCONT)
        rank.tell("go on")
        rank.hear("set")
    round_.finish([rank])


def out_of_memory_in_the_guard(round_: Round) -> None:
    """By an injected MemoryError at a random point, or by a real limit on its memory."""
    injected = round_.random.random() < 0.5
    guard = [str(Path(__file__).with_name("guard_that_fails.py"))] if injected else None
    ranks = round_.start(guard=guard)
    if injected:
        for rank in ranks:
            rank.kill_guard(signal.SIGUSR1)
        for rank in ranks:
            rank.hear("lost")
        round_.await_back(*ranks)
        round_.finish(ranks)
        return
    for pid in round_.guards():
        size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (size, size))
    for rank in ranks:
        rank.kill(signal.SIGKILL)
    round_.await_back(*ranks)


def driver_that_fails(round_: Round) -> None:
    """The resets of a dead rank's GPU fail for a while; the lease stays until one works."""
    round_.addresses = round_.node.addresses["nvml"]
    ranks = round_.start()
    victim = round_.random.choice(ranks)
    fault = round_.random.choice(["no_permission", "timeout", "lost"])
    log = guard_log(victim.address)
    round_.node.nvml.set_fault(victim.address.uid, fault)
    try:
        victim.kill(signal.SIGKILL)
        wanted, failed = round_.random.randint(1, 3), f"{victim.address.uid}: reset failed"
        until(lambda: log.read_text().count(failed) >= wanted, "resets that fail")
        assert victim.address in {record.address for record in list_leases()}
    finally:
        round_.node.nvml.clear_faults()
    round_.await_back(victim)
    round_.finish([rank for rank in ranks if rank is not victim])


def driver_that_hangs(round_: Round) -> None:
    """In a call of the guard's for longer than the heartbeat, which is a lost guard."""
    round_.addresses = round_.node.addresses["nvml"]
    (rank,) = round_.start(1, settings={"heartbeat_s": 0.3})
    round_.node.nvml.set_fault(rank.address.uid, "slow_ms", 2_000)
    try:
        rank.hear("lost")
    finally:
        round_.node.nvml.clear_faults()
    round_.await_back(rank)
    round_.finish([rank])


def two_jobs_on_disjoint_gpus(round_: Round) -> None:
    """The end of one job, whatever it is, leaves the clocks of the other alone."""
    others = round_.start(2, first=2, job=f"{round_.job} beside", steady=True)
    clocks = [round_.node.locked_mhz(rank.address) for rank in others]
    ranks = round_.start(2)
    with_guard = round_.random.random() < 0.5
    for rank in ranks:
        if with_guard:
            rank.kill_guard()
        rank.kill(signal.SIGKILL)
        rank.wait()
        rank.wait_for_guard()
    if with_guard:
        undo_stale(open_gpu)
    round_.await_back(*ranks)
    assert [round_.node.locked_mhz(rank.address) for rank in others] == clocks
    assert all(clock is not None for clock in clocks)
    round_.finish(others)


def a_gpu_that_a_live_job_holds(round_: Round) -> None:
    """A second job that wants it is refused, and the first one's clock is left alone."""
    (rank,) = round_.start(1, steady=True)
    clock = round_.node.locked_mhz(rank.address)
    second = round_.begin(rank.address, f"{round_.job} second")
    _, error, text = second.hear("refused")
    assert error == "GuardError"
    assert round_.job in text
    second.wait()
    assert round_.node.locked_mhz(rank.address) == clock is not None
    round_.pause()
    rank.kill(signal.SIGKILL)
    round_.await_back(rank)


#: All that is done to a round.
FAULTS: dict[str, Callable[[Round], None]] = {
    name: fault
    for name, fault in list(vars().items())
    if getattr(fault, "__annotations__", None) == {"round_": Round, "return": None}
}


def play(node: Node, fault: str, number: int, seed: int, outcome: Outcome | None = None) -> None:
    """Play one round of a fault; note what it found.

    Raises:
        AssertionError, TimeoutError: a clock stayed locked, or a lease was left.
    """
    round_ = Round(node, fault, number, seed)
    round_.outcome = outcome if outcome is not None else round_.outcome
    with ExitStack() as ends:
        ends.callback(round_.close)
        FAULTS[fault](round_)
        round_.end()
    for left in runtime_folder().iterdir():
        left.unlink()  # logs
