"""What an administrator, or a user for a node, says about controlling clocks there.

A TOML file, `ENVPIPE_SITE_CONFIG` or `/etc/envpipe/site.toml`; without one the defaults hold. All
fields but `format` are optional:

    format = "envpipe-site/1"

    [gpu_control]
    backends = ["zeusd", "command"]       # allowed here, in the order in which `auto` tries them
    zeusd_socket = "/run/zeusd/zeusd.sock"
    lock_command = ["/usr/bin/sudo", "-n", "/usr/local/sbin/gpu-clock", "lock", "{uuid}", "{mhz}"]
    reset_command = ["/usr/bin/sudo", "-n", "/usr/local/sbin/gpu-clock", "reset", "{uuid}"]
    command_time_limit_s = 10
    reset_range_mhz = [210, 1410]         # what a reset means here, instead of the driver's default

The file names commands that are run, so whoever can write it decides what they are: a file that
everybody may write is refused, and by root one that belongs to another user.
"""

import math
import os
import re
import stat
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envpipe_megatron.files import decode
from envpipe_megatron.gpu.base import GpuError

SITE_VARIABLE = "ENVPIPE_SITE_CONFIG"
DEFAULT_SITE_PATH = Path("/etc/envpipe/site.toml")
FORMAT = "envpipe-site/1"
HARDWARE_BACKENDS = ("nvml", "zeusd", "command")
"""The back ends that change real clocks, in the order in which `auto` tries them by default."""

PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


class SiteConfigError(GpuError):
    """The site configuration cannot be used; the message names file and field."""


@dataclass(frozen=True, slots=True)
class SiteConfig:
    """A site's rules for changing clocks.

    Attributes:
        path: the file they come from, None where there is none.
        backends: back ends that are allowed here, in the order in which `auto` tries them.
        zeusd_socket: the Unix socket of zeusd, None for Zeus's own default.
        lock_command: argv with `{mhz}` and `{uuid}` or `{index}`; empty where the site has none.
        reset_command: argv with `{uuid}` or `{index}`; empty where the site has none.
        command_time_limit_s: how long one run of a command may take, s.
        reset_range_mhz: lowest and highest SM clock in MHz that a reset leaves, None for the
            driver's default. A site's `reset_command` has its own meaning.
    """

    path: Path | None = None
    backends: tuple[str, ...] = HARDWARE_BACKENDS
    zeusd_socket: Path | None = None
    lock_command: tuple[str, ...] = ()
    reset_command: tuple[str, ...] = ()
    command_time_limit_s: float = 10.0
    reset_range_mhz: tuple[int, int] | None = None


def read_site() -> SiteConfig:
    """Return this machine's site configuration, the defaults where there is no file.

    Raises:
        SiteConfigError: the file is unsafe, unreadable or wrong, or `ENVPIPE_SITE_CONFIG` names one
            that is missing.
    """
    given = os.environ.get(SITE_VARIABLE)
    if given:
        return read_site_file(Path(given).absolute())
    try:
        DEFAULT_SITE_PATH.stat()
    except (FileNotFoundError, NotADirectoryError):
        return SiteConfig()
    except OSError:
        pass  # it is there, and what it forbids must not be missed: reading says what is wrong
    return read_site_file(DEFAULT_SITE_PATH)


def read_site_file(path: Path) -> SiteConfig:
    """Return the site configuration in a file.

    Raises:
        SiteConfigError: the file is unsafe, missing, unreadable or wrong.
    """
    try:
        with path.open("rb") as file:
            _refuse_unsafe(path, os.fstat(file.fileno()))
            document = tomllib.loads(decode(file.read()))
    except OSError as error:
        raise SiteConfigError(
            f"The site configuration cannot be read: {error.strerror}",
            value=str(path),
            remedy=f"Correct {SITE_VARIABLE}, or make the file readable",
        ) from error
    except ValueError as error:
        raise SiteConfigError(f"The site configuration {path} is not TOML: {error}") from error
    return _parse(path, document)


def _refuse_unsafe(path: Path, status: os.stat_result) -> None:
    if status.st_mode & stat.S_IWOTH:
        raise SiteConfigError(
            f"Everybody may write the site configuration {path}, which names commands to run",
            value=stat.filemode(status.st_mode),
            remedy=f"chmod o-w {path}",
        )
    if os.geteuid() == 0 and status.st_uid != 0 and not _foreign_root(status.st_uid):
        raise SiteConfigError(
            f"The site configuration {path} belongs to another user than root, who runs this",
            value=status.st_uid,
            remedy=f"chown root {path}",
        )


