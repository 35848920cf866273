#!/usr/bin/env python3
r"""Turns collected text into the tokens that Megatron trains on, by Megatron's own tools.

    python launch/prepare_webtext.py collected/ --megatron Megatron-LM \
        --vocab gpt2-vocab.json --merges gpt2-merges.txt --output data/webtext

INPUTS are folders and files of .json and .jsonl (an object with `text` a line) and .txt (a document
a file), also packed (.gz, .xz). Nothing is downloaded. All is checked first; each text is taken
once; what cannot be used is listed in unusable.txt. Call it again after it was stopped: finished
steps are not done again. At the end the arguments to train with are printed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from prepare_webtext_files import (
    END_OF_DOCUMENT,
    DataError,
    check_files,
    check_tokens,
    check_vocabulary,
    count_lines,
    find_files,
    merge,
)
from prepare_webtext_tools import (
    check_clean_up,
    gpt2_tokenizer,
    options_of,
    run_tool,
    tokenizer_args,
)

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import written_beside

#: tools/openwebtext/cleanup_dataset.py imports a module that is missing in checkouts.
_TOKENIZER = '''"""The module that tools/openwebtext/cleanup_dataset.py asks for."""
import importlib.util

from langdetect import DetectorFactory

DetectorFactory.seed = 0  # the same answer each time
spec = importlib.util.spec_from_file_location("gpt2_tokenization", {gpt2!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)


class Tokenizer:
    def __init__(self, cache_dir):
        self.tokenize_document = module.GPT2Tokenizer({vocab!r}, {merges!r}).tokenize
'''


@dataclass(frozen=True)
class Steps:
    """The steps that are done, in a file: what each was made from and made, and its result."""

    path: Path

    def do(
        self, name: str, made_from: object, outputs: Sequence[Path], work: Callable[[], object]
    ) -> Any:
        """Do a step, unless it was done from the same and its files are as it left them.

        Returns what `work` returned, this time or then, as JSON keeps it.
        """
        done = json.loads(self.path.read_text()) if self.path.exists() else {}
        made_from = json.loads(json.dumps(made_from))
        step = done.get(name)
        if step and step["from"] == made_from and step["files"] == stamps(outputs):
            click.echo(f"{name}: done before")
            return step["result"]
        click.echo(f"{name}: ...")
        result = work()
        done[name] = {"from": made_from, "files": stamps(outputs), "result": result}
        with written_beside(self.path) as draft:
            draft.write_text(json.dumps(done))
        return result


def stamps(files: Sequence[Path]) -> list[list[object]]:
    """What changes when a file does: path, size and time; nothing but the path where none is."""
    return [
        [str(file), *((file.stat().st_size, file.stat().st_mtime_ns) if file.exists() else ())]
        for file in files
    ]


def digest(file: Path) -> str:
    """Digest of a small file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Job:
    """What was asked for; all paths are absolute.

    Attributes:
        megatron: the checkout that trains.
        clean_up: the checkout that cleans up, if any.
        workers: processes that tokenize.
    """

    inputs: tuple[Path, ...]
    megatron: Path
    vocab: Path
    merges: Path
    output: Path
    clean_up: Path | None
    workers: int


def prepare(job: Job) -> list[str]:
    """Check everything, then merge, clean up and tokenize; return the arguments to train with.

    Raises DataError where something cannot be used, or a tool failed.
    """
    for given in job.inputs:
        if job.output.is_relative_to(given):
            raise DataError(
                "--output lies in a folder that is read",
                value=str(job.output),
                remedy="Name another.",
            )
    job.output.mkdir(parents=True, exist_ok=True)
    vocabulary = check_vocabulary(job.vocab, job.merges)
    files, ignored = find_files(job.inputs)
    if ignored:
        click.echo(f"passed by: {', '.join(f'{n} {name}' for name, n in ignored.most_common())}")
    check_files(files)
    options = options_of(job.megatron, job.output / "options.log")
    tokenizer = tokenizer_args(job.megatron, options, job.vocab, job.merges, job.output)
    if job.clean_up:
        check_clean_up(job.clean_up)
    steps = Steps(job.output / "steps.json")
    texts = merge_files(job, steps, files)
    if job.clean_up:
        texts = clean_up(job, job.clean_up, steps, texts)
    prefix = tokenize(job, steps, texts, tokenizer, vocabulary[END_OF_DOCUMENT])
    return ["--data-path", str(prefix), *tokenizer]


def merge_files(job: Job, steps: Steps, files: Sequence[Path]) -> Path:
    """Merge all files into one; say what was left out, and where that is listed."""
    texts, unusable = job.output / "webtext.jsonl", job.output / "unusable.txt"
    found = steps.do(
        "merge", stamps(files), [texts, unusable], lambda: merge(files, texts, unusable)
    )
    click.echo(
        f"  {found['documents']} documents; left out: {found['duplicates']} exact duplicates, "
        f"{found['unusable']} that cannot be used" + (f" ({unusable})" if found["unusable"] else "")
    )
    return texts


