"""Split backwards with the megatron-core of checkouts of Megatron-LM, in place of the own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkouts import TAGS, checkout_of
from on_request import on_request

from envpipe_megatron.patching import probe

HERE = Path(__file__).parent
#: What Megatron-LM imports unasked: Triton, and a decorator of Python 3.12.
STAND_INS = f"""
import runpy, typing
runpy.run_path({probe.__file__!r})["StandIns"]({{"megatron"}})
if not hasattr(typing, "override"):
    import typing_extensions
    typing.override = typing_extensions.override
"""


@on_request("PIPELINE")
@pytest.mark.parametrize("file", ["test_split_features.py", "test_random_orders.py"])
@pytest.mark.parametrize("tag", TAGS)
def test_at_tag(tag, file, tmp_path):
    checkout = checkout_of(tag)
    if checkout is None:
        pytest.skip(f"no checkout of {tag}: see checkouts.py")
    (tmp_path / "sitecustomize.py").write_text(STAND_INS)
    path = os.pathsep.join([str(tmp_path), str(checkout), os.environ.get("PYTHONPATH", "")])
    all_of_it = "1" if "features" in file else "0"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file)],
        env={**os.environ, "PYTHONPATH": path, "ENVPIPE_PIPELINE_FULL": all_of_it},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