def _foreign_root(uid: int) -> bool:
    """Whether a file's owner is unknown here because this root is one of a user namespace.

    The real root's files show there as the overflow user's.
    """
    return uid == 65534 and in_user_namespace()


def in_user_namespace() -> bool:
    """Whether this process's users are not all of the machine's: rootless containers and the like.

    Its capabilities then mean nothing to the driver.
    """
    try:
        return Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]
    except OSError:
        return False


def _parse(path: Path, document: dict[str, object]) -> SiteConfig:
    written = document.pop("format", None)
    if written != FORMAT:
        raise SiteConfigError(f"{path}: 'format' must be {FORMAT!r}", value=written)
    table = document.pop("gpu_control", {})
    if not isinstance(table, dict):
        raise SiteConfigError(f"{path}: 'gpu_control' must be a table", value=table)
    for unknown in [*document, *(f"gpu_control.{field}" for field in table if field not in _READ)]:
        raise SiteConfigError(
            f"{path}: unknown field '{unknown}'",
            remedy=f"Known in [gpu_control]: {', '.join(_READ)}",
        )
    values: dict[str, Any] = {}
    for field, value in table.items():
        try:
            values[field] = _READ[field](value)
        except ValueError as error:
            raise SiteConfigError(f"{path}: 'gpu_control.{field}' {error}", value=value) from None
    site = SiteConfig(path=path, **values)
    if bool(site.lock_command) != bool(site.reset_command):
        missing = "reset_command" if site.lock_command else "lock_command"
        raise SiteConfigError(
            f"{path}: 'gpu_control.{missing}' is missing",
            remedy="Give lock_command and reset_command, or neither",
        )
    return site


def _backends(value: object) -> tuple[str, ...]:
    names = _strings(value)
    if not set(names) <= set(HARDWARE_BACKENDS) or len(set(names)) < len(names):
        raise ValueError(f"must hold some of {', '.join(HARDWARE_BACKENDS)}, each once")
    return names


def _absolute_path(value: object) -> Path:
    if not isinstance(value, str) or not value.startswith("/"):
        raise ValueError("must be an absolute path")
    return Path(value)


def _command(needs_mhz: bool) -> Callable[[object], tuple[str, ...]]:
    def read(value: object) -> tuple[str, ...]:
        argv = _strings(value)
        if not argv or not argv[0].startswith("/") or "{" in argv[0]:
            raise ValueError("must begin with the absolute path of a program")
        if any("\0" in argument for argument in argv):
            raise ValueError("must not hold NUL characters")
        used = {name for argument in argv for name in PLACEHOLDER.findall(argument)}
        known = ("uuid", "index", "mhz") if needs_mhz else ("uuid", "index")
        rest = "".join(PLACEHOLDER.sub("", argument) for argument in argv)
        if not used <= set(known) or "{" in rest or "}" in rest:
            shown = ", ".join(f"{{{name}}}" for name in known)
            raise ValueError(f"may hold no braces but those of {shown}")
        # Without the GPU it would act on GPUs of other jobs too.
        if not used & {"uuid", "index"}:
            raise ValueError("must name the GPU by {uuid} or {index}")
        if needs_mhz and "mhz" not in used:
            raise ValueError("must name the clock by {mhz}")
        return argv

    return read


def _positive_s(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number of s")
    if not (math.isfinite(value) and value > 0):
        raise ValueError("must be above 0 s")
    return float(value)


def _range_mhz(value: object) -> tuple[int, int]:
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(type(clock) is int for clock in value)
        and 0 < value[0] <= value[1]
    ):
        return value[0], value[1]
    raise ValueError("must be [lowest, highest] in MHz")


def _strings(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError("must be a list of strings")
    return tuple(value)


_READ: dict[str, Callable[[object], object]] = {
    "backends": _backends,
    "zeusd_socket": _absolute_path,
    "lock_command": _command(needs_mhz=True),
    "reset_command": _command(needs_mhz=False),
    "command_time_limit_s": _positive_s,
    "reset_range_mhz": _range_mhz,
}
