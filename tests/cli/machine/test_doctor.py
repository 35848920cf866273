"""`envpipe doctor`: what it says of GPUs, rights, variables, and packages that end an importer."""

import json
import os
import subprocess
import sys

import pytest
from commands import run_well
from fake_zeusd import FakeZeusd

from envpipe_megatron.cli.machine import doctor
from envpipe_megatron.cli.machine.doctor import Check, answered
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.backends import nvml
from envpipe_megatron.gpu.base import GpuAddress
from envpipe_megatron.gpu.guard.lease import Lease
from envpipe_megatron.gpu.registry import open_gpu
from envpipe_megatron.integrations.levels import version_of

LOOK = """
import json, sys
from dataclasses import asdict
from envpipe_megatron.cli.machine import doctor
doctor._driver_cuda = lambda: json.loads(sys.argv[1])
doctor._LOOKS = [look for look in doctor._LOOKS if look[0] == "software"]
print(json.dumps({check.name: asdict(check) for check in doctor.all_checks()}))
loaded = {"torch", "megatron", "deepspeed"} & set(sys.modules)
assert not loaded, loaded
"""


class Packages:
    """A folder that is searched first, with packages that must not be imported."""

    def __init__(self, folder):
        self.folder = folder

    def add(self, name, files=(), distribution=None, version=None):
        package = self.folder / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("import os; os._exit(77)\n")
        for path, text in dict(files).items():
            (package / path).parent.mkdir(parents=True, exist_ok=True)
            (package / path).write_text(text)
        if distribution:
            self.distribution(distribution, version)
        return package

    def distribution(self, name, version):
        info = self.folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def look(self, driver_cuda=None):
        done = subprocess.run(
            [sys.executable, "-c", LOOK, json.dumps(driver_cuda)],
            env={**os.environ, "PYTHONPATH": str(self.folder)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def packages(tmp_path):
    return Packages(tmp_path)


def torch_of(cuda):
    return {"version.py": f"__version__ = '2.11.0'\ncuda: Optional[str] = {cuda!r}\n"}


def megatron_core(version):
    parts = zip(("MAJOR", "MINOR", "PATCH"), version, strict=True)
    text = "\n".join(f"{name} = {number}" for name, number in parts)
    return {"core/package_info.py": f"{text}\nPRE_RELEASE = ''\nVERSION = (MAJOR, MINOR)\n"}


def assert_check(check, ok, *said):
    assert check["ok"] is ok, check
    assert bool(check["remedy"]) is not ok, check
    for part in said:
        assert part in check["evidence"] + " | " + check["remedy"]


def test_good_packages(packages):
    packages.add("torch", torch_of("12.8"))
    packages.add("megatron", megatron_core((0, 19, 0)))
    packages.add("deepspeed", (), "deepspeed", "0.19.8")
    packages.distribution("cuda_bindings", "13.0.3")
    packages.distribution("nvidia_resiliency_ext", "0.4.1")
    found = packages.look((12, 4))  # a driver runs every CUDA of its major version
    assert_check(found["torch"], True, "2.11.0", "built for CUDA 12.8", "driver runs CUDA 12.4")
    assert_check(found["megatron-core"], True, "0.19.0")
    assert_check(found["DeepSpeed"], True, "0.19.8")
    assert_check(found["cuda-bindings"], True, "13.0.3")
    assert_check(found["watchers"], True, "nvidia-resiliency-ext 0.4.1", "docs/do/operators.md")


def test_packages_that_will_not_do(packages):
    packages.add("torch", torch_of("13.0"))
    packages.add("megatron", megatron_core((0, 15, 3)))
    found = packages.look((12, 4))
    assert_check(found["torch"], False, "driver runs CUDA 12.4", "newer driver")
    assert_check(found["megatron-core"], False, "0.15.3", "Megatron-LM core_v0.16.1, Megatron-LM c")
    if version_of("cuda-bindings") is None:  # CUDA builds of torch bring it
        assert_check(found["cuda-bindings"], False, "not installed", "kernels that wait slow units")


def test_broken_packages_are_a_no_and_stop_nothing(packages):
    packages.add("torch", {"version.py": "__version__ = ("})
    (packages.add("megatron") / "core").mkdir()
    (packages.folder / "megatron" / "core" / "package_info.py").write_bytes(b"\xff\xfe")
    found = packages.look()
    assert len(found) == 5
    for name in ("torch", "megatron-core"):
        assert_check(found[name], False, "could not be looked at: SyntaxError")


def test_a_torch_without_cuda(packages):
    packages.add("torch", torch_of(None))
    found = packages.look()
    assert_check(found["torch"], False, "without CUDA", "quickstart", "CUDA build")


@pytest.mark.parametrize(
    ("version", "ok"),
    [
        ("0.19.6", True),
        ("0.19.10+cu128", True),
        ("0.18.9", False),
        ("0.19.6rc1", False),
        ("0.20.0rc1", False),
    ],
)
def test_versions_of_deepspeed(monkeypatch, version, ok):
    monkeypatch.setattr(doctor, "version_of", lambda name: version)
    remedy = "DS_BUILD_OPS=0 pip install 'deepspeed>=0.19.6,<0.20'"
    assert doctor._deepspeed() == (ok, version, remedy)


@pytest.fixture
def node(own_node):
    """A machine with four A100s and no rights; asserts at the end that nothing was changed."""
    made = own_node(False)
    yield made
    assert made.changes() == []


def look():
    """The answers by name; exit code 0 and a remedy for each no and no other are required."""
    document = json.loads(run_well("doctor", "--json").stdout)
    assert document["format"] == "envpipe-doctor/1"
    for check in document["checks"]:
        assert bool(check["remedy"]) is not check["ok"], check
        assert check["evidence"], check
    found = {check["name"]: check for check in document["checks"]}
    assert len(found) == len(document["checks"])
    return found


def test_a_machine_whose_clocks_nobody_granted(node):
    found = look()
    assert_check(found["driver"], True, "driver 580.00.00-fake", "CUDA")
    assert_check(found["GPUs"], True, "4 x NVIDIA A100-SXM4-80GB")
    assert_check(found["supported clocks"], True, "210 to 1410 MHz", "81 clocks, on 4 GPUs")
    assert_check(found["energy counter"], True)
    for name in ("nvml", "zeusd", "command"):
        assert_check(found[f"back end {name}"], False)
    assert_check(found["auto"], False, "takes none")
    assert_check(found["site configuration"], True, "defaults hold")
    assert_check(found["ENVPIPE_FORBID_CLOCK_CONTROL unset"], True)
    assert_check(found["no leases of dead jobs"], True)
    assert_check(found["CUDA_VISIBLE_DEVICES"], True, f"0: {node.uuids[0]}")
    assert_check(found["CUDA_DEVICE_MAX_CONNECTIONS"], True)
    assert {"torch", "megatron-core", "cuda-bindings", "DeepSpeed"} <= set(found)


def test_which_back_end_auto_takes_and_why(node, monkeypatch, tmp_path):
    zeusd = FakeZeusd(tmp_path / "zeusd.sock")
    zeusd.gpus = {bus_id: {"id": index} for index, bus_id in enumerate(node.pci_bus_ids)}
    found = look()
    assert_check(found["back end zeusd"], True, "zeusd.sock")
    assert_check(found["auto"], True, "takes zeusd, the first back end that is allowed")
    monkeypatch.setattr(nvml, "has_sys_admin", lambda: True)
    assert_check(look()["auto"], True, "takes nvml")
    assert zeusd.changes == []
    zeusd.stop()


def test_the_forbid_variable(node, monkeypatch):
    monkeypatch.setenv("ENVPIPE_FORBID_CLOCK_CONTROL", "on")
    monkeypatch.setattr(nvml, "has_sys_admin", lambda: True)
    found = look()
    assert_check(found["ENVPIPE_FORBID_CLOCK_CONTROL unset"], False, "'on'", "Leave it")
    assert_check(found["back end nvml"], False, "ENVPIPE_FORBID_CLOCK_CONTROL is set")
    assert_check(found["auto"], False)


def test_what_differs_between_gpus_names_them(fake_nvml_node, node):
    assert_check(look()["default power"], True, "no power profile is enforced")
    profiled = fake_nvml_node("b200", "b200", "a100")
    with profiled.used_here():
        first, second, third = profiled.uuids
        profiled.set_fault(first, "requested_profiles", 1 << 1)
        assert_check(look()["default power"], True)
        profiled.set_fault(second, "requested_profiles", 1 << 1 | 1 << 7)
        profiled.set_fault(second, "enforced_profiles", 1 << 7)
        profiled.set_fault(third, "power_limit_w", 250)
        for uuid in (first, third):
            profiled.set_fault(uuid, "vgpu")
        found = look()
        said = (
            "GPU 1: LLM training enforced, max-Q, LLM training requested, power limit 1000 W",
            "GPU 2: no power profile enforced, power limit 250 W (400 W by default)",
        )
        assert_check(found["default power"], False, *said, "sets clocks too", "site config")
        said = (f"GPU {i}: Cannot lock the clock of a virtual GPU" for i in (0, 2))
        assert_check(found["no GPU refuses locks"], False, *said, "passed through")
        assert profiled.changes() == []


def test_a_driver_that_does_not_work_leaves_the_rest_to_see(node, monkeypatch):
    node.set_fault(None, "driver_mismatch")
    found = look()
    for name in ("driver", "GPUs", "supported clocks", "back end nvml", "CUDA_VISIBLE_DEVICES"):
        assert_check(found[name], False, "different versions", "reboot")
    assert_check(found["CUDA_DEVICE_MAX_CONNECTIONS"], True)
    monkeypatch.setenv("COLUMNS", "200")
    shown = run_well("doctor").stdout
    assert all(name.split()[0] in shown for name in found)
    # What to do about the driver is said once, however many a no it causes.
    assert shown.count("The driver was updated while it ran") == 1
    assert "As for driver" in shown


def test_one_cause_of_many_a_no_is_said_once(monkeypatch):
    lost, get = "Cannot read it: there is no library", "Install the driver"
    missing = [Check("software", name, False, "not installed", f"get {name}") for name in "ab"]
    checks = [Check("gpu", "driver", False, lost, get), Check("gpu", "GPUs", False, lost, get)]
    checks.append(Check("control", "back end zeusd", False, lost[0].lower() + lost[1:], get))
    checks += [Check("control", name, False, "too old", get) for name in ("leases", "tokens")]
    monkeypatch.setattr(doctor, "all_checks", lambda: checks + missing)
    monkeypatch.setenv("COLUMNS", "200")
    shown = run_well("doctor").stdout
    assert (shown.count("there is no library"), shown.count(get)) == (1, 1)
    assert (shown.count("As for driver"), shown.count("As for leases")) == (3, 1)
    # Two packages that are both missing have remedies of their own.
    assert (shown.count("not installed"), shown.count("get b")) == (2, 1)


def test_leases_of_live_and_dead_jobs(node):
    addresses = [GpuAddress("nvml", uuid) for uuid in node.uuids[:2]]
    live, dead = (
        Lease.take(address, job, rank=None, open_gpu=open_gpu)
        for address, job in zip(addresses, ("alive", "gone"), strict=True)
    )
    dead.close()
    evidence = look()["no leases of dead jobs"]
    assert_check(evidence, False, f"left: {node.uuids[1]} by job gone", "envpipe clocks reset")
    assert_check(evidence, False, f"held now: {node.uuids[0]} by job alive")
    live.release()


def test_a_wrong_site_configuration_is_named_and_the_rest_goes_on(node, monkeypatch, tmp_path):
    site = tmp_path / "site.toml"
    site.write_text('format = "envpipe-site/1"\n[gpu_control]\nbackend = []\n')
    site.chmod(0o644)
    monkeypatch.setenv("ENVPIPE_SITE_CONFIG", str(site))
    found = look()
    assert_check(found["site configuration"], False, str(site), "gpu_control: unknown field")
    assert "back end nvml" not in found
    assert_check(found["no leases of dead jobs"], True)
    site.write_text('format = "envpipe-site/1"\n[gpu_control]\nbackends = ["zeusd"]\n')
    found = look()
    assert_check(found["site configuration"], True, f"{site} allows zeusd")
    assert_check(found["back end nvml"], False, "does not allow it")


@pytest.mark.parametrize(
    ("value", "ok", "said"),
    [
        ("0,1", True, "'0,1'; CUDA numbers 0: GPU-"),
        ("0,7,1", False, "hides itself and all after it"),
        ("MIG-123", False, "MIG instance"),
    ],
)
def test_visible_devices(node, monkeypatch, value, ok, said):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert_check(look()["CUDA_VISIBLE_DEVICES"], ok, said)


def test_a_single_hardware_queue(node, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert_check(look()["CUDA_DEVICE_MAX_CONNECTIONS"], False, "single hardware queue", "set 8")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "4")  # as the channel takes it
    assert_check(look()["CUDA_DEVICE_MAX_CONNECTIONS"], False, "4: counts as a single", "set 8")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert_check(look()["CUDA_DEVICE_MAX_CONNECTIONS"], True, "32")


def test_any_failure_of_a_look_is_a_no():
    def fails(error):
        def look():
            raise error

        return answered("area", "name", look)

    named = fails(EnvPipeError("broken", remedy="mend it"))
    assert named == Check("area", "name", False, "broken", "mend it")
    assert "KeyError" in fails(KeyError("x")).evidence
    assert fails(EnvPipeError("broken")).remedy
    assert fails(OSError("x")).remedy
