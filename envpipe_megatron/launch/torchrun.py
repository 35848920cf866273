"""torchrun on one node: reads its command line, checks what it needs, and runs it.

torchrun's own parser decides, so that every torchrun is read as it reads itself. Importing it takes
a second, for torch; so a line of EnvPipe's options alone, such as `--help`, does without.
`cli/jobs/launch.py` calls `split`, `look` and, through `launch/node.py`, `run_torchrun`.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from envpipe_megatron import child
from envpipe_megatron.child import TORCHRUN_MARK
from envpipe_megatron.console import say_as_launcher
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.launch.signals import Signals

logger = logging.getLogger(__name__)

#: Starts torchrun. Without -P, Python would look for its modules in this folder first.
TORCHRUN = (sys.executable, "-P", "-m", "torch.distributed.run")
#: torchrun's own default.
MASTER_PORT = "29500"
#: Stands for the script when options are read alone.
_SCRIPT = "SCRIPT"
_SEE_HELP = "See `envpipe launch --help` and `torchrun --help`."

#: Beyond what torchrun gives its ranks. While it waits at the end for nodes that were lost, it
#: handles no signal for minutes.
_PATIENCE_S = 10.0
#: A signal that another thread gets, or that comes just before the wait, does not end the wait.
_LOOK_S = 0.2
#: How long ranks may take to end after torchrun was killed, before they are killed too, where it
#: gives them no longer: they may be saving a checkpoint.
_RANKS_END_S = 15.0
#: Meanwhile they may have started others.
_LOOK_AGAIN_S = 0.1


@dataclass(frozen=True)
class CommandLine:
    """The parts of `[options] SCRIPT ARGS`.

    Attributes:
        own: EnvPipe's options; one with a value is a single word, `--name=value`.
        options: torchrun's options and their values, as they were given.
        script: the script and its arguments, untouched.
    """

    own: tuple[str, ...]
    options: tuple[str, ...]
    script: tuple[str, ...]


class TorchrunParser:
    """torchrun's own parser. EnvPipeError: torch is missing, or a flag's PET_ is no number."""

    def __init__(self) -> None:
        self._parser = _parser()
        defaults = vars(self._parser.parse_args([_SCRIPT]))
        #: Whether torchrun takes a free port by itself for a single node. torch 2.11 does not.
        self.picks_free_port = defaults["master_port"] is None
        # PET_ variables are defaults to torchrun; here they must not look as if they were given.
        self._parser.set_defaults(**dict.fromkeys(defaults))

    def takes_value(self, option: str) -> bool:
        """Return whether the word after an option is its value; refuse an unknown option."""
        try:
            _, unknown = self._parser.parse_known_args([option, _SCRIPT])
        except EnvPipeError:  # it took the script for its value, and none was left
            return True
        if unknown:
            raise EnvPipeError(
                "Neither envpipe launch nor torchrun knows the option",
                value=option,
                remedy=_SEE_HELP,
            )
        return False

    def given(self, options: Sequence[str]) -> dict[str, Any]:
        """Return options' values, under names like `nproc_per_node`, None if not given."""
        return vars(self._parser.parse_args([*options, _SCRIPT]))


def read(arguments: Sequence[str]) -> argparse.Namespace:
    """Return all options as torchrun reads them, its variables and defaults too, or refuse them."""
    return _parser().parse_args(arguments)


def ranks_of_node(options: argparse.Namespace) -> int:
    """The ranks that torchrun starts on a node: `--nproc-per-node`, or one for each GPU here."""
    if options.nproc_per_node.isdigit():
        return int(options.nproc_per_node)
    import torch

    return max(torch.cuda.device_count(), 1)


def handled_signals(arguments: Sequence[str]) -> set[signal.Signals]:
    """Return the signals of `--signals-to-handle`, which torchrun passes to its ranks, and ends."""
    names = {name.strip() for name in read(arguments).signals_to_handle.split(",")}
    never = {signal.SIGKILL, signal.SIGSTOP}
    return {number for number in signal.Signals if number.name in names} - never


def shutdown_s(arguments: Sequence[str]) -> int:
    """How long torchrun, with these arguments, gives its ranks from a signal to their end."""
    variable = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    # Older torchruns have no such option.
    given: int | None = getattr(read(arguments), "shutdown_timeout", None)
    try:
        return int(os.environ.get(variable, "30")) if given is None else given
    except ValueError as error:
        raise EnvPipeError(
            f"{variable} is not a whole number of seconds", value=os.environ[variable]
        ) from error


