"""Trains a Llama under DeepSpeed, a stage a rank, and saves energy by EnvPipe.

Any launcher starts it: `envpipe launch`, torchrun or deepspeed; `train_llama_deepspeed.sh` is the
shortest way.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoTokenizer, LlamaConfig

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.deepspeed import end_training, initialize
from envpipe_megatron.integrations.huggingface import split_model
from envpipe_megatron.integrations.huggingface.deepspeed_stages import pipeline_module
from envpipe_megatron.runtime.job.options import OPTIONS

#: Layers, hidden size, heads, groups of them, inner size, words.
SIZES = {
    "tiny": (8, 64, 4, 2, 128, 512),
    "llama-160m": (12, 768, 12, 12, 3072, 32000),
    "llama-1b": (22, 2048, 32, 4, 5632, 32000),
}
CONFIG = Path(__file__).resolve().parents[1] / "configs" / "deepspeed" / "llama.json"
#: Without a tokenizer, tokens are bytes, and this one ends a text.
BYTES_END = 256
SYNTHETIC_SEQUENCES = 64


class DataError(EnvPipeError):
    """Data or a tokenizer that cannot be trained with."""


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--model", choices=SIZES, default="llama-160m", help="Default: %(default)s."
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="A text; or, by its ending .json or .jsonl, texts, in a list or one a line: strings, "
        "or objects whose strings are joined. Default: random tokens.",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="A Hugging Face tokenizer. Default: tokens are bytes.",
    )
    parser.add_argument(
        "--sequence-length", type=int, default=512, metavar="N", help="Tokens. Default: 512."
    )
    parser.add_argument(
        "--train-steps",
        type=int,
        default=500,
        metavar="N",
        help="Those that measure and profile are among them. Default: 500.",
    )
    parser.add_argument(
        "--seed", type=int, default=1234, help="Of weights and data. Default: 1234."
    )
    parser.add_argument(
        "--deepspeed_config", default=str(CONFIG), metavar="FILE", help="Default: %(default)s."
    )
    parser.add_argument("--local_rank", type=int, help="Set by some launchers; not used.")
    envpipe = parser.add_argument_group(
        "EnvPipe", 'Each goes before what the block "envpipe" of the DeepSpeed configuration says.'
    )
    envpipe.add_argument("--type", choices=OPTIONS["type"].words)
    envpipe.add_argument("--scheduling", choices=OPTIONS["scheduling"].words)
    envpipe.add_argument("--reconfig", choices=OPTIONS["reconfigure"].words)
    envpipe.add_argument(
        "--output", metavar="DIR", help="For profile, plan, energy log and summary."
    )
    args = parser.parse_args()
    for name in ("sequence_length", "train_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is 1 or more, not {getattr(args, name)}")
    return args


def read_texts(path: Path) -> list[str]:
    """Read a file of text, or of texts."""
    try:
        content = path.read_text()
        if path.suffix not in (".json", ".jsonl"):
            return [content]
        try:
            items = json.loads(content)
        except json.JSONDecodeError:  # one a line
            items = [json.loads(line) for line in content.splitlines() if line.strip()]
    except (OSError, ValueError) as error:  # also text that is not UTF-8
        raise DataError(f"The file of --data cannot be read: {error}", value=str(path)) from error
    return [_text(item) for item in (items if isinstance(items, list) else [items])]


def _text(item: object) -> str:
    if isinstance(item, dict):
        return "\n".join(value for value in item.values() if isinstance(value, str))
    return item if isinstance(item, str) else ""


def make_tokens(args: argparse.Namespace, vocabulary_size: int) -> tuple[torch.Tensor, int]:
    """Make the tokens to train with; return their numbers and the vocabulary size they need."""
    if args.data is None:
        generator = torch.Generator().manual_seed(args.seed)
        size = SYNTHETIC_SEQUENCES * args.sequence_length + 1
        return torch.randint(vocabulary_size, (size,), generator=generator), vocabulary_size
    texts = [text for text in read_texts(args.data) if text]
    if args.tokenizer is None:
        numbers = [number for text in texts for number in (*text.encode(), BYTES_END)]
        needed = BYTES_END + 1
    else:
        numbers, needed = tokenize(texts, args.tokenizer)
    if len(numbers) <= args.sequence_length:
        raise DataError(
            f"A sequence of {args.sequence_length} tokens and the next one do not come together",
            value=f"{len(numbers)} tokens in {args.data}",
            remedy="Give more text, or a smaller --sequence-length.",
        )
    return torch.tensor(numbers, dtype=torch.int32), needed


def tokenize(texts: list[str], folder: str) -> tuple[list[int], int]:
    """Make numbers of texts by a Hugging Face tokenizer; return how many there can be, too."""
    if not Path(folder).is_dir():
        raise DataError("The folder of --tokenizer is not there", value=folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise DataError(f"There is no tokenizer in the folder: {error}", value=folder) from error
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    numbers = [
        number
        for text in texts
        for number in (*tokenizer(text, add_special_tokens=False)["input_ids"], *end)
    ]
    return numbers, len(tokenizer)


def batches(
    tokens: torch.Tensor, num_samples: int, length: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Draw sequences and what comes next at each of their positions, without an end.

    The first stage and the last one draw the same.
    """
    sequences = tokens.unfold(0, length + 1, length)
    generator = torch.Generator().manual_seed(seed)
    while True:
        drawn = sequences[torch.randint(len(sequences), (num_samples,), generator=generator)].long()
        yield drawn[:, :-1], drawn[:, 1:]


