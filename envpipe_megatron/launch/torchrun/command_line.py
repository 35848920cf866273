"""Reads a command line as torchrun does: torchrun's options with EnvPipe's among them, a script.

torchrun's own parser decides, so that every torchrun is read as it reads itself. Importing it takes
a second, for torch; so a line of EnvPipe's options alone, such as `--help`, does without.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from envpipe_megatron.errors import EnvPipeError

#: Starts torchrun. Without -P, Python would look for its modules in this folder first.
TORCHRUN = (sys.executable, "-P", "-m", "torch.distributed.run")
#: Stands for the script when options are read alone.
_SCRIPT = "SCRIPT"
_SEE_HELP = "See `envpipe launch --help` and `torchrun --help`."


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
    """What `--signals-to-handle` names: such a signal torchrun passes on to its ranks, and ends."""
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
