"""ENVPIPE_FORBID_CLOCK_CONTROL: no public entry makes a call that changes a GPU.

Every entry is walked on a machine where it could: NVML with all rights, a zeusd and a site's
command that do as they are told, GPUs with locks and leases that dead jobs left. The same walk
without the variable does change GPUs in all three ways, so that its silence means something.
"""

import ast
import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from fake_zeusd import FakeZeusd
from stale_leases import undo_stale

import envpipe_megatron.gpu
from envpipe_megatron.cli import main
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu import control
from envpipe_megatron.gpu.backends.command import CommandGpu
from envpipe_megatron.gpu.backends.nvml import NvmlGpu
from envpipe_megatron.gpu.backends.zeusd import ZeusdGpu
from envpipe_megatron.gpu.base import FORBID_VARIABLE, Gpu, GpuAddress
from envpipe_megatron.gpu.control import CHOICES, check_controls, choose_control, open_controlled
from envpipe_megatron.gpu.guard.hold import hold_gpu
from envpipe_megatron.gpu.guard.lease import Lease, list_leases, undo_lease
from envpipe_megatron.gpu.guard.resetting import Resetter
from envpipe_megatron.gpu.opening import BACKENDS, open_gpu
from envpipe_megatron.gpu.site import HARDWARE_BACKENDS, read_site

ROOT = Path(envpipe_megatron.gpu.__file__).resolve().parents[2]

#: How each command is run. One that touches no GPU is only asked for its help; a new command fails
#: the test until somebody has decided what it is.
COMMANDS = {
    ("doctor",): [[], ["--json"]],
    ("clocks", "show"): [[], ["--all-clocks"]],
    ("clocks", "reset"): [[], ["--gpu", "0", "--gpu", "2"]],
    ("clocks", "measure-latency"): [[], ["--clocks", "1410,1200"]],
    ("energy", "sum"): [["--help"]],
    ("report",): [["--help"]],
    ("plan",): [["--help"]],
    ("simulate",): [["--help"]],
    ("straggler",): [["--help"]],
    ("partition",): [["--help"]],
    ("import-freqs",): [["--help"]],
    ("export-freqs",): [["--help"]],
    ("quickstart",): [["--help"]],  # emulated GPUs alone
    ("patch", "apply"): [["--help"]],
    ("patch", "check"): [["--help"]],
    ("patch", "revert"): [["--help"]],
    ("launch",): [["--help"]],  # likewise
    ("profile",): [["--help"]],  # the training that it starts goes the ways below
}


def commands(command=main, path=()):
    """The path of every command that is no group."""
    if not isinstance(command, click.Group):
        return [path]
    return [
        leaf
        for name, member in command.commands.items()
        for leaf in commands(member, (*path, name))
    ]


@dataclass
class Machine:
    """A node on which everything is allowed, and all that could be changed on it."""

    nvml: object
    zeusd: FakeZeusd
    program: Path

    def changes(self):
        """What was changed, by the way in which it was."""
        log = self.program.with_name("commands")
        return {
            "nvml": self.nvml.changes()[self.before :],
            "zeusd": [request for request in self.zeusd.requests if request.startswith("POST")],
            "command": log.read_text().splitlines() if log.exists() else [],
        }

    def leave_locks(self):
        """Locks and leases of dead jobs, one of each back end."""
        for index, backend in enumerate(HARDWARE_BACKENDS):
            uuid = self.nvml.uuids[index]
            NvmlGpu(uuid).lock_frequency(1200)
            Lease.take(GpuAddress(backend, uuid), "gone", rank=None, open_gpu=open_gpu).abandon()
        self.before = len(self.nvml.changes())

    def clean_up(self):
        undo_stale(open_gpu)
        self.before = len(self.nvml.changes())
        self.zeusd.requests.clear()
        self.program.with_name("commands").unlink()