def llama(name: str) -> LlamaConfig:
    """A model's sizes as transformers takes them."""
    layers, hidden, heads, groups, inner, words = SIZES[name]
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=inner,
        vocab_size=words,
        rms_norm_eps=1e-5,
    )


def train(args: argparse.Namespace) -> None:
    """Train; EnvPipeError where data, options or the machine cannot be trained with."""
    config = llama(args.model)
    tokens, needed = make_tokens(args, config.vocab_size)
    # A tokenizer may know more tokens than the model; with fewer, the model keeps its size.
    config.vocab_size = max(config.vocab_size, needed)
    if os.environ.get("RANK", "0") == "0":
        print("DeepSpeed starts; its first start on CPUs compiles for a minute or more", flush=True)
    deepspeed.init_distributed()
    is_first = dist.get_rank() == 0
    num_stages = dist.get_world_size()
    if num_stages > config.num_hidden_layers:
        raise EnvPipeError(
            f"{args.model} has {config.num_hidden_layers} layers for {num_stages} stages",
            remedy="Take fewer GPUs, or a larger --model.",
        )
    if is_first:
        what = f"{args.data}: {len(tokens):,} tokens" if args.data else "random tokens: no --data"
        print(f"{args.model} on {num_stages} stages; {what}", flush=True)
    model = pipeline_module(split_model(config, seed=args.seed), num_stages)
    names = ("type", "scheduling", "reconfig", "output")
    settings = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    engine, *_ = initialize(
        args,
        model=model,
        model_parameters=[weight for weight in model.parameters() if weight.requires_grad],
        envpipe=settings or None,
    )
    if is_first:
        print(f"{args.train_steps} steps begin; the first one takes longest", flush=True)
    data = batches(tokens, engine.train_micro_batch_size_per_gpu(), args.sequence_length, args.seed)
    for step in range(1, args.train_steps + 1):
        begun = time.monotonic()
        loss = engine.train_batch(data).item()
        if is_first:
            took_s = time.monotonic() - begun
            print(f"step {step}/{args.train_steps}: loss {loss:.4f}, {took_s:.3f} s", flush=True)
    end_training(engine)
    dist.destroy_process_group()


def main() -> None:
    """Train; errors that the user can correct are printed as one line."""
    args = parse()
    try:
        train(args)
    except EnvPipeError as error:
        sys.exit(f"rank {os.environ.get('RANK', '0')}: error: {error}")


if __name__ == "__main__":
    main()
