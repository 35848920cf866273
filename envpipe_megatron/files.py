"""Reads files as UTF-8, replaces them whole, and never writes over another's."""

from __future__ import annotations

import csv
import errno
import io
import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

from envpipe_megatron.errors import EnvPipeError

T = TypeVar("T")

#: No two drafts of a process have one name.
_NUMBERS = itertools.count()
#: What reading a line of JSON Lines that is torn, or something else, may raise.
TORN = (
    ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, EnvPipeError
)  # fmt: skip
#: What names a job to its restarts.
_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID")
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def decode(content: bytes) -> str:
    """Return the text of a file's bytes, without a byte order mark; ValueError if not UTF-8."""
    if content.startswith(_UTF_16):
        raise ValueError("it is UTF-16; save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} is not UTF-8; save it as UTF-8 text") from error


def shipped_folder(name: str) -> Path:
    """Return a folder of files that come with the package: in it, or else in the checkout."""
    package = Path(__file__).resolve().parent
    installed = package / name
    return installed if installed.is_dir() else package.parent / name


def read_text(path: Path) -> str:
    """Return a file's text as `decode` does; OSError if it cannot be read."""
    return decode(path.read_bytes())


def read_lines(
    paths: Iterable[Path], parse: Callable[[bytes], T]
) -> tuple[tuple[T, ...], tuple[str, ...]]:
    """Return what each line of files says, and those that are torn or foreign as `file:line`.

    Args:
        parse: reads a line, which need not be text; one of `TORN` if it is torn or foreign.
    """
    read: list[T] = []
    unreadable: list[str] = []
    for path in paths:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    if line.strip():
                        read.append(parse(line))
                except TORN:
                    unreadable.append(f"{path}:{number}")
    return tuple(read), tuple(unreadable)


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Return the text of a CSV, its header among the rows."""
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows(rows)
    return table.getvalue()


def replace_files(contents: Mapping[Path, bytes | Iterable[str]]) -> None:
    """Write files, texts in parts; a failure or a kill leaves each as it was, or new and whole.

    All are written beside their places before the last takes its own, and then the others. OSError
    names the file.
    """
    with ExitStack() as drafts:
        for path, content in contents.items():
            draft = drafts.enter_context(written_beside(path))
            if isinstance(content, bytes):
                draft.write_bytes(content)
                continue
            # Names of files may hold bytes that are no UTF-8.
            with draft.open("w", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(content)


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Give another path to write to, which takes the place of `path` when all was written.

    What is no ordinary file (a pipe, `/dev/null`) is written into itself. OSError names `path`.
    """
    place = path.resolve()  # a link stays one
    draft = place.with_name(f".{place.name[:40]}.{os.getpid()}-{next(_NUMBERS)}.new")
    is_new = not path.exists()
    is_draft = is_new or path.is_file()
    try:
        if not (is_new or os.access(path, os.W_OK)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        yield draft if is_draft else path
        if is_draft:
            with draft.open("rb") as file:
                os.fsync(file.fileno())  # or a crash might leave the name without the content
            if not is_new:
                shutil.copymode(place, draft)
                # Only root may, to owners that its container knows; no Windows has it.
                with suppress(OSError, AttributeError):
                    os.chown(draft, place.stat().st_uid, place.stat().st_gid)
            draft.replace(place)
    except OSError as error:
        if error.filename in (None, str(draft)):  # a full disk names none
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):  # a folder that is read-only says so of what is not there, too
            draft.unlink()


def lock_file(path: Path) -> IO[str]:
    """Lock a file, which is made if it is not there, until it is closed or this process ends.

    No child inherits the lock, and NFS has it for all hosts. The file says whose it is, for
    `is_of_this_job`. BlockingIOError if another process has it, another OSError where that cannot
    be known.
    """
    import fcntl  # no Windows has it, where plans are made too

    lock = path.open("a")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise
    with suppress(OSError):  # a full disk locks as well
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), "\n".join(_this_start()).encode())
    return lock


def is_of_this_job(path: Path, *, elsewhere: bool = False) -> bool:
    """Return whether a start of this job has locked a file last; `elsewhere`: under another boot.

    A lock of this host's present boot is of a process that lives; of others, that is not known.
    """
    with suppress(OSError, ValueError):
        job, boot = path.read_text().split("\n")
        own_job, own_boot = _this_start()
        return job == own_job != "" and not (elsewhere and boot == own_boot)
    return False


def _this_start() -> tuple[str, str]:
    """Return the name of this job, the same for all its starts or empty, and the host's boot."""
    job = next(filter(None, map(os.environ.get, _JOB_VARIABLES)), "")
    return "" if job == "none" else job, boot_id()


def boot_id() -> str:
    """Return what no other boot, of this or another machine, has; empty if it is not known."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def refuse_foreign(folder: Path, names: Sequence[str], mark: str) -> None:
    """Refuse to write over files in a folder, unless an earlier run left its file `mark` there."""
    found = [name for name in names if (folder / name).exists()]
    if found and not (folder / mark).exists():
        raise EnvPipeError(
            f"{folder} holds files of the names to be written, which are from elsewhere",
            value=found,
            remedy="Give another folder with --output.",
        )
