"""Which back end may change clocks: every reason for a no, and none of them found by trying."""

import os
import time

import pytest

from envpipe_megatron.gpu.backends import nvml
from envpipe_megatron.gpu.backends.command import CommandGpu
from envpipe_megatron.gpu.backends.nvml import NvmlGpu
from envpipe_megatron.gpu.backends.zeusd import ZeusdGpu
from envpipe_megatron.gpu.base import (
    DryRunGpu,
    GpuAddress,
    GpuNotSupportedError,
    GpuPermissionError,
    PowerState,
    ReadOnlyGpu,
)
from envpipe_megatron.gpu.control import (
    CHOICES,
    check_controls,
    choose_control,
    choose_for,
    open_controlled,
    reset_clocks,
)
from envpipe_megatron.gpu.registry import uid_of_cuda_device
from envpipe_megatron.gpu.site import SiteConfig


def test_a_plain_user_without_anything(machine):
    found = machine.look()
    assert list(found) == ["nvml", "zeusd", "command"]
    assert not any(check.backend for check in found.values())
    assert "CAP_SYS_ADMIN" in found["nvml"].why
    assert "no zeusd at" in found["zeusd"].why
    assert "no lock_command is set in " in found["command"].why
    nowhere = {check.wanted: check for check in check_controls(SiteConfig())}
    assert nowhere["command"].why == ("no lock_command is set (there is no site configuration)")


def test_the_forbid_variable_forbids_all_of_them(machine, monkeypatch):
    machine.set_sys_admin(True)
    machine.start_zeusd()
    machine.grant_command()
    monkeypatch.setenv("ENVPIPE_FORBID_CLOCK_CONTROL", "1")
    for check in machine.look().values():
        assert check.backend is None
        assert check.why == "ENVPIPE_FORBID_CLOCK_CONTROL is set"
    for name in ("dry_run", "emulated"):  # which drive no hardware
        assert choose_control(name, machine.site).backend == name
    assert choose_control("none", machine.site).warning is None
    warning = choose_control("auto", machine.site).warning
    assert warning.count("ENVPIPE_FORBID_CLOCK_CONTROL is set") == 1
    assert machine.zeusd.requests == []


def test_a_site_allows_some_and_orders_them(machine):
    machine.set_sys_admin(True)
    machine.start_zeusd()
    machine.fields["backends"] = ("zeusd", "command")
    found = machine.look()
    assert list(found) == ["zeusd", "command", "nvml"]
    assert found["nvml"].backend is None
    assert "site.toml does not allow" in found["nvml"].why
    assert choose_control("auto", machine.site).backend == "zeusd"


def test_a_site_that_names_no_back_end_of_ours_is_told_which_there_are(machine):
    machine.set_sys_admin(True)
    machine.fields["backends"] = ("magic", "nvml", "nvml")
    found = machine.look()
    assert list(found) == ["magic", "nvml", "zeusd", "command"]
    assert "Use one of nvml, zeusd, command" in found["magic"].remedy
    assert choose_control("auto", machine.site).backend == "nvml"
    machine.fields["backends"] = ("magic", "dry_run")
    why = choose_control("auto", machine.site).why
    assert "magic: unknown GPU back end; dry_run: back end dry_run does not say who may" in why


def test_no_other_gpu_is_asked_where_a_job_chooses(own_node):
    """Its driver may hang, or take a minute for each call."""
    node = own_node(True)
    uid = node.uuids[1]
    assert uid_of_cuda_device(uid.removeprefix("GPU-")) == uid
    chosen = choose_for(uid, "auto", one_clock=False)
    assert chosen.backend == "nvml"
    assert open_controlled(uid, chosen).device().index == 1
    assert {call.uuid for call in node.history()} == {"", uid}


