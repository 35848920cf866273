"""The shell commands of the pages: read them, and run those that need no GPU, in a fresh clone.

python docs/tools/page_commands.py [PAGE...]      # or: make docs-commands

A comment `<!-- not run: WHY -->` before a block says what it needs. Blocks with `...` or a path to
be filled in are templates. Each other block runs by bash in a clone of this checkout's commit, in
an environment of its own, one page after the other; the table at the end has each one's time.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 1200
_BLOCK = re.compile(r"(?:<!-- not run: (.*?) -->\n)?^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)
_TEMPLATE = re.compile(r"\.\.\.|<[a-z' ]+>|/path/to|PATH/TO")


@dataclass(frozen=True)
class Block:
    """A block of shell commands.

    Args:
        page: path from the root.
        line: where its text begins, from 1.
        text: commands, as they are written.
        reason: why it is not run; empty if it is.
    """

    page: str
    line: int
    text: str
    reason: str

    def commands(self) -> list[str]:
        """Return its commands, a line each, without comments and what continues lines."""
        lines = self.text.replace("\\\n", " ").split("\n")
        return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def pages(root: Path = ROOT) -> list[Path]:
    """Return the README and all pages, the quickstart first, whose run others read."""
    first = root / "docs" / "start" / "quickstart.md"
    found = sorted((root / "docs").rglob("*.md"), key=lambda page: (page != first, page))
    return [root / "README.md", *found]


def blocks(page: Path, root: Path = ROOT) -> Iterator[Block]:
    """Yield a page's blocks of shell commands."""
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        reason = found[1] or ("a template" if _TEMPLATE.search(found[2]) else "")
        line = text.count("\n", 0, found.start(2)) + 1
        yield Block(str(page.relative_to(root)), line, found[2], reason)


def main(named: Sequence[str]) -> int:
    """Run the blocks of the named pages, or of all; return how many failed."""
    results = []
    with tempfile.TemporaryDirectory(prefix="envpipe-pages-") as folder:
        clone = Path(folder, "clone")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        subprocess.run(["make", "install"], cwd=clone, check=True)
        chosen = [clone / name for name in named] or pages(clone)
        for block in (block for page in chosen for block in blocks(page, clone)):
            if block.reason:
                results.append((block, block.reason, None))
                continue
            began_s = time.monotonic()
            said = _run(block, clone)
            results.append((block, said or "ran", time.monotonic() - began_s))
            print(f"{block.page}:{block.line}: {said or 'ran'}", flush=True)
    for block, said, time_s in results:
        took = "" if time_s is None else f"{time_s:.1f} s"
        print(f"| {block.page}:{block.line} | `{block.commands()[0][:60]}` | {said} | {took} |")
    return sum(time_s is not None and said != "ran" for _, said, time_s in results)


def _run(block: Block, clone: Path) -> str:
    """Run a block; return what went wrong, empty if nothing did."""
    path = f"{clone / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    # A build that was killed elsewhere leaves a lock in the home's folder, and others wait for it.
    extensions = str(clone.parent / "extensions")
    environment = {**os.environ, "PATH": path, "TORCH_EXTENSIONS_DIR": extensions}
    words = ["bash", "-euo", "pipefail", "-c", block.text]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            words, cwd=clone, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # what it has started, too
            process.wait()
            return f"FAILED: not done after {LIMIT_S} s"
        if status:
            output.seek(0)
            sys.stderr.buffer.write(output.read()[-6000:])
            return f"FAILED: exit status {status}"
    return ""


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
