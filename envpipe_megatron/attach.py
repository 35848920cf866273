"""Runs a training script of Megatron-LM with EnvPipe's hooks, where nobody may patch the checkout.

    torchrun --nproc-per-node 4 -m envpipe_megatron.attach pretrain_gpt.py ... --envpipe

The script finds its arguments, its folder in the path and `__main__` as without this module.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback
from pathlib import Path

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.patching.attach import attach, imported_checkout


def main() -> None:
    """Attach the hooks to what the script will import, and run it."""
    parser = argparse.ArgumentParser(
        prog="python -m envpipe_megatron.attach",
        description="Run a script of Megatron-LM with EnvPipe's hooks; no file is changed.",
        allow_abbrev=False,
    )
    parser.add_argument("--tag", help="take the patch for this tag, as for a fork")
    parser.add_argument("script", type=Path, help="such as pretrain_gpt.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    options = parser.parse_args()
    if not sys.flags.safe_path:  # else Python puts no folder there
        sys.path[0] = str(options.script.resolve().parent)
    sys.argv = [str(options.script), *options.arguments]
    where = ""
    try:
        checkout = imported_checkout(options.script)
        where = f"\nThe script would import it from {checkout}"
        attach(checkout, tag=options.tag)
    except EnvPipeError as error:
        sys.exit(f"Error: {error}{where}")
    # Before 3.13, Python itself shows lines of the files as they are stored.
    sys.excepthook = traceback.print_exception
    runpy.run_path(str(options.script), run_name="__main__")


if __name__ == "__main__":
    main()
