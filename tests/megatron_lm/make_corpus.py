"""Makes a small real corpus by Megatron-LM's own preprocessing, with a tokenizer of its own.

    python tests/megatron_lm/make_corpus.py OUTDIR CHECKOUT

The text is the standard library of this Python; nothing is downloaded. A byte-level BPE is trained
on it by the package `tokenizers`, and used as Megatron's TikTokenizer, which needs `tiktoken`. What
stays in OUTDIR, less than 2 MB, serves any tag; the last line that is printed has the arguments.
"""

import base64
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

from prepare_webtext_files import END_OF_DOCUMENT, bytes_of_alphabet

CPU_RUN = Path(__file__).with_name("cpu_run.py")
TEXT_BYTES = 2_000_000
NUM_SPECIAL, NUM_TOKENS = 16, 2048


def corpus_args(folder: Path) -> str:
    """Megatron-LM's arguments by which a job trains on a corpus that was made in a folder."""
    folder = folder.resolve()
    return (
        f"{_tokenizer_args(folder)} --data-path {folder / 'corpus_text_document'} "
        f"--split 90,5,5 --data-cache-path {folder / 'cache'}"
    )


def make_corpus(folder: Path, checkout: Path) -> None:
    """Write tokenizer and tokens into a folder.

    Raises:
        subprocess.CalledProcessError: Megatron-LM's preprocessing failed.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    texts = texts_of_python()
    (folder / "tokenizer.json").write_text(json.dumps(_train_tokenizer(texts), indent=0))
    lines = folder / "corpus.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    # Triton is imported unasked, too.
    on_cpu = [] if importlib.util.find_spec("triton") else [str(CPU_RUN)]
    script = checkout.resolve() / "tools" / "preprocess_data.py"
    files = ["--input", str(lines), "--output-prefix", str(folder / "corpus")]
    options = f"--append-eod --workers 1 {_tokenizer_args(folder)}".split()
    # The checkout's Megatron first; what Megatron needs may be on the path already.
    path = os.pathsep.join([str(checkout.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(
        [sys.executable, *on_cpu, str(script), *files, *options],
        check=True,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    lines.unlink()


def _tokenizer_args(folder: Path) -> str:
    return (
        f"--tokenizer-type TikTokenizer --tokenizer-model {folder / 'tokenizer.json'} "
        f"--vocab-size {NUM_TOKENS} --tiktoken-pattern v2 "
        f"--tiktoken-num-special-tokens {NUM_SPECIAL}"
    )


def texts_of_python() -> list[str]:
    """Modules of the standard library, of ordinary length, until there is enough."""
    texts: list[str] = []
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if 2_000 < module.stat().st_size < 60_000 and sum(map(len, texts)) < TEXT_BYTES:
            texts.append(module.read_text(errors="replace"))
    return texts


def train_gpt2(texts: list[str], folder: Path) -> tuple[Path, Path]:
    """Train a BPE on texts, and write its vocabulary and merges as GPT-2's are."""
    vocab, merges = _train_bpe(texts, NUM_TOKENS, [END_OF_DOCUMENT]).model.save(str(folder), "gpt2")
    return Path(vocab), Path(merges)


def _train_bpe(texts: list[str], num_tokens: int, special: list[str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        initial_alphabet=alphabet,
        special_tokens=special,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _train_tokenizer(texts: list[str]) -> list[dict[str, object]]:
    """A byte-level BPE as TikTokenizer reads it: each token's bytes, in the order of merging."""
    # TikTokenizer cuts text a little differently; some merges are then of less use.
    tokenizer = _train_bpe(texts, 2 * NUM_TOKENS, [])
    byte_of = bytes_of_alphabet()
    # One token can come from several merges.
    tokens = {bytes([number]): None for number in range(256)}
    for left, right in json.loads(tokenizer.to_str())["model"]["merges"]:
        tokens[bytes(byte_of[character] for character in left + right)] = None
    kept = list(tokens)[: NUM_TOKENS - NUM_SPECIAL]
    return [
        {
            "rank": rank,
            "token_bytes": base64.b64encode(token).decode(),
            "token_str": token.decode(errors="replace"),
        }
        for rank, token in enumerate(kept)
    ]


if __name__ == "__main__":
    make_corpus(Path(sys.argv[1]), Path(sys.argv[2]))
    print(corpus_args(Path(sys.argv[1])))
