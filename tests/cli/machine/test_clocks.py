"""`envpipe clocks show` and `reset`, by what they print and by what the GPUs' driver was told."""

import json
import os
import pwd
import re
import socket
from pathlib import Path

import pytest
from commands import run, run_badly, run_well
from fake_zeusd import FakeZeusd
from jsonschema import Draft202012Validator

from envpipe_megatron.gpu.backends import nvml
from envpipe_megatron.gpu.backends.nvml import NvmlGpu
from envpipe_megatron.gpu.base import GpuAddress
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.guard.lease import Lease
from envpipe_megatron.gpu.guard.lease_file import LeaseFolderError, lease_content, lease_name
from envpipe_megatron.gpu.guard.messages import ProcessIdentity
from envpipe_megatron.gpu.registry import open_gpu

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def node(own_node):
    """Of a user who may lock clocks."""
    return own_node(True)


def lock(node, *indices, mhz=1200):
    """Leave locks behind, and count changes from now on."""
    for index in indices:
        NvmlGpu(node.uuids[index]).lock_frequency(mhz)
    return len(node.changes())


def locked(node):
    return [index for index, uuid in enumerate(node.uuids) if node.locked_mhz(uuid)]


def leases():
    return list(Path(os.environ["ENVPIPE_LEASE_DIR"]).iterdir())


def dead_job_leaves(uuid, backend="nvml", job="job 7"):
    """A lease as a guard leaves it that was killed."""
    lease = Lease.take(GpuAddress(backend, uuid), job, rank=None, open_gpu=open_gpu)
    lease.close()
    return lease.path


# --- show ----------------------------------------------------------------------------------------


def test_show_lists_what_each_gpu_supports_and_changes_nothing(node):
    node.set_fault(node.uuids[1], "throttle_reasons", 0x4)
    shown = run_well("clocks", "show").stdout
    assert shown.index("GPU 0: NVIDIA A100") < shown.index("GPU 3: NVIDIA A100")
    for uuid in node.uuids:
        assert uuid in shown
    assert shown.count("210 to 1410 MHz in steps of 15 MHz, 81 clocks") == 4
    assert re.search(r"a profile lists \(MHz\) +│ 1410 1350 1290 ", shown)
    assert re.search(r"memory clocks \(MHz\) +│ 1215 ", shown)
    assert re.search(r"SM clock now +│ 1410 MHz ", shown)
    assert "W of at most 400 W" in shown
    assert shown.count("power cap") == 1
    assert node.changes() == []


def test_show_one_gpu_by_index_or_uuid(node):
    by_index = run_well("clocks", "show", "--gpu", 2).stdout
    assert node.uuids[2] in by_index
    assert "GPU 0" not in by_index
    assert "GPU 2" in run_well("clocks", "show", "--gpu", node.uuids[2]).stdout
    for wanted in (["--gpu", 4], ["--gpu", 0, "--gpu", 4]):
        message = run_badly("clocks", "show", *wanted)
        assert "no such GPU (got '4')" in message
    assert node.uuids[3] in message


def test_show_all_clocks(node):
    every = re.findall(r"\d+", run_well("clocks", "show", "--gpu", 0, "--all-clocks").stdout)
    assert {str(mhz) for mhz in range(210, 1411, 15)} <= set(every)


def test_uneven_steps_are_not_called_steps(fake_nvml_node):
    fake_nvml_node("v100").use_here()
    assert "in steps of 7 and 8 MHz" in run_well("clocks", "show").stdout


def test_a_gpu_that_cannot_be_read_does_not_hide_the_others(node):
    node.set_fault(node.uuids[1], "fail_after", 8)
    result = run("clocks", "show")
    assert result.exit_code == 1
    assert "GPU 3" in result.stdout
    assert "GPU 1" in result.stderr
    assert "could not be read" in result.stderr


def test_without_nvml_emulated_gpus_are_shown(node, tmp_path, monkeypatch):
    node.set_fault(None, "driver_not_loaded")
    assert "no NVIDIA driver is loaded" in run_badly("clocks", "show")
    monkeypatch.setenv("ENVPIPE_EMULATED_ROOT", str(tmp_path / "node"))
    assert "no GPU here" in run_badly("clocks", "show")
    EmulatedGpu.create("a100-sxm", 0, tmp_path / "node").lock_frequency(1200)
    shown = run_well("clocks", "show").stdout
    assert "(emulated)" in shown
    assert "1200 MHz asked for" in shown


