"""A real text through Megatron-LM's own preprocessing and tokenizer, and training on it."""

import json
import os
import shlex
import sysconfig
from pathlib import Path

import pytest
from checkouts import DEEPSPEED_VARIABLE, TAGS
from click.testing import CliRunner
from lm_cases import PP4, Case, full, run_case, run_envpipe
from make_corpus import corpus_args, make_corpus, texts_of_python, train_gpt2

# make_corpus has the folder in the path.
from prepare_webtext import main as prepare_webtext
from prepare_webtext_files import END_OF_DOCUMENT, bytes_of_alphabet, read_index

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
    made, *others = (
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in corpora.values()
    )
    assert set(made) == {f"{TOKENS}.bin", f"{TOKENS}.idx", "tokenizer.json"}
    assert all(other == made for other in others)
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


# launch/prepare_webtext.py


class Collected:
    """Text as somebody collected it, and a vocabulary and merges in GPT-2's format."""

    def __init__(self, folder):
        self.folder = folder
        self.texts = texts_of_python()[:15]
        self.vocab, self.merges = train_gpt2(self.texts, folder)
        (folder / "text").mkdir()
        lines = [json.dumps({"text": text}) + "\n" for text in self.texts]
        (folder / "text" / "a.jsonl").write_text("".join(lines[:12]) + lines[0])
        (folder / "text" / "b.json").write_text("".join(lines[8:]) + "torn\n")
        # As cpu_run's `name_override`.
        backport = "import typing, typing_extensions as e; typing.override = e.override"
        (folder / "sitecustomize.py").write_text(backport)

    def prepare(self, checkout):
        """The words to train with, and the files of tokens."""
        output = self.folder / checkout.name
        words = [self.folder / "text", "--megatron", checkout, "--output", output]
        words += ["--vocab", self.vocab, "--merges", self.merges, "--workers", 2]
        environment = {"PYTHONPATH": f"{self.folder}:{os.environ.get('PYTHONPATH', '')}"}
        result = CliRunner().invoke(prepare_webtext, list(map(str, words)), env=environment)
        assert result.exit_code == 0, (result.output, result.exception)
        assert "left out: 5 exact duplicates, 1 that cannot be used" in result.output
        prefix = output / "webtext_text_document"
        return shlex.split(result.output.splitlines()[-1]), [
            prefix.with_suffix(ending).read_bytes() for ending in (".bin", ".idx")
        ]


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    pytest.importorskip("tokenizers")
    return Collected(tmp_path_factory.mktemp("collected"))


@pytest.fixture(scope="module")
def prepared(collected, checkout):
    """By tag, what each checkout makes of the collected text."""
    pytest.importorskip("transformers")
    return {tag: collected.prepare(checkout(tag)) for tag in TAGS}


def test_collected_text_becomes_the_same_tokens_by_all_tags(collected, prepared):
    first, *others = (files for _, files in prepared.values())
    assert all(other == first for other in others)
    tokens = {number: token for token, number in json.loads(collected.vocab.read_text()).items()}
    byte_of = bytes_of_alphabet()
    prefix = collected.folder / TAGS[0] / "webtext_text_document"
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    documents = IndexedDataset(str(prefix))
    assert len(documents) == len(read_index(prefix.with_suffix(".idx")).documents) - 1 == 15
    for document, text in zip(documents, collected.texts, strict=True):
        *made, end = (tokens[number] for number in document.tolist())
        assert bytes(byte_of[each] for each in "".join(made)).decode() == text
        assert end == END_OF_DOCUMENT


def test_megatron_deepspeed_makes_the_same_tokens(collected, prepared):
    given = os.environ.get(DEEPSPEED_VARIABLE)
    if not given:
        pytest.skip(f"{DEEPSPEED_VARIABLE} names no checkout of Megatron-DeepSpeed")
    for package in ("nltk", "deepspeed"):
        pytest.importorskip(package)
    words, made = collected.prepare(Path(given))
    assert words[2:4] == ["--tokenizer-type", "GPT2BPETokenizer"]
    assert made == prepared[TAGS[0]][1]


@pytest.mark.parametrize("how", ["make_corpus", "prepare_webtext"])
@pytest.mark.parametrize("tag", TAGS)
def test_stock_and_patched_learn_it_alike(tag, how, checkout, patched, request, tmp_path):
    if how == "make_corpus":
        data = corpus_args(request.getfixturevalue("corpora")[tag])
    else:  # by what it prints
        words, _ = request.getfixturevalue("prepared")[tag]
        cache = ["--split", "60,20,20", "--data-cache-path", str(tmp_path / "cache")]
        data = shlex.join([*words, *cache])
    case = Case(PP4, data=data)
    stock = run_case(checkout(tag), case, "", tmp_path / "stock")
    run = run_envpipe(patched(tag), case, tmp_path / "patched")
    assert run.result == stock.result
    losses = [float(iteration.loss) for iteration in stock.iterations]
    assert losses[-1] < losses[0]
