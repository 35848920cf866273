"""ENVPIPE_FORBID_CLOCK_CONTROL: no public entry makes a call that changes a GPU.

Every entry is walked on a machine where it could: NVML with all rights, a zeusd and a site's
command that do as they are told, GPUs with locks and leases that dead jobs left. The same walk
without the variable does change GPUs in all three ways, so that its silence means something.
"""

import importlib
import json
import pkgutil
from pathlib import Path

import click
import pytest
from commands import run
from lease_helpers import undo_stale

import envpipe_megatron.gpu
from envpipe_megatron.cli import main
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.backends.command import CommandGpu
from envpipe_megatron.gpu.backends.nvml import NvmlGpu
from envpipe_megatron.gpu.backends.zeusd import ZeusdGpu
from envpipe_megatron.gpu.base import FORBID_VARIABLE, Gpu, GpuAddress
from envpipe_megatron.gpu.clock.page import ClockPage
from envpipe_megatron.gpu.control import (
    CHOICES,
    check_controls,
    choose_control,
    open_controlled,
    reset_clocks,
)
from envpipe_megatron.gpu.guard.hold import hold_gpu
from envpipe_megatron.gpu.guard.lease import Lease, list_leases, undo_lease
from envpipe_megatron.gpu.registry import hardware_backends, open_gpu
from envpipe_megatron.gpu.site import read_site

ROOT = Path(envpipe_megatron.gpu.__file__).resolve().parents[2]

#: How each command is run that touches GPUs.
COMMANDS = {
    "doctor": [[], ["--json"]],
    "clocks show": [[], ["--all-clocks"]],
    "clocks reset": [[], ["--gpu", "0", "--gpu", "2"]],
    "clocks measure-latency": [[], ["--clocks", "1410,1200"]],
}
#: A new command fails the test until somebody has decided what it is. The last four start training:
#: on emulated GPUs only, forbidden what a dry run must not do (tests/trials), or the ways below.
TOUCH_NO_GPU = [
    "energy sum", "report", "explain", "plan", "simulate", "partition", "search", "straggler",
    "import-freqs", "export-freqs", "export-schedule", "compare", "patch apply", "patch check",
    "patch revert", "quickstart", "prove", "launch", "profile",
]  # fmt: skip


def commands(command=main, path=()):
    """The name of every command that is no group."""
    if not isinstance(command, click.Group):
        return [" ".join(path)]
    return [
        leaf
        for name, member in command.commands.items()
        for leaf in commands(member, (*path, name))
    ]


@pytest.fixture
def walked(machine, tmp_path, monkeypatch):
    """All is allowed, and dead jobs left a lock and a lease of each back end."""
    machine.set_sys_admin(True)
    machine.start_zeusd()
    machine.grant_command()
    site = tmp_path / "site.toml"
    commands = [f"{name} = {json.dumps(argv)}" for name, argv in machine.fields.items()]
    site.write_text("\n".join(['format = "envpipe-site/1"', "[gpu_control]", *commands]))
    site.chmod(0o644)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("ENVPIPE_SITE_CONFIG", str(site))
    for variable in ("ENVPIPE_LEASE_DIR", "XDG_RUNTIME_DIR"):
        (tmp_path / variable).mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(tmp_path / variable))
    for uuid, backend in zip(machine.nvml.uuids, hardware_backends(), strict=False):
        NvmlGpu(uuid).lock_frequency(1200)
        Lease.take(GpuAddress(backend, uuid), "gone", rank=None, open_gpu=open_gpu).close()
    machine.forget()
    return machine


