"""Split backwards with the megatron-core of checkouts of Megatron-LM, in place of the own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkouts import TAGS, checkout_of
from on_request import on_request

from envpipe_megatron.patching import liveness

RANDOM_ORDERS = Path(__file__).parent / "test_random_orders.py"
#: What Megatron-LM imports unasked: Triton, and a decorator of Python 3.12.
STAND_INS = f"""
import runpy, typing
runpy.run_path({liveness.__file__!r})["StandIns"]({{"megatron"}})
if not hasattr(typing, "override"):
    import typing_extensions
    typing.override = typing_extensions.override
"""


@on_request("PIPELINE")
@pytest.mark.parametrize("tag", TAGS)
def test_at_tag(tag, tmp_path):
    checkout = checkout_of(tag)
    if checkout is None:
        pytest.skip(f"no checkout of {tag}: see checkouts.py")
    (tmp_path / "sitecustomize.py").write_text(STAND_INS)
    path = os.pathsep.join([str(tmp_path), str(checkout), os.environ.get("PYTHONPATH", "")])
    which = "features and not activations"
    if not tag.startswith("core_v"):  # main's multi-token prediction wants Transformer Engine
        which += " and not multi"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        # From 0.17 on, stock itself hangs on CPUs where activations are recomputed selectively.
        [*command, "-k", which, str(RANDOM_ORDERS)],
        env={**os.environ, "PYTHONPATH": path, "ENVPIPE_PIPELINE_FULL": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
