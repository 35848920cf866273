"""Options of a job by name and value, as a configuration file or a call has them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

from envpipe_megatron.integrations.flags import FLAGS, add_arguments
from envpipe_megatron.integrations.options import OptionError, Options, read_options

#: EnvPipe's names of what has a longer one here.
_SHORT_NAMES = {"reconfig": "reconfigure"}
#: What goes with frameworks that have more than one level.
_OF_LEVELS = ("level", "self-check")
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


def read_settings(
    settings: Mapping[str, object], *, num_stages: int, on_gpu: bool, has_levels: bool = False
) -> Options:
    """Make of settings what the same flags would be: {"type": "uniform"} is --envpipe-type uniform.

    Args:
        settings: as `parse_settings` takes them.
        num_stages: p.
        on_gpu: whether memory can be measured.
        has_levels: whether the framework has more than one level.

    Raises OptionError, with the settings' names, as `read_options` does.
    """
    with named_as_settings():
        parsed = parse_settings(settings, has_levels=has_levels)
        return read_options(parsed, num_stages=num_stages, on_gpu=on_gpu)


def parse_settings(
    settings: Mapping[str, object], *, has_levels: bool = False
) -> argparse.Namespace:
    """Parse settings as the same flags would be; what goes with what is not looked at.

    Args:
        settings: option names without `--envpipe-`, with underscores or dashes; `reconfig` stands
            for `reconfigure`. Values are words, numbers, paths, truth values for flags without a
            value, lists for one number per stage; None is as if the name were not there.
        has_levels: whether the framework has more than one level.

    Raises OptionError, with the settings' names.
    """
    parser = _Parser(prog="envpipe", allow_abbrev=False, add_help=False)
    add_arguments(parser.add_argument_group())
    names = [name for name in FLAGS if has_levels or name not in _OF_LEVELS]
    with named_as_settings():
        return parser.parse_args(_words(plain_names(settings), names))


@contextmanager
def named_as_settings() -> Iterator[None]:
    """Within, an OptionError has the settings' names in place of the flags'."""
    try:
        yield
    except OptionError as error:
        raise OptionError(_FLAG.sub(lambda flag: flag[1].replace("-", "_"), str(error))) from None


def _words(settings: Mapping[str, object], names: Iterable[str]) -> list[str]:
    """The settings, of which there are those names, as a command line."""
    takes_value = {name.replace("-", "_"): "action" not in FLAGS[name] for name in names}
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
