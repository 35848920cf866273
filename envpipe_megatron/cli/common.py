"""Shared by the subcommands: options' types, errors as messages."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from envpipe_megatron.console import drop_output
from envpipe_megatron.core.fields import AMOUNT, Number, options_in
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.sidecar import sidecar_path
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.account import INTENSITY_VARIABLE, PRICE_VARIABLE


class _Output(click.Path):
    """A path to write to; refuses an empty one, as of a shell's variable that is not set, and -.

    And links that lead to each other, for which `Path.resolve` raises what is no OSError.
    """

    def convert(self, value: Any, *of: Any) -> Any:
        if str(value) in ("", "-"):
            self.fail(f"a path is wanted, and this is {value or 'empty'}", *of)
        try:
            Path(value).stat()
        except OSError as error:
            if error.errno == errno.ELOOP:
                self.fail(f"{value} leads in a circle of symbolic links", *of)
        return super().convert(value, *of)


EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
OUTPUT_FILE = _Output(dir_okay=False, path_type=Path)
OUTPUT_FOLDER = _Output(file_okay=False, path_type=Path)

PROFILE_OPTION = click.option(
    "--profile", "profile_path", type=EXISTING_FILE, required=True, help="Profile CSV."
)
PLAN_OPTION = click.option(
    "--plan", "plan_path", type=EXISTING_FILE, required=True, help="Plan JSON."
)
MICROBATCHES_OPTION = click.option(
    "--num-microbatches", type=click.IntRange(min=1), required=True,
    help="Microbatches of an iteration.",
)  # fmt: skip

TEXT_OPTION = click.option(
    "--text",
    type=click.Path(exists=True, path_type=Path),
    default=Path(sysconfig.get_path("stdlib")),
    help="File or folder to train on. Default: the Python standard library's sources.",
)

#: A file's format is named within its first bytes, this many.
_HEAD_BYTES = 1 << 16

#: A disk, a quota or a largest size of files is used up, or what is written to is broken.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

logger = logging.getLogger(__name__)


class ErrorsAsMessages(click.Group):
    """Prints EnvPipe's errors as one message, and exits 0 on success only."""

    def main(self, *args: Any, **named: Any) -> Any:
        """Run the command line; what it prints is written when this ends, or it fails."""
        code = 1
        for name in ("stdout", "stderr"):  # one that was closed, as by `>&-`, is None
            if getattr(sys, name) is None:
                setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - to the end
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="backslashreplace")  # names that its encoding lacks
        try:
            try:
                return super().main(*args, **named)
            finally:
                sys.stdout.flush()
        except EnvPipeError as error:
            message = str(error)
        except OSError as error:
            where = error.filename or "the output"
            if error.filename is None and error.errno == errno.ENOENT:
                where = "the working folder"  # a relative path was to be made absolute
            elif error.filename is None:
                if error.errno not in (*_FULL, errno.EPIPE):
                    raise
                drop_output(sys.stdout)  # or the interpreter's end tries again, and complains
                code = getattr(error.__context__, "code", None) or code  # of a job that failed
            remedy = "Check that its folder exists and is yours to write."
            if error.errno in _FULL:
                remedy = "Make room there, or write elsewhere."
            message = f"Cannot read or write {where}: {error.strerror}. {remedy}"
            if error.errno == errno.EPIPE:  # nobody reads on, which is no error
                sys.exit(code)
        with suppress(OSError):  # a terminal that is closed
            click.echo(f"Error: {message}", err=True)
        sys.exit(code)


class Numbers(click.ParamType):  # type: ignore[type-arg]  # generic in click's stubs only
    """One number, or several with commas between them; `words` are taken as they are."""

    def __init__(self, read: Callable[[str], float], *words: str) -> None:
        self.name = "|".join(("N[,N...]", *words))
        self._read, self._words = read, words

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Read the numbers."""
        if isinstance(value, tuple) or value in self._words:
            return value
        try:
            return tuple(self._read(part) for part in str(value).split(","))
        except ValueError as wrong:
            wanted = " or ".join((*self._words, f"{wrong}"))
            self.fail(f"{value!r} is not, once or for each stage, {wanted}", param, ctx)


COUNTS = Numbers(Number(whole=True, least=1, positive=True).of_text)


class Finite(click.FloatRange):
    """One number of a range, as NaN and infinity are not."""

    def __init__(self, number: Number = AMOUNT) -> None:
        least = number.least if number.positive and number.least else 0
        super().__init__(least, min_open=number.positive and not least)
        self._number = number

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Read the number."""
        try:
            return float(self._number.of_text(str(value)))
        except ValueError as wrong:
            self.fail(f"{value!r} is not {wrong}", param, ctx)


