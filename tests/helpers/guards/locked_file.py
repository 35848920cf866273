"""A file that another process has locked, as another live job has one."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCRIPT = (
    "import sys; from pathlib import Path; from envpipe_megatron.files import lock_file; "
    "lock = lock_file(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
)


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Until the end of the block, at which that process is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"locked\n"
            yield
        finally:
            other.kill()