class Walk:
    """Calls entries one after another; what one refuses is no reason not to call the next."""

    def __init__(self, machine):
        self.machine = machine
        self.refused = []

    def call(self, entry, *arguments, **named):
        try:
            return entry(*arguments, **named)
        except (EnvPipeError, AssertionError) as error:
            self.refused.append(error)
            return None

    def walk_commands(self):
        for command, variants in COMMANDS.items():
            for arguments in variants:
                result = run(*command.split(), *arguments)
                # An error that is a message, never one that nobody caught.
                assert isinstance(result.exception, SystemExit | None), (command, result.exception)

    def walk_choices(self):
        site = read_site()
        check_controls(site)
        for wanted in CHOICES:
            chosen = choose_control(wanted, site)
            if wanted == "emulated":
                continue
            self.call(chosen.required)
            gpu = self.call(open_controlled, self.machine.nvml.uuids[3], chosen, site)
            if gpu is not None:
                self.use(gpu)

    def walk_back_ends(self):
        for backend in CHOICES[1:]:
            if backend != "emulated":
                self.use(open_gpu(GpuAddress(backend, self.machine.nvml.uuids[0])))

    def use(self, gpu):
        """All that a GPU offers."""
        self.call(gpu.lock_frequency, 1200)
        gpu.clock_state()
        gpu.read_energy()
        gpu.power_w  # noqa: B018 - a property that reads
        self.call(gpu.reset_frequency)

    def walk_leases(self):
        for record in list_leases():
            self.call(undo_lease, record, open_gpu)
            lease = self.call(Lease.take, record.address, "new", rank=None, open_gpu=open_gpu)
            if lease is not None:
                lease.release()
        uuid = self.machine.nvml.uuids[3]
        addresses = [GpuAddress(name, uuid) for name in hardware_backends()]
        list(reset_clocks(read_site(), addresses, dead_jobs=False))
        list(reset_clocks(read_site(), [], dead_jobs=True))

    def walk_guard(self):
        for backend, uuid in zip(hardware_backends(), self.machine.nvml.uuids, strict=False):
            address = GpuAddress(backend, uuid)
            page = ClockPage.create()
            hold = self.call(hold_gpu, address, page)
            page.close_file()
            if hold is not None:
                hold.release()


WALKS = (
    Walk.walk_commands,
    Walk.walk_choices,
    Walk.walk_back_ends,
    Walk.walk_leases,
    Walk.walk_guard,
)


def test_no_entry_changes_a_gpu_under_the_variable(walked, monkeypatch):
    monkeypatch.setenv(FORBID_VARIABLE, "1")
    leases = [record.path.read_bytes() for record in list_leases()]
    walk = Walk(walked)
    for part in WALKS:
        part(walk)
        assert walked.changes() == {"nvml": [], "zeusd": [], "command": []}, part.__name__
    assert len(walk.refused) > 20
    # What dead jobs left is still said, for whoever may undo it.
    assert [record.path.read_bytes() for record in list_leases()] == leases


@pytest.mark.parametrize("part", WALKS)
def test_without_the_variable_the_same_walk_changes_gpus(walked, monkeypatch, part):
    # Nobody waits here for late requests of jobs that were never there.
    at_once = property(lambda gpu: 0.0, lambda gpu, value: None)
    for kind in (ZeusdGpu, CommandGpu):
        monkeypatch.setattr(kind, "late_request_s", at_once)
    if part is Walk.walk_guard:
        undo_stale(open_gpu)  # guards, which are other processes, would wait
        walked.forget()
    part(Walk(walked))
    assert all(walked.changes().values())


def test_every_command_is_walked():
    assert sorted(commands()) == sorted([*COMMANDS, *TOUCH_NO_GPU])


def test_every_back_end_that_drives_hardware_is_walked():
    for module in pkgutil.iter_modules(envpipe_megatron.gpu.__path__):
        importlib.import_module(f"envpipe_megatron.gpu.{module.name}")

    def below(kind):
        return {kind}.union(*(below(sub) for sub in kind.__subclasses__()))

    hardware = {
        kind
        for kind in below(Gpu)
        if kind.drives_hardware and kind.__module__.startswith("envpipe_megatron.")
    }
    abstract = {kind for kind in hardware if kind.__abstractmethods__}
    assert hardware - abstract == {NvmlGpu, ZeusdGpu, CommandGpu}
    assert {kind.backend for kind in hardware - abstract} == set(hardware_backends())


def test_calls_that_change_a_gpu_stand_in_one_module_each():
    folders = (ROOT / "envpipe_megatron", ROOT / "benchmarks")
    texts = {path: path.read_text() for folder in folders for path in folder.rglob("*.py")}
    for signs, home in (
        (("nvmlDeviceSet", "nvmlDeviceReset", "nvmlDeviceClear"), "nvml.py"),
        (("set_gpu_locked_clocks", "reset_gpu_locked_clocks"), "zeusd.py"),
    ):
        users = [path for path, text in texts.items() if any(sign in text for sign in signs)]
        assert users == [ROOT / "envpipe_megatron" / "gpu" / "backends" / home]