def test_show_says_who_slows_which_gpu_for_people_and_for_machines(node, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("ENVPIPE_JOB_NAME", "[/] [7b] run")  # no markup of a table's
    monkeypatch.setenv("COLUMNS", "200")
    rank = ProcessIdentity.own()
    address = GpuAddress("zeusd", node.uuids[1])  # another back end, the same GPU
    lease = Lease.take(address, "slurm 4711", rank=rank, open_gpu=open_gpu, clocks_mhz=(1410, 750))
    dead_job_leaves(node.uuids[2])  # by `envpipe clocks reset`, which slows nothing
    document = json.loads(run_well("clocks", "show", "--json").stdout)
    schema = json.loads((ROOT / "docs/schemas/clocks.json").read_text())
    page = (ROOT / "docs/do/operators.md").read_text()
    shown = re.findall(r"clocks show --json.*\n(\{(?:\n .*)*\n\})\n", page)
    for fits in (document, *map(json.loads, shown)):
        Draft202012Validator(schema).validate(fits)
    assert len(shown) == 1
    marks = [gpu["slowed_by"] for gpu in document["gpus"]]
    assert marks[0] is marks[2] is marks[3] is None
    user = pwd.getpwuid(os.geteuid()).pw_name
    expected = {"user": user, "pid": os.getpid(), "host": socket.gethostname(), "live": True,
                "slurm_job_id": "4711", "highest_mhz": 1410, "lowest_mhz": 750}  # fmt: skip
    assert marks[1].items() >= expected.items()
    shown = " ".join(run_well("clocks", "show", "--gpu", 1).stdout.split())
    assert f"[/] [7b] run (job slurm 4711) of {user}, process {os.getpid()}, since " in shown
    assert "down to 750 MHz" in shown
    lease.close()
    assert "DEAD" in run_well("clocks", "show", "--gpu", 1).stdout
    node.set_fault(node.uuids[0], "fail_after", 8)
    Path(os.environ["ENVPIPE_LEASE_DIR"]).chmod(0o777)
    failed = run("clocks", "show", "--json")
    assert failed.exit_code == 1
    document = json.loads(failed.stdout)
    assert [gpu["index"] for gpu in document["gpus"]] == [1, 2, 3]
    assert "not sticky" in " ".join(document["errors"])


# --- reset ---------------------------------------------------------------------------------------


def test_reset_leaves_gpus_alone_that_cuda_does_not_show(node, monkeypatch):
    before = lock(node, 0, 1, 2, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"2,{node.uuids[0]}")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    run_well("clocks", "reset")
    assert locked(node) == [1, 3]
    assert {call.uuid for call in node.changes()[before:]} == {node.uuids[0], node.uuids[2]}


def test_unlike_gpus_are_all_reset_where_cuda_hides_none(fake_nvml_node):
    """Their order is CUDA's secret, and does not matter then."""
    node = fake_nvml_node("a100", "v100")
    node.use_here()
    lock(node, 0, 1)
    run_well("clocks", "reset")
    assert locked(node) == []


def test_an_epilogue_undoes_what_dead_jobs_left_and_nothing_else(node):
    lock(node, 0, 1, 2)  # GPU 0 is nobody's: its administrator may have locked it
    held = Lease.take(GpuAddress("nvml", node.uuids[1]), "live", rank=None, open_gpu=open_gpu)
    path = dead_job_leaves(node.uuids[2])
    lock(node, 1)
    shown = run_well("clocks", "reset", "--dead-jobs").stdout
    assert f"GPU 2 ({node.uuids[2]}): reset" in shown
    assert locked(node) == [0, 1]
    assert not path.exists()
    assert run_well("clocks", "reset", "--dead-jobs").stdout == "There is nothing to reset.\n"
    assert run("clocks", "reset", "--dead-jobs", "--gpu", "0").exit_code == 2
    held.release()


@pytest.mark.parametrize("fault", ["driver_not_loaded", "driver_mismatch"])
def test_an_epilogue_fails_without_a_driver_only_if_a_dead_job_left_a_lock(node, fault):
    """One script runs on all nodes, and SLURM drains those on which it fails."""
    path = dead_job_leaves(node.uuids[2])
    node.set_fault(None, fault)
    result = run("clocks", "reset", "--dead-jobs")
    assert f"{node.uuids[2]}: not reset: no back end" in result.stdout
    assert (result.exit_code, path.exists()) == (1, True)
    path.unlink()
    assert run_well("clocks", "reset", "--dead-jobs").stdout == "There is nothing to reset.\n"
    assert run("clocks", "reset").exit_code == 1


@pytest.mark.usefixtures("node", "sigchld_ignored")
def test_a_sites_command_that_fails_is_said_where_sigchld_is_ignored(tmp_path, monkeypatch):
    site = tmp_path / "site.toml"
    site.write_text(
        'format = "envpipe-site/1"\n[gpu_control]\nbackends = ["command"]\n'
        'lock_command = ["/bin/false", "{uuid}", "{mhz}"]\n'
        'reset_command = ["/bin/false", "{uuid}"]\n'
    )
    site.chmod(0o600)
    monkeypatch.setenv("ENVPIPE_SITE_CONFIG", str(site))
    result = run("clocks", "reset", "--gpu", "0")
    assert "not reset: The site's command for NVIDIA A100-SXM4-80GB failed" in result.stdout
    assert result.exit_code == 1


def test_an_epilogue_does_not_go_where_a_lease_of_another_user_says(node, tmp_path):
    """Nor does one of the same user's that nobody can undo hide what became of the others."""
    address = GpuAddress("emulated", f"{tmp_path}#no number")
    path = Path(os.environ["ENVPIPE_LEASE_DIR"], lease_name(address))
    lock(node, 2)
    dead_job_leaves(node.uuids[2])
    path.write_bytes(lease_content(address, "job 8", None, ()))
    result = run("clocks", "reset", "--dead-jobs")
    assert f"GPU 2 ({node.uuids[2]}): reset by nvml" in result.stdout
    assert f"{address.uid}: not reset: " in result.stdout
    assert (result.exit_code, locked(node), path.exists()) == (1, [], True)
    if os.geteuid() == 0:
        os.chown(path, 4711, -1)
        assert run_well("clocks", "reset", "--dead-jobs").stdout == "There is nothing to reset.\n"


def test_what_dead_jobs_left_is_undone_also_on_gpus_that_are_not_shown(node, monkeypatch):
    lock(node, 0, 3)
    paths = [dead_job_leaves(node.uuids[index]) for index in (0, 3)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", node.uuids[0])
    shown = run_well("clocks", "reset").stdout
    assert f"GPU 3 ({node.uuids[3]}): reset by nvml" in shown
    assert locked(node) == []
    assert not any(path.exists() for path in paths)


def test_a_lease_is_undone_by_its_own_back_end_where_that_is_allowed(node, tmp_path):
    zeusd = FakeZeusd(tmp_path / "zeusd.sock")
    zeusd.gpus = {bus_id: {"id": index} for index, bus_id in enumerate(node.pci_bus_ids)}
    dead_job_leaves(node.uuids[2], backend="zeusd")
    run_well("clocks", "reset")
    assert [values["gpu_ids"] for _, values in zeusd.changes] == ["2"]
    zeusd.stop()


def test_a_lease_of_a_back_end_that_is_not_allowed_here_is_undone_by_another(node):
    lock(node, 2)
    dead_job_leaves(node.uuids[2], backend="zeusd")
    assert "reset by nvml" in run_well("clocks", "reset").stdout
    assert locked(node) == []


def test_an_unsafe_folder_of_leases_keeps_no_clock_locked(node):
    lock(node, 0)
    dead_job_leaves(node.uuids[0])
    Path(os.environ["ENVPIPE_LEASE_DIR"]).chmod(0o777)
    result = run("clocks", "reset")
    assert result.exit_code == 1
    assert f"GPU 0 ({node.uuids[0]}): reset by nvml, without a lease: Others may" in result.stdout
    assert "not sticky" in result.stderr
    assert locked(node) == []


def test_no_room_for_a_lease_keeps_no_clock_locked_but_that_of_a_live_job(node, monkeypatch):
    lock(node, 0, 1, 2)
    dead_job_leaves(node.uuids[1])
    held = Lease.take(GpuAddress("nvml", node.uuids[0]), "job 9", rank=None, open_gpu=open_gpu)

    def no_room(*arguments, **more):
        raise LeaseFolderError("A lease cannot be written: No space left on device")

    monkeypatch.setattr(Lease, "take", no_room)
    result = run("clocks", "reset")
    assert result.exit_code == 1
    assert f"GPU 0 ({node.uuids[0]}): not reset: job job 9 holds it. Wait" in result.stdout
    for index in (1, 2):
        assert f"GPU {index} ({node.uuids[index]}): reset by nvml, without a lease" in result.stdout
    assert "A lease cannot be written: No space left" in result.stdout
    assert locked(node) == [0]
    monkeypatch.undo()
    held.release()


def test_a_user_without_rights_is_told_so_for_each_gpu(node, monkeypatch):
    before = lock(node, 0)
    monkeypatch.setattr(nvml, "has_sys_admin", lambda: False)
    result = run("clocks", "reset")
    assert result.exit_code == 1
    assert "CAP_SYS_ADMIN" in result.stdout
    assert len(node.changes()) == before


def test_emulated_gpus_are_reset_without_nvml(node, tmp_path, monkeypatch):
    node.set_fault(None, "driver_not_loaded")
    monkeypatch.setenv("ENVPIPE_EMULATED_ROOT", str(tmp_path / "node"))
    assert "nothing to reset" in run_well("clocks", "reset").stdout
    gpus = [EmulatedGpu.create("a100-sxm", index, tmp_path / "node") for index in (0, 1)]
    for gpu in gpus:
        gpu.lock_frequency(1200)
    run_well("clocks", "reset", "--gpu", 1)
    assert [gpu.requested_frequency_mhz for gpu in gpus] == [1200, None]
    run_well("clocks", "reset")
    assert gpus[0].requested_frequency_mhz is None
