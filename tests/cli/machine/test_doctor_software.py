"""What doctor says of packages, against packages that end the process when they are imported."""

import json
import os
import subprocess
import sys

import pytest

from envpipe_megatron.cli.machine import doctor

LOOK = """
import json, sys
from dataclasses import asdict
from envpipe_megatron.cli.machine.doctor import software_checks
checks = software_checks(json.loads(sys.argv[1]))
print(json.dumps({check.name: asdict(check) for check in checks}))
loaded = {"torch", "megatron", "apex", "transformer_engine", "deepspeed", "zeus"} & set(sys.modules)
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
    packages.add("megatron", megatron_core((0, 19, 1)))
    packages.add(
        "apex",
        {"multi_tensor_apply/__init__.py": "", "normalization/__init__.py": ""},
        "apex",
        "0.1",
    )
    (packages.folder / "amp_C.py").write_text("import os; os._exit(77)\n")
    packages.add("transformer_engine", (), "transformer_engine", "2.8.0")
    packages.add("deepspeed", (), "deepspeed", "0.19.8")
    packages.add("zeus", (), "zeus", "0.16.0")
    packages.distribution("nvidia_ml_py", "13.580")
    packages.distribution("cuda_bindings", "13.0.3")
    found = packages.look((12, 4))  # a driver runs every CUDA of its major version
    assert_check(found["torch"], True, "2.11.0", "built for CUDA 12.8", "driver runs CUDA 12.4")
    assert_check(found["megatron-core"], True, "0.19.1")
    assert_check(found["NVIDIA Apex"], True, "0.1", "fused optimizers")
    assert "gradient accumulation" not in found["NVIDIA Apex"]["evidence"]
    assert_check(found["Transformer Engine"], True, "2.8.0")
    assert_check(found["DeepSpeed"], True, "0.19.8")
    assert_check(found["zeus"], True, "0.16.0")
    assert_check(found["nvidia-ml-py"], True, "13.580")
    assert_check(found["cuda-bindings"], True, "13.0.3")


def test_packages_that_will_not_do(packages):
    packages.add("torch", torch_of("13.0"))
    packages.add("megatron", megatron_core((0, 19, 0)))
    packages.add("apex", {"lib/__init__.py": ""}, "apex", "0.9.10.dev0")
    packages.distribution("pynvml", "11.5.3")
    packages.distribution("nvidia_ml_py", "13.580")
    found = packages.look((12, 4))
    assert_check(found["torch"], False, "driver runs CUDA 12.4", "newer driver")
    # The tag core_v0.19.0 calls itself 0.19.1; there is no patch for what calls itself 0.19.0.
    assert_check(found["megatron-core"], False, "0.19.0", "Megatron-LM core_v0.16.1, Megatron-LM c")
    assert_check(found["NVIDIA Apex"], False, "another package", "PyPI", "pip uninstall apex")
    assert_check(found["nvidia-ml-py"], False, "pynvml 11.5.3", "pip uninstall pynvml")
    assert_check(found["cuda-bindings"], False, "not installed", "kernels that wait slow units")
    # Each of those that are missing says whether it is needed at all.
    for name in ("Transformer Engine", "DeepSpeed", "zeus"):
        assert found[name]["ok"] or "eeded" in found[name]["remedy"]


def test_broken_packages_are_a_no_and_stop_nothing(packages):
    packages.add("torch", {"version.py": "__version__ = ("})
    (packages.add("megatron") / "core").mkdir()
    (packages.folder / "megatron" / "core" / "package_info.py").write_bytes(b"\xff\xfe")
    found = packages.look()
    assert len(found) == 8
    for name in ("torch", "megatron-core"):
        assert_check(found[name], False, "could not be looked at: SyntaxError")


def test_a_torch_without_cuda_and_a_pynvml_of_unknown_version(packages):
    packages.add("torch", torch_of(None))
    packages.distribution("pynvml", "dev")
    packages.distribution("nvidia_ml_py", "13.580")
    found = packages.look()
    assert_check(found["torch"], False, "without CUDA", "quickstart", "CUDA build")
    assert_check(found["nvidia-ml-py"], False, "pynvml dev", "pip uninstall pynvml")


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