def test_a_daemon_of_some_gpus_gives_these_back(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("ENVPIPE_LEASE_DIR", str(tmp_path / "leases"))
    machine.start_zeusd()
    own, other = machine.nvml.uuids[:2]
    del machine.zeusd.gpus[machine.nvml.pci_bus_ids[1]]
    assert choose_control("auto", machine.site, own).backend == "zeusd"
    addresses = [GpuAddress("nvml", uid) for uid in (own, other)]
    back, kept = reset_clocks(machine.site, addresses, dead_jobs=False)
    assert (back.done, back.what) == (True, "reset by zeusd")
    assert not kept.done
    assert "does not manage" in kept.what


def test_capabilities_of_a_rootless_container_mean_nothing(machine, monkeypatch):
    machine.set_sys_admin(True)
    monkeypatch.setattr(nvml, "in_user_namespace", lambda: True)
    assert "user namespace" in machine.look()["nvml"].why


@pytest.mark.parametrize("uid", [0, 1000])
def test_remedies_differ_for_a_containers_root_and_a_user(machine, monkeypatch, uid):
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    remedy = machine.look()["nvml"].remedy
    assert ("--cap-add SYS_ADMIN" in remedy) is (uid == 0)
    assert "zeusd" in remedy


def test_every_no_of_zeusd(machine, monkeypatch):
    def said():
        check = machine.look()["zeusd"]
        assert check.backend is None
        return check.why + " | " + check.remedy

    zeusd = machine.start_zeusd()
    where = f"zeusd at {zeusd.path}"
    zeusd.groups = ()
    assert said() == f"{where} offers nothing | Start zeusd with --enable gpu-control"
    zeusd.groups = ("gpu-read", "cpu-read")
    assert said() == f"{where} offers cpu-read, gpu-read | Start zeusd with --enable gpu-control"
    zeusd.groups = ("gpu-read", "gpu-control")
    zeusd.tokens = {"poor": ["gpu-read"], "good": ["gpu-control"]}
    assert "ZEUSD_TOKEN" in said()
    monkeypatch.setenv("ZEUSD_TOKEN", "poor")
    assert "not gpu-control" in said()
    monkeypatch.setenv("ZEUSD_TOKEN", "good")
    assert machine.look()["zeusd"].backend is not None
    zeusd.tokens_end_s = time.time() + 500.0
    assert "ends within 10 minutes" in said()
    zeusd.tokens_end_s = time.time() + 5000.0
    assert machine.look()["zeusd"].backend is not None
    for bus_id in machine.nvml.pci_bus_ids[1:3]:
        del zeusd.gpus[bus_id]
    missing = ", ".join(machine.nvml.pci_bus_ids[1:3])
    assert said().startswith(f"{where} does not manage {missing} | Have zeusd see all GPUs")
    zeusd.stop()
    zeusd.path.write_text("")
    assert "no zeusd at" in said()
    zeusd.path.unlink()


def test_every_no_of_the_command(machine):
    program = machine.grant_command()
    assert machine.look()["command"].backend is not None
    program.chmod(0o644)
    assert str(program) in machine.look()["command"].why
    program.unlink()
    assert "cannot run" in machine.look()["command"].why
    program.mkdir()
    assert "cannot run" in machine.look()["command"].why


def test_nothing_is_controlled_that_cannot_be_read(machine):
    machine.set_sys_admin(True)
    machine.start_zeusd()
    machine.nvml.set_fault(None, "driver_mismatch")
    for check in machine.look().values():
        assert check.backend is None
        assert "different versions" in check.why
        assert "reboot" in check.remedy


def test_a_machine_without_gpus(machine, monkeypatch):
    monkeypatch.setattr(NvmlGpu, "list_gpus", lambda: ())
    for check in machine.look().values():
        assert (check.why, check.remedy) == (
            "no driver lists a GPU",
            "Make GPUs visible to this process",
        )


def test_a_gpu_that_cannot_be_read_does_not_forbid_the_others(machine, monkeypatch):
    """A card for displays lists no clocks; the daemon need not manage it either."""
    machine.set_sys_admin(True)
    machine.start_zeusd()
    unreadable = set(machine.nvml.uuids[:1])
    del machine.zeusd.gpus[machine.nvml.pci_bus_ids[0]]

    def obstacle(gpu):
        if gpu.address.uid in unreadable:
            raise GpuNotSupportedError("lists no SM clocks", remedy="Use another")

    monkeypatch.setattr(NvmlGpu, "obstacle", obstacle)
    found = machine.look()
    assert found["nvml"].backend is not None
    assert found["zeusd"].backend is not None
    unreadable.update(machine.nvml.uuids)
    for check in machine.look().values():
        assert check.why == "lists no SM clocks"


@pytest.mark.parametrize(("fault", "said"), [("mig", "MIG"), ("vgpu", "virtual")])
def test_gpus_that_refuse_whoever_asks(machine, fault, said):
    machine.set_sys_admin(True)
    machine.start_zeusd()
    machine.nvml.set_fault(machine.nvml.uuids[2], fault)
    # Others of the node can be controlled, so this one does not forbid the back end ...
    assert machine.look()["nvml"].backend is not None
    for uuid in machine.nvml.uuids:
        machine.nvml.set_fault(uuid, fault)
    # ... unless it is so for all.
    for check in machine.look().values():
        if check.wanted != "command":
            assert check.backend is None
            assert said in check.why


@pytest.mark.parametrize(("fault", "said"), [("mig", "MIG"), ("vgpu", "virtual")])
def test_a_job_does_not_control_its_own_gpu_that_refuses_whoever_asks(machine, fault, said):
    """Nor one that lists no clocks, whose only one may be that of a GPU at rest."""
    machine.set_sys_admin(True)
    own, other = machine.nvml.uuids[:2]
    machine.nvml.set_fault(own, fault)
    refused = choose_control("auto", machine.site, own)
    assert refused.backend is None
    assert said in refused.why
    assert choose_control("auto", machine.site, other).backend == "nvml"


# --- choosing ------------------------------------------------------------------------------------


def test_auto_takes_the_first_that_is_allowed_and_says_why(machine):
    machine.start_zeusd()
    machine.grant_command()
    chosen = choose_control("auto", machine.site)
    assert chosen.backend == "zeusd"
    assert "first back end that is allowed" in chosen.why
    assert str(machine.zeusd.path) in chosen.why
    assert chosen.warning is None
    machine.set_sys_admin(True)
    assert choose_control("auto", machine.site).backend == "nvml"
    machine.set_sys_admin(False)
    machine.zeusd.stop()
    assert choose_control("auto", machine.site).backend == "command"
    machine.assert_untouched()


def test_none_allowed_is_one_warning_with_every_reason_and_remedy(machine):
    chosen = choose_control("auto", machine.site)
    assert chosen.backend is None
    for part in ("nvml: ", "zeusd: ", "command: ", "baseline clocks", "energy is measured"):
        assert part in chosen.warning
    assert len(chosen.remedy.split(". ")) == 3
    assert "\n" not in chosen.warning
    with pytest.raises(GpuPermissionError, match=r"required.*nvml: .*lock_command"):
        chosen.required()


def test_a_back_end_that_was_named_is_taken_or_none(machine):
    machine.set_sys_admin(True)
    chosen = choose_control("zeusd", machine.site)
    assert chosen.backend is None
    assert "no zeusd at" in chosen.warning
    assert "lock_command" not in chosen.warning
    with pytest.raises(GpuPermissionError):
        chosen.required()
    machine.start_zeusd()
    assert choose_control("zeusd", machine.site).required().backend == "zeusd"


@pytest.mark.parametrize("one_clock", [False, True])
def test_a_power_profile_goes_with_one_clock_only(machine, monkeypatch, one_clock):
    machine.set_sys_admin(True)
    enforced = PowerState(enforced_profiles=("max-Q",))
    monkeypatch.setattr(NvmlGpu, "power_state", lambda gpu: enforced)
    monkeypatch.delenv("ENVPIPE_SITE_CONFIG", raising=False)
    uuid = machine.nvml.uuids[0]
    chosen = choose_for(uuid, "auto", one_clock=one_clock)
    assert chosen.backend == ("nvml" if one_clock else None)
    assert ("max-Q" in chosen.why) is not one_clock
    machine.assert_untouched()


# --- opening -------------------------------------------------------------------------------------


def test_every_choice_opens_as_itself_and_changes_only_by_its_own_way(machine):
    machine.set_sys_admin(True)
    zeusd = machine.start_zeusd()
    machine.grant_command()
    uuid = machine.nvml.uuids[2]
    kinds = {
        "nvml": NvmlGpu,
        "zeusd": ZeusdGpu,
        "command": CommandGpu,
        "dry_run": DryRunGpu,
        "none": ReadOnlyGpu,
    }
    assert set(kinds) | {"auto", "emulated"} == set(CHOICES)
    for name, kind in kinds.items():
        gpu = open_controlled(uuid, choose_control(name, machine.site), machine.site)
        assert type(gpu) is kind
        assert (gpu.address.backend, gpu.address.uid) == (name, uuid)
        assert gpu.name == "NVIDIA A100-SXM4-80GB"
        assert gpu.power_w > 0
        assert (gpu.changes_clock, gpu.read_only) == (
            name not in ("dry_run", "none"),
            name == "none",
        )
        assert gpu.read_apart
        if name != "none":
            gpu.lock_frequency(1200)
            continue
        with pytest.raises(GpuPermissionError, match="reading only"):
            gpu.lock_frequency(1200)
        gpu.reset_frequency()
    commands = (machine.folder / "commands").read_text().splitlines()
    assert commands == [f"lock {uuid} 2 1200"]
    assert [values for _, values in zeusd.changes] == [
        {"gpu_ids": "2", "min_clock_mhz": "1200", "max_clock_mhz": "1200"}
    ]
    assert [(call.uuid, call.arguments) for call in machine.nvml.changes()] == [
        (uuid, (1200, 1200))
    ]


def test_the_sites_reset_range_reaches_the_back_ends(machine):
    machine.set_sys_admin(True)
    zeusd = machine.start_zeusd()
    machine.fields["reset_range_mhz"] = (300, 1400)
    for name in ("nvml", "zeusd"):
        chosen = choose_control(name, machine.site)
        open_controlled(machine.nvml.uuids[0], chosen, machine.site).reset_frequency()
    assert machine.nvml.locked_mhz(machine.nvml.uuids[0]) == (300, 1400)
    assert zeusd.changes[0][1] == {"gpu_ids": "0", "min_clock_mhz": "300", "max_clock_mhz": "1400"}


# --- what is read --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("effective", "has"),
    [("CapEff:\t0000000000200000\n", True), ("CapEff:\t000001ffffdfffff\n", False), ("", False)],
)
def test_the_effective_capability_counts(monkeypatch, effective, has):
    permitted = f"CapPrm:\t{0 if has else 2**21:016x}\n"
    monkeypatch.setattr(nvml.Path, "read_text", lambda _: permitted + effective)
    assert nvml.has_sys_admin() is has
