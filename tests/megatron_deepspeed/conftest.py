import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkouts import DEEPSPEED_VARIABLE
from mds_runs import HERE, missing

from envpipe_megatron.patching.checkout import apply_patch


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the stock checkout; skips where it cannot be run."""
    given = os.environ.get(DEEPSPEED_VARIABLE)
    if not given:
        pytest.skip(f"{DEEPSPEED_VARIABLE} names no checkout of Megatron-DeepSpeed")
    if lacking := missing():
        pytest.skip(f"Megatron-DeepSpeed needs what is not installed: {', '.join(lacking)}")
    copy = tmp_path_factory.mktemp("checkouts") / "stock"
    shutil.copytree(given, copy, ignore=shutil.ignore_patterns(".git", "__pycache__", "*.so"))
    return copy


@pytest.fixture(scope="session")
def patched(stock: Path) -> Path:
    """A patched copy of it."""
    copy = stock.with_name("patched")
    shutil.copytree(stock, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    apply_patch(copy)
    return copy


@pytest.fixture(scope="session")
def data(stock: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data to train on."""
    folder = tmp_path_factory.mktemp("data")
    subprocess.run(
        [sys.executable, str(HERE / "mds_data.py"), str(folder)],
        check=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(stock), os.environ.get("PYTHONPATH", "")]),
            "DS_ACCELERATOR": "cpu",
        },
    )
    return folder
