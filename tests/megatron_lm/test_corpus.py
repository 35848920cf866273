"""A real text through Megatron-LM's own preprocessing and tokenizer, and training on it."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
from checkouts import TAGS
from lm_cases import PP4, Case, full, run_case, run_envpipe
from make_corpus import corpus_args, make_corpus

pytestmark = [pytest.mark.xdist_group("megatron_lm"), full]

TOKENS = "corpus_text_document"


@pytest.fixture(scope="module")
def corpora(checkout, tmp_path_factory):
    """A corpus made by each tag."""
    for package in ("tokenizers", "tiktoken"):
        pytest.importorskip(package)
    folders = {tag: tmp_path_factory.mktemp("corpus") / tag for tag in TAGS}
    for tag, folder in folders.items():
        make_corpus(folder, checkout(tag))
    return folders


def test_tags_make_the_same_small_corpus(corpora):
    first, second = corpora.values()
    made = {path.name: path.read_bytes() for path in first.iterdir()}
    assert set(made) == {f"{TOKENS}.bin", f"{TOKENS}.idx", "tokenizer.json"}
    assert made == {path.name: path.read_bytes() for path in second.iterdir()}
    assert sum(map(len, made.values())) < 2_000_000


def test_tokens_are_the_text(corpora):
    from make_corpus import NUM_SPECIAL, NUM_TOKENS
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.tokenizers.text.libraries.tiktoken_tokenizer import TikTokenTokenizer

    folder = corpora[TAGS[0]]
    tokenizer = TikTokenTokenizer(
        str(folder / "tokenizer.json"), num_special_tokens=NUM_SPECIAL, vocab_size=NUM_TOKENS
    )
    documents = IndexedDataset(str(folder / TOKENS))
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = next(t for module in modules if 2_000 < len(t := module.read_text()) < 60_000)
    *tokens, end = documents[0].tolist()
    assert tokenizer.tokenizer.decode(tokens) == text
    assert end == tokenizer.eos_id
    assert len(tokens) < len(text) / 2


@pytest.mark.parametrize("tag", TAGS)
def test_stock_and_patched_learn_it_alike(tag, corpora, checkout, patched, tmp_path):
    case = Case(PP4, data=corpus_args(corpora[tag]))
    stock = run_case(checkout(tag), case, "", tmp_path / "stock")
    run = run_envpipe(patched(tag), case, tmp_path / "patched")
    assert run.digits == stock.digits
    assert run.weights == stock.weights
    losses = [float(iteration.loss) for iteration in stock.iterations]
    assert losses[-1] < losses[0]
