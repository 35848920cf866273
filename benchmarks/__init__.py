"""Everything measured: a room a subject, one command each; `all.py` runs those that need no GPU.

Run from the checkout: `python benchmarks/planner/compare.py` with the package installed from it
(`pip install -e`), else `python -m benchmarks.planner.compare`. What tests and benchmarks share
lies in tests/, whose folders are put on the path here.
"""

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1] / "tests"
_SHARED = ("helpers", "helpers/guards", "helpers/emulated_jobs", "pipeline", "megatron_lm")
sys.path[1:1] = [str(_TESTS / name) for name in _SHARED]
