"""Runs a training script of Megatron-LM up to its first step, and measures layers there."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from envpipe_megatron.integrations.layer_profile.hooks import attach
from envpipe_megatron.search.layer_jobs import JOB_VARIABLE, LayerJob


def main() -> None:
    """Attach the hooks to what the script will import, and run it with its arguments."""
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    attach(LayerJob.of_text(os.environ[JOB_VARIABLE]))
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit(f"{sys.argv[0]} ended before it set up a model: its layers were not measured")


if __name__ == "__main__":
    main()
