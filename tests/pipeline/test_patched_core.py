"""The patch's hunk for schedules.py on the megatron-core that PyPI has, and training through it."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from envpipe_megatron.patching.catalog import load_catalog
from envpipe_megatron.patching.checkout import git_apply

SCHEDULES = "megatron/core/pipeline_parallel/schedules.py"


@pytest.fixture
def patched_core(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH: the installed megatron-core, linked, with one file patched."""
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or spec.origin is None:
        pytest.skip("megatron-core is not installed")
    installed = Path(spec.origin).parent
    root = tmp_path / "patched"
    core = root / "megatron" / "core"
    core.mkdir(parents=True)
    for entry in installed.iterdir():
        if entry.name == "pipeline_parallel":
            shutil.copytree(entry, core / entry.name)
        elif entry.name != "__pycache__":
            (core / entry.name).symlink_to(entry)
    (patch,) = (patch for patch in load_catalog() if patch.tag == "core_v0.16.1")
    target = root / SCHEDULES
    patched, reasons = git_apply(patch, {SCHEDULES: target.read_bytes()})
    assert reasons == {}
    target.write_bytes(patched[SCHEDULES])
    return root


def test_training_through_the_hook_gives_the_same_bits(patched_core: Path, tmp_path: Path) -> None:
    here = Path(__file__).parent
    beside = (here.parent / name for name in ("helpers", "megatron_lm"))
    imported_from = os.pathsep.join(map(str, (patched_core, here, *beside, here.parents[1])))
    ended = subprocess.run(
        [sys.executable, str(here / "patched_core_rank.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": imported_from, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    told = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for rank in told:
        assert rank["patched_file"] == str(patched_core / SCHEDULES)
        assert rank["losses"] == 3
        assert rank["losses_equal"]
        assert rank["weights_equal"]
        # One iteration was megatron-core's own, behind the hook; the others are EnvPipe's.
        assert len(rank["executed"]) == 2
