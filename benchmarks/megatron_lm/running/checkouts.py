"""Gets checkouts ready: what each job would compile for itself, all at the same moment."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import click

from benchmarks.megatron_lm.models import CPU_RUN


def prepare(checkout: Path) -> None:
    """Compile a checkout's dataset helpers and its modules; nothing that Git follows is changed."""
    if not (checkout / "pretrain_gpt.py").is_file():
        raise click.ClickException(f"{checkout} holds no pretrain_gpt.py")
    datasets = checkout / "megatron" / "core" / "datasets"
    if (datasets / "helpers.cpp").is_file():
        made = datasets / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
        if not made.exists():
            _compile(datasets / "helpers.cpp", made)
        # Where Megatron's Makefile calls it by another name, that is made once, too.
        if shutil.which("make"):
            subprocess.run(["make", "-C", str(datasets)], capture_output=True, check=False)
    # Another process, whose workers inherit that warnings are ignored.
    modules = [sys.executable, "-W", "ignore", "-m", "compileall", "-qq", "-j", "0"]
    subprocess.run([*modules, str(checkout / "megatron")], check=False)


def _compile(source: Path, target: Path) -> None:
    """As Megatron's Makefile does, for this very interpreter.

    Megatron runs `make` at each start: it finds the target newer than its source and does nothing.
    """
    includes = subprocess.run(
        [sys.executable, "-m", "pybind11", "--includes"], capture_output=True, text=True
    )
    command = ["g++", "-O3", "-Wall", "-shared", "-std=c++17", "-fPIC", *includes.stdout.split()]
    made = subprocess.run(
        [*command, str(source), "-o", str(target)], capture_output=True, text=True
    )
    if made.returncode:
        raise click.ClickException(
            f"Megatron's dataset helpers cannot be compiled: {includes.stderr}{made.stderr[-2000:]}"
        )


def prepare_corpus(folder: Path, checkout: Path) -> bool:
    """Make the real corpus where it is not there yet; whether it is there then."""
    if not (folder / "corpus_text_document.bin").exists():
        script = CPU_RUN.with_name("make_corpus.py")
        command = [sys.executable, str(script), str(folder), str(checkout)]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            click.echo(f"No real corpus could be made: {made.stderr[-2000:]}", err=True)
            return False
    return True


def modified(stock: Path, patched: Path) -> list[str]:
    """Names of Python files under megatron/ that differ between the two, or are in one alone."""
    names = {
        path.relative_to(root).as_posix()
        for root in (stock, patched)
        for path in root.glob("megatron/**/*.py")
    }

    def content(path: Path) -> bytes | None:
        return path.read_bytes() if path.is_file() else None

    return sorted(name for name in names if content(stock / name) != content(patched / name))