def clean_up(job: Job, checkout: Path, steps: Steps, texts: Path) -> Path:
    """Clean up as tools/openwebtext/README.md says: English, 128 tokens, similar texts once."""
    tools, folder = checkout / "tools" / "openwebtext", job.output / "clean_up"
    folder.mkdir(exist_ok=True)
    gpt2 = str(gpt2_tokenizer(checkout))
    (folder / "tokenizer.py").write_text(
        _TOKENIZER.format(gpt2=gpt2, vocab=str(job.vocab), merges=str(job.merges))
    )
    files = [digest(file) for file in (*sorted(tools.glob("*.py")), job.vocab, job.merges)]

    def tool(name: str, *args: object) -> None:
        run_tool([tools / name, *args], folder, folder / "log.txt")

    def clean() -> int:
        with written_beside(cleaned) as draft:
            tool("cleanup_dataset.py", texts, draft)
        return count_lines(cleaned)

    def deduplicate() -> int:
        pairs, groups = folder / "similar.jsonl", folder / "groups.jsonl"
        tool("find_duplicates.py", "--inputs", cleaned, "url", "--output", pairs)
        tool("group_duplicate_url.py", pairs, groups)
        with written_beside(unique) as draft:
            tool("remove_group_duplicates.py", groups, cleaned, draft)
        return count_lines(unique)

    cleaned, unique = job.output / "webtext_clean.jsonl", job.output / "webtext_unique.jsonl"
    kept = steps.do("clean", [*files, stamps([texts])], [cleaned], clean)
    click.echo(f"  {kept} documents are English and long enough ({folder / 'log.txt'})")
    kept = steps.do("deduplicate", [*files, stamps([cleaned])], [unique], deduplicate)
    click.echo(f"  {kept} documents are not similar to another")
    if not kept:
        raise DataError("Nothing is left", remedy=f"{folder / 'log.txt'} says why.")
    return unique


def tokenize(
    job: Job, steps: Steps, texts: Path, tokenizer: list[str], end_of_document: int
) -> Path:
    """Tokenize by Megatron's preprocessing, and check what it wrote; the prefix of the tokens."""
    script = job.megatron / "tools" / "preprocess_data.py"
    prefix, draft = (
        folder / "webtext_text_document" for folder in (job.output, job.output / "part")
    )

    def work() -> dict[str, int]:
        shutil.rmtree(draft.parent, ignore_errors=True)
        draft.parent.mkdir()
        written = ["--output-prefix", draft.parent / "webtext", "--append-eod"]
        command = [script, "--input", texts, *tokenizer, *written, "--workers", job.workers]
        run_tool(command, job.megatron, job.output / "preprocess.log")
        num_documents = count_lines(texts)
        num_tokens = check_tokens(draft, num_documents, end_of_document)
        for ending in (".bin", ".idx"):
            draft.with_suffix(ending).replace(prefix.with_suffix(ending))
        draft.parent.rmdir()
        return {"documents": num_documents, "tokens": num_tokens}

    made_from = [stamps([texts]), *map(digest, (script, job.vocab, job.merges)), tokenizer]
    files = [prefix.with_suffix(".bin"), prefix.with_suffix(".idx")]
    made = steps.do("tokenize", made_from, files, work)
    click.echo(f"  {made['documents']} documents, {made['tokens']} tokens")
    return prefix


_EXISTING = click.Path(exists=True, path_type=Path, resolve_path=True)


@click.command(help=(__doc__ or "").replace("\n\n    python", "\n\n\b\n    python"))
@click.argument("inputs", nargs=-1, required=True, type=_EXISTING)
@click.option("--megatron", required=True, type=_EXISTING, help="The checkout that trains.")
@click.option("--vocab", required=True, type=_EXISTING, help="gpt2-vocab.json.")
@click.option("--merges", required=True, type=_EXISTING, help="gpt2-merges.txt.")
@click.option(
    "--output", required=True, type=click.Path(file_okay=False, path_type=Path, resolve_path=True)
)
@click.option(
    "--clean-up",
    type=_EXISTING,
    metavar="CHECKOUT",
    help="Keep English documents of 128 tokens and more, and of similar ones one, by "
    "tools/openwebtext of this checkout.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=len(os.sched_getaffinity(0)),
    show_default=True,
    help="Processes that tokenize.",
)
def main(**options: Any) -> None:
    """Prepare; errors that the user can correct are printed as one line."""
    try:
        arguments = prepare(Job(**options))
    except EnvPipeError as error:
        sys.exit(f"error: {error}")
    click.echo(f"\nTrain with:\n{shlex.join(arguments)}")


if __name__ == "__main__":
    main()
