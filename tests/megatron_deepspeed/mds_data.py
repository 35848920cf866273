"""Writes a little data into a folder, with Megatron-DeepSpeed's own builder of indexed datasets.

Started with a checkout in PYTHONPATH; its `tools/preprocess_data.py` needs nltk, and this does not.
"""

import random
import sys
from pathlib import Path

NUM_WORDS = 60


def main() -> None:
    """Write documents of random tokens, each ended by NullTokenizer's token for it."""
    import torch
    from megatron.data import indexed_dataset

    random.seed(0)
    path = str(Path(sys.argv[1]) / "text_document")
    builder = indexed_dataset.make_builder(f"{path}.bin", impl="mmap", vocab_size=64)
    for _ in range(300):
        document = [random.randrange(NUM_WORDS) for _ in range(random.randrange(20, 80))]
        builder.add_item(torch.IntTensor([*document, 63]))
        builder.end_document()
    builder.finalize(f"{path}.idx")


if __name__ == "__main__":
    main()