PRICE_OPTION = click.option(
    "--price",
    "price_per_kwh",
    type=Finite(),
    metavar="X",
    envvar=PRICE_VARIABLE,
    show_envvar=True,
    help="Price of a kWh, in a currency of your choice.",
)
INTENSITY_OPTION = click.option(
    "--grid-intensity",
    "grid_g_per_kwh",
    type=Finite(),
    metavar="G",
    envvar=INTENSITY_VARIABLE,
    show_envvar=True,
    help="Carbon intensity of the grid, in g CO2 per kWh.",
)


T = TypeVar("T")


def options_of(kind: type[Any], **defaults: str) -> Callable[[Callable[..., Any]], Any]:
    """Return what gives a command an option for each field that `core.fields.option` made.

    Only words have a default, the field's if the command has no other: options that are not given
    are None, which `taken` leaves out.
    """

    def decorated(command: Callable[..., Any]) -> Any:
        for name, option in reversed(options_in(kind).items()):
            flag = option.flag or re.sub("_[swj]$", "", name)
            named: dict[str, Any] = {"is_flag": True}
            match option.read:
                case Number(whole=True, positive=positive):
                    named = {"type": click.IntRange(min=int(positive))}
                case Number() as number:
                    named = {"type": Finite(number)}
                case tuple(words):
                    default = defaults.get(name, option.usual)
                    named = {"type": click.Choice(words), "default": default, "show_default": True}
            flag = f"--{flag.replace('_', '-')}"
            command = click.option(flag, name, help=option.help, **named)(command)
        return command

    return decorated


def taken(kind: type[T], options: dict[str, Any]) -> T:
    """Remove from options those that are named as fields of a dataclass, and make one of them."""
    names = [each.name for each in fields(kind) if each.name in options]  # type: ignore[arg-type]
    given = {name: options.pop(name) for name in names}
    return kind(**{name: value for name, value in given.items() if value is not None})


def check_outputs(
    written: Sequence[Path], read: Sequence[Path], beside: Mapping[Path, str] | None = None
) -> None:
    """Refuse, before any work is done, to write over an input, twice, or into no folder.

    Args:
        written: files that the user named.
        read: the inputs.
        beside: files that are written too and were not named, and the text that marks such a file:
            one without it is somebody else's.
    """
    beside = beside or {}
    targets = [path.resolve() for path in (*written, *beside)]
    if set(targets) & {path.resolve() for path in read} or len(set(targets)) < len(targets):
        raise EnvPipeError(
            "An output would overwrite an input or another output",
            value=[*written, *beside],
            remedy="These are written; give another --output.",
        )
    for path, mark in beside.items():
        if path.is_file() and mark.encode() not in path.read_bytes()[:_HEAD_BYTES]:
            raise EnvPipeError(
                f"{path} is written too, and what is there is from elsewhere",
                remedy="Give the output another name, or move that file.",
            )
    for target in targets:
        if not target.parent.is_dir():
            raise EnvPipeError(
                "There is no folder for an output", value=str(target), remedy="Make it first."
            )


def known_blocking_power(
    profile: Profile, given_w: float | tuple[float, ...] | None
) -> float | tuple[float, ...]:
    """Return the blocking power in W that was given, or the sidecar's, or 0 with a warning."""
    if given_w is not None:
        return given_w
    if profile.sidecar.blocking_power_w is not None:
        return profile.sidecar.blocking_power_w
    sidecar = sidecar_path(Path(profile.source))
    known, copied = "does not state it", ""
    if not sidecar.exists():
        known, copied = "is missing", ", or copy the profile's sidecar there"
    warn_of_free_waiting(f", for {sidecar} {known}", copied)
    return 0.0


def warn_of_free_waiting(why: str = "", remedy: str = "") -> None:
    """Say that no blocking power is known, where energies are computed with one of 0."""
    logger.warning(
        "No blocking power is known%s: waiting is taken to cost nothing, and energies are off. "
        "Give --blocking-power (an A100 SXM waits at 83.6 W, an A40 at 70.4 W)%s.",
        why,
        remedy,
    )


def write_stages(profile: Profile, blocking_power_w: float | None, path: Path) -> None:
    """Write a profile of stages, with the power of waiting in its sidecar if that is known."""
    sidecar = profile.sidecar
    if blocking_power_w is not None:
        stages = range(profile.num_stages)
        curves = tuple({max(profile.clocks_mhz(stage)): blocking_power_w} for stage in stages)
        sidecar = replace(sidecar, wait_power_w=curves)
    replace(profile, sidecar=sidecar).write(path)


def numbers(values: Iterable[float]) -> str:
    """Return numbers as a table's cell shows them."""
    return " ".join(f"{value:g}" for value in values)
