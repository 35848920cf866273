"""The rules of an administrator, or of a user for a node, for controlling clocks there.

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
    allow_power_profiles = false          # a clock for each unit beside an enforced power profile

The file names commands that are run. So a file that a group or everybody may write is refused, as
sudo refuses its own, and root refuses one that belongs to another user.
"""

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from envpipe_megatron.core.fields import parse_toml
from envpipe_megatron.gpu.base import GpuError

SITE_VARIABLE = "ENVPIPE_SITE_CONFIG"
DEFAULT_SITE_PATH = Path("/etc/envpipe/site.toml")
_FORMAT = "envpipe-site/1"
_OVERFLOW_UID = 65534
PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class SiteConfig:
    """A site's rules for changing clocks, and the file that they come from.

    `backends` is None where all are allowed, in their own order. `reset_range_mhz` is the lowest
    and highest clock that a reset leaves, None for the driver's default; a site's `reset_command`
    has its own meaning. The module says the other fields.
    """

    path: Path | None = None
    backends: tuple[str, ...] | None = None
    zeusd_socket: Path | None = None
    lock_command: tuple[str, ...] = ()
    reset_command: tuple[str, ...] = ()
    command_time_limit_s: float = 10.0
    reset_range_mhz: tuple[int, int] | None = None
    allow_power_profiles: bool = False


def read_site() -> SiteConfig:
    """Return this machine's site configuration, the defaults if there is no file.

    Raises GpuError if the file is unsafe, unreadable or wrong, or `ENVPIPE_SITE_CONFIG` names
    one that is missing.
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
    """Return the site configuration in a file; GpuError if it is unsafe, unreadable or wrong."""
    try:
        with path.open("rb") as file:
            _refuse_unsafe(path, os.fstat(file.fileno()))
            return _parse(path, file.read())
    except OSError as error:
        raise GpuError(
            f"The site configuration cannot be read: {error.strerror}",
            value=str(path),
            remedy=f"Correct {SITE_VARIABLE}, or make the file readable",
        ) from error


def _refuse_unsafe(path: Path, status: os.stat_result) -> None:
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise GpuError(
            f"Others than its owner may write the site configuration {path}, which names commands",
            value=stat.filemode(status.st_mode),
            remedy=f"chmod go-w {path}",
        )
    if os.geteuid() == 0 and not is_of_root(status):
        raise GpuError(
            f"The site configuration {path} belongs to another user than root, who runs this",
            value=status.st_uid,
            remedy=f"chown root {path}",
        )


def is_of_root(status: os.stat_result) -> bool:
    """Return whether a file is root's: in a user namespace it shows as the overflow user's."""
    return status.st_uid == 0 or (status.st_uid == _OVERFLOW_UID and in_user_namespace())


def in_user_namespace() -> bool:
    """Return whether this process's users are not all of the machine's, as in rootless containers.

    Its capabilities then mean nothing to the driver.
    """
    try:
        return Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]
    except OSError:
        return False


def _parse(path: Path, content: bytes) -> SiteConfig:
    document = parse_toml(content, path, _FORMAT, GpuError)
    for unknown in document.data.keys() - {"gpu_control"}:
        raise GpuError(f"{path}: unknown field", value=unknown, remedy="Known: gpu_control.")
    if "gpu_control" not in document.data:
        return SiteConfig(path)
    table = document.inside("gpu_control")
    site = table.make_typed(SiteConfig, path=path)
    for field, problem in _problems(site):
        raise table.wrong(field, f"It {problem}.")
    return site


def _problems(site: SiteConfig) -> Iterator[tuple[str, str]]:
    """List what is wrong with values of the right type: field and problem."""
    if site.command_time_limit_s == 0:
        yield "command_time_limit_s", "must be above 0 s"
    if site.reset_range_mhz and site.reset_range_mhz[0] > site.reset_range_mhz[1]:
        yield "reset_range_mhz", "must be [lowest, highest] in MHz"
    for field, other, known in (
        ("lock_command", site.reset_command, {"uuid", "index", "mhz"}),
        ("reset_command", site.lock_command, {"uuid", "index"}),
    ):
        command = getattr(site, field)
        if command:
            yield from ((field, problem) for problem in _problems_of_command(command, known))
        elif other:
            yield field, "is missing: give lock_command and reset_command, or neither"


def _problems_of_command(argv: tuple[str, ...], known: set[str]) -> Iterator[str]:
    if not argv[0].startswith("/") or "{" in argv[0]:
        yield "must begin with the absolute path of a program"
    if any("\0" in argument for argument in argv):
        yield "must not hold NUL characters"
    used = {name for argument in argv for name in PLACEHOLDER.findall(argument)}
    rest = "".join(PLACEHOLDER.sub("", argument) for argument in argv)
    if not used <= known or "{" in rest or "}" in rest:
        shown = ", ".join(f"{{{name}}}" for name in sorted(known))
        yield f"may hold no braces but those of {shown}"
    # Without the GPU it would act on GPUs of other jobs too.
    if not used & {"uuid", "index"}:
        yield "must name the GPU by {uuid} or {index}"
    if "mhz" in known - used:
        yield "must name the clock by {mhz}"
