"""Imports go one way, and what plans or answers a command starts without torch."""

import ast
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
MOST_MODULES = 14  # about a dozen


def test_contracts_of_import_linter():
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as run; run()",
    ]
    done = subprocess.run(
        [*command, "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_core_gpu_and_commands_start_without_torch():
    program = """
import sys, importlib, pathlib, envpipe_megatron
outside = ("runtime", "integrations", "trials", "launch")
root = pathlib.Path(envpipe_megatron.__file__).parent
for path in sorted(root.rglob("*.py")):
    parts = path.relative_to(root).with_suffix("").parts
    if parts[0] not in outside and parts[-1] not in ("__init__", "__main__"):
        name = ".".join(("envpipe_megatron", *parts))
        importlib.import_module(name)
        print(name)
importlib.import_module("envpipe_megatron.trials.run")  # and with it all but the ranks' part
heavy = {"torch", "megatron", "deepspeed", "transformers"} & set(sys.modules)
if sys.modules["pynvml"].nvmlLib is not None:
    heavy.add("libnvidia-ml.so.1")
sys.exit(f"imported: {heavy}" if heavy else 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = set(done.stdout.split())
    for name in ("cli.plans.plan", "core.plan", "policies.planner", "gpu.emulated.emulated_gpu"):
        assert f"envpipe_megatron.{name}" in seen


def test_a_vendor_is_known_in_the_room_of_back_ends_only():
    """NVML is named elsewhere in examples of files only."""
    package = REPOSITORY / "envpipe_megatron"
    texts = {path.relative_to(package): path.read_text() for path in package.rglob("*.py")}
    of_nvml = {path for path, text in texts.items() if "nvml" in text.lower()}
    named = {"formats/energy.py", "formats/timeline.py"}
    assert {str(path) for path in of_nvml if path.parts[0] != "gpu"} == named
    for path, text in texts.items():
        if path.parts[:2] != ("gpu", "backends") and str(path) not in named:
            assert not re.search(r"pynvml|\bGPU-(?!seconds)", text), path


def test_no_folder_on_a_path_passes_for_a_package_that_may_be_missing():
    """Tests put these on sys.path; a folder is a package to Python, whatever is in it."""
    for parent in ("benchmarks", "benchmarks/planner", "benchmarks/megatron_lm", "launch", "tests"):
        folders = {path.name for path in (REPOSITORY / parent).iterdir() if path.is_dir()}
        assert not folders & {"deepspeed", "megatron", "torch", "transformers", "lowtime", "apex"}


def test_rooms_are_small_and_explained():
    """None holds more than a dozen modules, each says what it is for; the architecture has all."""
    page = (REPOSITORY / "docs" / "understand" / "architecture.md").read_text()
    crowded, unexplained = {}, []
    for top in ("envpipe_megatron", "benchmarks", "tests"):
        for room in {path.parent for path in (REPOSITORY / top).rglob("*.py")}:
            name = str(room.relative_to(REPOSITORY / top))
            count = sum(path.name != "__init__.py" for path in room.glob("*.py"))
            if count > MOST_MODULES:
                crowded[f"{top}/{name}"] = count
            if top == "envpipe_megatron" and name != ".":
                said = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
                if not said or not re.search(rf"^{name} ", page, re.MULTILINE):
                    unexplained.append(name)
    assert not crowded
    assert not unexplained
    named = set(re.findall(r"`([a-z_]+/[a-z_/]+\.py)", page))
    package = REPOSITORY / "envpipe_megatron"
    assert len(named) > 20
    places = (package, REPOSITORY)
    assert not [name for name in named if not any((place / name).is_file() for place in places)]
