"""Writes a little data into a folder, with Megatron-DeepSpeed's own builder of indexed datasets.

Started with a checkout in PYTHONPATH; its `tools/preprocess_data.py` needs nltk, and this does not.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

NUM_WORDS = 60


def main() -> None:
    """Make tokens for `pretrain_gpt.py`; prompts and a tokenizer for `finetune_llama.py`."""
    folder = Path(sys.argv[1])
    random.seed(0)
    make_tokens(folder)
    make_tokenizer(folder / "tokenizer")
    prompts = [
        {"instruction": words(5), "input": "", "output": words(random.randrange(20, 60))}
        for _ in range(200)
    ]
    (folder / "prompts.json").write_text(json.dumps(prompts))


def make_tokens(folder: Path) -> None:
    """Documents of random tokens, each ended by NullTokenizer's token for it."""
    import torch
    from megatron.data import indexed_dataset

    path = str(folder / "text_document")
    builder = indexed_dataset.make_builder(f"{path}.bin", impl="mmap", vocab_size=64)
    for _ in range(300):
        document = [random.randrange(NUM_WORDS) for _ in range(random.randrange(20, 80))]
        builder.add_item(torch.IntTensor([*document, 63]))
        builder.end_document()
    builder.finalize(f"{path}.idx")


def make_tokenizer(folder: Path) -> None:
    """A tokenizer of whole words, as the package transformers keeps them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "[PAD]", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    vocabulary = [*special.values(), *(f"w{number}" for number in range(NUM_WORDS))]
    numbers = {word: number for number, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def words(count: int) -> str:
    """Random ones of the tokenizer's."""
    return " ".join(f"w{random.randrange(NUM_WORDS)}" for _ in range(count))


if __name__ == "__main__":
    main()
