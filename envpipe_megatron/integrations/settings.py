"""Options of a job by name and value, as a configuration file or a call has them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import NoReturn

from envpipe_megatron.integrations.flags import FLAGS, add_arguments
from envpipe_megatron.integrations.options import OptionError, Options, read_options

#: EnvPipe's names of what has a longer one here.
_SHORT_NAMES = {"reconfig": "reconfigure"}
#: Frameworks whose options come by name have one level each.
_NOT_BY_NAME = ("level",)
#: What goes with some types only.
_OF_TYPE = ("scheduling", "reconfigure")
_FLAG = re.compile(r"--envpipe-([a-z-]*[a-z])")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(message)


def plain_names(settings: Mapping[str, object]) -> dict[str, object]:
    """The same settings by the one name that each has here; two names are an OptionError."""
    named: dict[str, object] = {}
    for given, value in settings.items():
        name = str(given).replace("-", "_")
        name = _SHORT_NAMES.get(name, name)
        if name in named:
            raise OptionError("An option is given twice", value=given, remedy="Give it once.")
        named[name] = value
    return named


def merged(block: Mapping[str, object], call: Mapping[str, object]) -> dict[str, object]:
    """Settings of a file, and those of a call, which go before them.

    A type in the call drops the file's order and reconfiguring, which may not go with it.
    """
    below, above = plain_names(block), plain_names(call)
    if above.get("type") is not None:
        below = {name: value for name, value in below.items() if name not in _OF_TYPE}
    return {**below, **above}


def read_settings(settings: Mapping[str, object], *, num_stages: int, on_gpu: bool) -> Options:
    """Make of settings what the same flags would be: {"type": "uniform"} is --envpipe-type uniform.

    Args:
        settings: option names without `--envpipe-`, with underscores or dashes; `reconfig` stands
            for `reconfigure`. Values are words, numbers, paths, truth values for flags without a
            value, lists for one number per stage; None is as if the name were not there.
        num_stages: p.
        on_gpu: whether memory can be measured.

    Raises OptionError, with the settings' names, as `read_options` does.
    """
    parser = _Parser(prog="envpipe", allow_abbrev=False, add_help=False)
    add_arguments(parser.add_argument_group())
    try:
        args = parser.parse_args(_words(plain_names(settings)))
        return read_options(args, num_stages=num_stages, on_gpu=on_gpu)
    except OptionError as error:
        raise OptionError(_FLAG.sub(lambda flag: flag[1].replace("-", "_"), str(error))) from None


def _words(settings: Mapping[str, object]) -> list[str]:
    """The settings as a command line."""
    takes_value = {
        name.replace("-", "_"): "action" not in flag
        for name, flag in FLAGS.items()
        if name not in _NOT_BY_NAME
    }
    words: list[str] = []
    for name, value in settings.items():
        if name not in takes_value:
            raise OptionError(
                "No such option of EnvPipe",
                value=name,
                remedy=f"There are {', '.join(sorted(takes_value))}.",
            )
        if value is None:
            continue
        if isinstance(value, bool) is takes_value[name]:
            kind = "a value" if takes_value[name] else "true or false"
            raise OptionError(f"The option {name} takes {kind}", value=value)
        flag = f"--envpipe-{name.replace('_', '-')}"
        if takes_value[name]:
            parts = value if isinstance(value, (list, tuple)) else [value]
            words.append(f"{flag}={','.join(str(part) for part in parts)}")
        elif value:
            words.append(flag)
    return words
