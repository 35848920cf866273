"""Looks for what torchrun needs on this node before anything is started: a script, and a port."""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import socket
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.launch.torchrun.options import MASTER_PORT


def look(args: argparse.Namespace) -> tuple[str, str]:
    """Return what was found of the script and of the rendezvous, a line of each.

    Nothing is imported, and no port is kept. Raises EnvPipeError if torchrun could not start
    its ranks, or not listen where others look for it.
    """
    return _script(args), _rendezvous(args)


def _script(args: argparse.Namespace) -> str:
    script: str = args.training_script
    if args.no_python and not args.run_path:
        kind, there = "program", shutil.which(script) is not None
        remedy = "Install it, or give its path; leave out --no-python for a Python script."
    elif args.module and not args.run_path:
        if "PYTHON_EXEC" in os.environ:
            return f"module {script}: not looked for, since PYTHON_EXEC names another Python"
        kind, there = "module", _is_importable(script.partition(".")[0])
        remedy = f"Install it, or start in its folder (not {Path.cwd()}); leave out -m for a file."
    else:
        kind, there = "script", script == "-" or Path(script).exists()
        remedy = f"Give its path as seen from {Path.cwd()}; a module needs -m before it."
    if not there:
        raise EnvPipeError(f"There is no such {kind} to run", value=script, remedy=remedy)
    return f"{kind} {script}: is there"


def _is_importable(package: str) -> bool:
    """Say whether Python's -m finds a top-level package here; it looks in this folder first."""
    try:
        here = PathFinder.find_spec(package, [str(Path.cwd()), *sys.path])
        return (here or find_spec(package)) is not None
    except ValueError:  # it is no name, or one without a file, as __main__
        return False


def _rendezvous(args: argparse.Namespace) -> str:
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    alone = args.nnodes.rpartition(":")[2] == "1"
    free = args.master_port is None and not args.rdzv_endpoint and alone
    if args.standalone or (args.rdzv_backend == "static" and free):
        return "rendezvous: torchrun takes a free port of this node"
    if args.rdzv_backend != "static":  # any node may have the port already, and be joined there
        return f"rendezvous: {args.rdzv_backend} at {args.rdzv_endpoint or 'its default'}"
    port = args.master_port or int(MASTER_PORT)
    host = args.master_addr
    if args.rdzv_endpoint:
        try:
            host, port = parse_rendezvous_endpoint(args.rdzv_endpoint, -1)
        except ValueError:
            port = -1
        if port < 0:
            raise EnvPipeError(
                "The endpoint of the rendezvous has no port",
                value=args.rdzv_endpoint,
                remedy="Write --rdzv-endpoint=HOST:PORT.",
            )
    if args.node_rank:
        return f"rendezvous: {host}, port {port}, where the node of rank 0 listens"
    with socket.socket() as probe:
        # As torchrun does: connections that were closed lately are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise EnvPipeError(
                    "Another program of this node listens at the port of the rendezvous",
                    value=port,
                    remedy="Give another --master-port (or MASTER_PORT), the same on all nodes; "
                    "one node alone needs none: --standalone.",
                ) from error
    return f"rendezvous: port {port} of this node is free"