@pytest.fixture
def machine(fake_nvml, tmp_path, monkeypatch):
    fake_nvml.use_here()
    zeusd = FakeZeusd(tmp_path / "zeusd.sock")
    zeusd.gpus = {bus_id: {"id": index} for index, bus_id in enumerate(fake_nvml.pci_bus_ids)}
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho \"$@\" >> '{tmp_path}/commands'\n")
    program.chmod(0o755)
    site = tmp_path / "site.toml"
    site.write_text(
        f'format = "envpipe-site/1"\n[gpu_control]\nzeusd_socket = "{zeusd.path}"\n'
        f'lock_command = ["{program}", "lock", "{{uuid}}", "{{mhz}}"]\n'
        f'reset_command = ["{program}", "reset", "{{uuid}}"]\n'
    )
    site.chmod(0o644)
    leases = tmp_path / "leases"
    leases.mkdir(mode=0o700)
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    for name in ("ZEUSD_SOCK_PATH", "ZEUSD_TOKEN", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ENVPIPE_SITE_CONFIG", str(site))
    monkeypatch.setenv("ENVPIPE_LEASE_DIR", str(leases))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(control, "has_sys_admin", lambda: True)
    monkeypatch.setattr(control, "in_user_namespace", lambda: False)
    machine = Machine(fake_nvml, zeusd, program)
    machine.leave_locks()
    yield machine
    zeusd.stop()


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
        for path, variants in COMMANDS.items():
            for arguments in variants:
                result = CliRunner().invoke(main, [*path, *arguments])
                # An error that is a message, never one that nobody caught.
                assert isinstance(result.exception, SystemExit | None), (path, result.exception)

    def walk_choices(self):
        site = read_site()
        check_controls(site)
        for wanted in CHOICES:
            for require in (False, True):
                chosen = self.call(choose_control, wanted, site, require=require)
                if chosen is None or wanted == "emulated":
                    continue
                gpu = self.call(open_controlled, self.machine.nvml.uuids[3], chosen, site)
                if gpu is not None:
                    self.use(gpu)

    def walk_back_ends(self):
        for backend in BACKENDS:
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
            self.call(undo_lease, record, open_gpu, gave_up=True)
            lease = self.call(Lease.take, record.address, "new", rank=None, open_gpu=open_gpu)
            if lease is not None:
                lease.release()
        site = read_site()
        resetter = Resetter(site)
        list(resetter.reset_all(GpuAddress(b, self.machine.nvml.uuids[3]) for b in BACKENDS[:3]))
        list(resetter.undo_others([]))

    def walk_guard(self):
        for backend, uuid in zip(HARDWARE_BACKENDS, self.machine.nvml.uuids, strict=False):
            address = GpuAddress(backend, uuid)
            hold = self.call(hold_gpu, address, f"job {backend}", on_event=lambda event: None)
            if hold is not None:
                hold.release()


WALKS = (
    Walk.walk_commands,
    Walk.walk_choices,
    Walk.walk_back_ends,
    Walk.walk_leases,
    Walk.walk_guard,
)


def test_no_entry_changes_a_gpu_under_the_variable(machine, monkeypatch):
    monkeypatch.setenv(FORBID_VARIABLE, "1")
    leases = [record.path.read_bytes() for record in list_leases()]
    walk = Walk(machine)
    for part in WALKS:
        part(walk)
        assert machine.changes() == {"nvml": [], "zeusd": [], "command": []}, part.__name__
    assert len(walk.refused) > 20
    # What dead jobs left is still said, for whoever may undo it.
    assert [record.path.read_bytes() for record in list_leases()] == leases


@pytest.mark.parametrize("part", WALKS)
def test_without_the_variable_the_same_walk_changes_gpus(machine, monkeypatch, part):
    # Nobody waits here for late requests of jobs that were never there.
    at_once = property(lambda gpu: 0.0, lambda gpu, value: None)
    for kind in (ZeusdGpu, CommandGpu):
        monkeypatch.setattr(kind, "late_request_s", at_once)
    if part is Walk.walk_guard:
        machine.clean_up()  # guards, which are other processes, would wait
    part(Walk(machine))
    assert all(machine.changes().values())


def test_every_command_is_walked():
    assert set(commands()) == set(COMMANDS)


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
    assert set(HARDWARE_BACKENDS) <= set(BACKENDS)


def names_in(path):
    """Attributes, names and texts of a Python file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_calls_that_change_a_gpu_stand_in_one_module_each():
    folders = (ROOT / "envpipe_megatron", ROOT / "benchmarks")
    names = {path: set(names_in(path)) for folder in folders for path in folder.rglob("*.py")}
    for signs, home in (
        (("nvmlDeviceSet", "nvmlDeviceReset", "nvmlDeviceClear"), "nvml.py"),
        (("set_gpu_locked_clocks", "reset_gpu_locked_clocks"), "zeusd.py"),
    ):
        users = [path for path, used in names.items() if any(n.startswith(signs) for n in used)]
        assert users == [ROOT / "envpipe_megatron" / "gpu" / "backends" / home]
