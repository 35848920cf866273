"""Megatron's tools as `prepare_webtext.py` runs them: what a checkout offers, and how it fails."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import click
from prepare_webtext_files import DataError

from envpipe_megatron.patching import liveness

#: Runs a tool that imports Triton unasked, through Megatron, as `envpipe patch check` imports it.
_RUN = (
    "import os, runpy, sys; _, stand_ins, *sys.argv = sys.argv; "
    "sys.path[0] = os.path.dirname(sys.argv[0]); "
    "runpy.run_path(stand_ins)['StandIns']({'megatron'}); "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
#: GPT-2's tokenizer that reads its two files, where a checkout has one.
_GPT2 = tuple(f"megatron/{folder}tokenizer/gpt2_tokenization.py" for folder in ("", "training/"))
#: A process of Megatron's preprocessing that fails is told so by multiprocessing; what started it
#: ends with 0 all the same, or waits for ever.
_FAILED = re.compile(r"^Process Process-\d+:")
_GRACE_S = 10.0
_LSH = (
    "lsh: git clone https://github.com/mattilyra/LSH, set USE_CYTHON = True in its setup.py (the "
    "C++ that it ships does not compile on Python 3.11 and newer), pip install cython numpy "
    "setuptools, and pip install --no-build-isolation ./LSH"
)


def run_tool(command: Sequence[object], modules: Path, log: Path) -> None:
    """Run a tool; its progress is shown, and all that it says is appended to a log.

    The folder `modules` goes before installed modules, as the checkout's Megatron has to before
    megatron-core. Raises DataError where the tool failed.
    """
    # A seed of hashes, since the tools write sets in their order.
    path = os.pathsep.join([str(modules), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
    told: list[str] = []
    with log.open("a", encoding="utf-8") as output:
        tool = subprocess.Popen(
            [sys.executable, "-c", _RUN, liveness.__file__, *map(str, command)],
            stdout=output,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="backslashreplace",
            env={**os.environ, **environ, "PYTHONDONTWRITEBYTECODE": "1"},
            start_new_session=True,
        )
        assert tool.stderr is not None
        end = threading.Timer(_GRACE_S, os.killpg, (tool.pid, signal.SIGKILL))
        failed = False
        try:
            for line in tool.stderr:
                if line.startswith("Processed "):
                    click.echo(f"  {line}", nl=False, err=True)
                output.write(line)
                told.append(line.rstrip())
                del told[:-50]
                if _FAILED.match(line) and not failed:
                    failed = True
                    end.start()
            status = tool.wait()
        finally:
            end.cancel()
            if tool.poll() is None:
                os.killpg(tool.pid, signal.SIGKILL)
                tool.wait()
    if failed or status:
        raise DataError(
            f"{command[0]} failed",
            value=last_error(told),
            remedy=f"If it misses a package, install it for {sys.executable}. All that it said is "
            f"in {log}.",
        )


def last_error(lines: Sequence[str]) -> str:
    """The line of an error in what a tool said at last."""
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (errors or [line for line in lines if line] or ["it said nothing"])[-1]


def gpt2_tokenizer(checkout: Path) -> Path | None:
    """The module of a checkout's GPT-2 tokenizer, where it has one."""
    return next((checkout / path for path in _GPT2 if (checkout / path).is_file()), None)


def tokenizer_args(
    checkout: Path, options: str, vocab: Path, merges: Path, output: Path
) -> list[str]:
    """Megatron's arguments for the tokenizer, to preprocess and to train with.

    `GPT2BPETokenizer` reads vocabulary and merges where the checkout has a tokenizer for that. In
    core_v0.16.1 it does so by --legacy-tokenizer alone: else it asks huggingface.co, and leaves out
    the merges. Newer ones have no such tokenizer; there a folder in Hugging Face's format, which is
    read without a network, stands for the two files, and needs the package transformers.
    """
    if gpt2_tokenizer(checkout):
        files = ["--vocab-file", str(vocab), "--merge-file", str(merges)]
        legacy = ["--legacy-tokenizer"] if "--legacy-tokenizer" in options else []
        return ["--tokenizer-type", "GPT2BPETokenizer", *files, *legacy]
    if importlib.util.find_spec("transformers") is None:
        raise DataError(
            "This Megatron reads GPT-2's tokenizer by the package transformers alone",
            value=str(checkout),
            remedy=f"Install transformers for {sys.executable}.",
        )
    folder = output / "tokenizer"
    folder.mkdir(exist_ok=True)
    shutil.copy(vocab, folder / "vocab.json")
    shutil.copy(merges, folder / "merges.txt")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]


def options_of(checkout: Path, log: Path) -> str:
    """What a checkout's preprocessing says of its options, which shows that it can be run."""
    script = checkout / "tools" / "preprocess_data.py"
    if not script.is_file():
        raise DataError(
            "--megatron has no tools/preprocess_data.py",
            value=str(checkout),
            remedy="Name a checkout of Megatron-LM or Megatron-DeepSpeed.",
        )
    log.unlink(missing_ok=True)
    run_tool([script, "--help"], checkout, log)
    return log.read_text()


def check_clean_up(checkout: Path) -> None:
    """Refuse a checkout that cannot clean up: it has no tools for that, or packages are missing."""
    if not (checkout / "tools" / "openwebtext").is_dir() or not gpt2_tokenizer(checkout):
        raise DataError(
            "--clean-up: there is no tools/openwebtext",
            value=str(checkout),
            remedy="Megatron-LM had it up to core_v0.12.0, Megatron-DeepSpeed has it; it may be "
            "another checkout than --megatron.",
        )
    missing = [
        name for name in ("ftfy", "langdetect", "regex") if not importlib.util.find_spec(name)
    ]
    remedies = [f"pip install {' '.join(missing)}"] if missing else []
    by_lsh = [sys.executable, "-c", "from lsh import cache, minhash"]
    if subprocess.run(by_lsh, capture_output=True, check=False).returncode:
        missing, remedies = [*missing, "lsh"], [*remedies, _LSH]
    if missing:
        raise DataError(
            "--clean-up misses packages",
            value=missing,
            remedy=f"For {sys.executable}: {'; '.join(remedies)}",
        )