def split(words: Sequence[str], own: Mapping[str, bool]) -> CommandLine:
    """Split `[options] [--] SCRIPT ARGS`; the script is the first word that is no option.

    argparse alone cannot: it also looks among the script's arguments for options, and finds
    abbreviated or ambiguous ones there. `own` has EnvPipe's options, and whether each takes a
    value; they are never abbreviated, so torchrun's abbreviations stay what they were.

    Raises EnvPipeError if an option lacks its value, or is refused by torchrun.
    """
    rest = deque(words)
    own_words: list[str] = []
    options: list[str] = []
    parser: TorchrunParser | None = None
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.popleft()
        if word == "--":
            break
        name, assigns, _ = word.partition("=")
        if name in own:
            value = f"={_value(name, rest)}" if own[name] and not assigns else ""
            own_words.append(word + value)
            continue
        parser = parser or TorchrunParser()
        options.append(word)
        if parser.takes_value(word):
            options.append(_value(word, rest))
    if parser is not None:
        parser.given(options)
    return CommandLine(tuple(own_words), tuple(options), tuple(rest))


def _value(name: str, rest: deque[str]) -> str:
    if not rest or rest[0].startswith("--"):
        raise EnvPipeError(f"{name} needs a value", remedy=f"Write {name}=VALUE. {_SEE_HELP}")
    return rest.popleft()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise EnvPipeError(f"torchrun refuses its options: {message}", remedy=_SEE_HELP)


def _parser() -> _Parser:
    try:
        from torch.distributed.run import get_args_parser
    except ImportError as error:
        raise EnvPipeError(
            "torch, whose torchrun is started, cannot be imported",
            value=str(error),
            remedy="Install it into this Python: pip install 'torch>=2.11'.",
        ) from error
    try:
        return _Parser(prog="torchrun", parents=[get_args_parser()], add_help=False)
    except ValueError as error:
        raise EnvPipeError(
            "A PET_ variable of one of torchrun's flags, such as PET_STANDALONE, is not 0 or 1",
            value=str(error),
            remedy="Unset it, or make it 0 or 1.",
        ) from error


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


def run_torchrun(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    signals: Signals,
) -> int:
    """Run torchrun to its end; return its exit status, 128 plus the signal if it was killed.

    The first signal is passed on and ends it with its ranks; a second one, or 10 s more than its
    `--shutdown-timeout`, kills it. On Linux the death of this process ends it, too. Ranks that
    outlive a torchrun that was signalled or killed are ended here: one that is interrupted while it
    starts them leaves them behind.

    Args:
        arguments: torchrun's options, the script and its arguments.
        environment: added to this process's.
        signals: to this process.
    """
    mark, ranks_s = uuid.uuid4().hex, shutdown_s(arguments)
    process = subprocess.Popen(
        [sys.executable, "-P", child.__file__, str(os.getpid()), *TORCHRUN, *arguments],
        env={**os.environ, **environment, TORCHRUN_MARK: mark},
        stdin=subprocess.DEVNULL if signals.until_stdin_ends else None,
        start_new_session=True,  # a terminal's Ctrl-C comes here alone, and is passed on once
    )
    patience = threading.Timer(ranks_s + _PATIENCE_S, process.kill)
    asked = False

    def end() -> None:
        nonlocal asked
        asked = True
        process.send_signal(signals.to_pass_on)
        patience.start()
        say_as_launcher("ending the ranks (once more: kill them)")

    signals.call(end, process.kill)
    code = None
    while code is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(_LOOK_S)
    patience.cancel()
    if asked or code < 0:
        _end_marked(mark, max(_RANKS_END_S, ranks_s))
    return code if code >= 0 else 128 - code


def _end_marked(mark: str, grace_s: float) -> None:
    """End what a killed torchrun has started, by SIGTERM and then, after the grace, by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        end_s = time.monotonic() + grace_s
        signalled: set[int] = set()
        while left := _marked(mark):
            for pid in left:
                if pid not in signalled:
                    signalled.add(pid)
                    logger.warning("Process %d has outlived torchrun: %s", pid, number.name)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            if time.monotonic() >= end_s:
                break
            time.sleep(_LOOK_AGAIN_S)


def _marked(mark: str) -> list[int]:
    """Processes of this machine that have the mark from their parents; none without /proc."""
    entry = f"{TORCHRUN_MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
