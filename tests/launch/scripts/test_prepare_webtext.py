"""`launch/prepare_webtext.py` on a few documents and a checkout whose tools are stand-ins."""

import gzip
import importlib.util
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

LAUNCH = Path(__file__).resolve().parents[3] / "launch"
sys.path.insert(0, str(LAUNCH))

import prepare_webtext  # noqa: E402
import prepare_webtext_files as files  # noqa: E402
import prepare_webtext_tools as tools  # noqa: E402

MERGES = ("t h", "th e", "Ġ the")
#: Tokenizes into bytes; does what is asked for in the file `how`.
PREPROCESS = """
import argparse, json, os, struct, sys, time
from pathlib import Path
here = Path(__file__).parent
how = (here / "how").read_text()
if "--help" in sys.argv:
    print(how)
    sys.exit("ModuleNotFoundError: No module named 'six'" if how == "package" else 0)
calls = here / "calls"
with calls.open("a") as stream:
    stream.write(json.dumps(sys.argv[1:]) + chr(10))
parser = argparse.ArgumentParser()
parser.add_argument("--input")
parser.add_argument("--output-prefix")
args, _ = parser.parse_known_args()
if how in ("dies", "hangs"):
    os.write(2, b"Process Process-1:\\nTraceback ...\\nValueError: of a child\\n")
    time.sleep(600 if how == "hangs" else 0)
    sys.exit()
texts = [json.loads(line)["text"].encode() for line in open(args.input)]
tokens = [[*text, 0 if how == "ends" else 259] for text in texts]
if how == "loses":
    del tokens[-1]
prefix = args.output_prefix + "_text_document"
with open(prefix + ".bin", "wb") as out:
    out.write(b"".join(struct.pack(f"<{len(each)}H", *each) for each in tokens))
lengths = [len(each) - (how == "uncounted") for each in tokens]
starts = [2 * sum(lengths[:place]) for place in range(len(lengths))]
count = len(lengths)
with open(prefix + ".idx", "wb") as out:
    out.write(b"MMIDIDX\\0\\0" + struct.pack("<QBQQ", 1, 8, count, count + 1))
    out.write(struct.pack(f"<{count}i{count}q{count + 1}q", *lengths, *starts, *range(count + 1)))
"""


@pytest.fixture
def vocabulary(tmp_path):
    """A vocabulary of bytes and three merges."""
    return write_vocabulary(tmp_path)


def write_vocabulary(folder):
    tokens = [*files.bytes_of_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    numbers = {token: number for number, token in enumerate([*tokens, "<|endoftext|>"])}
    vocab, merges = folder / "gpt2-vocab.json", folder / "gpt2-merges.txt"
    vocab.write_text(json.dumps(numbers))
    merges.write_text("\n".join(["#version: 0.2", *MERGES, ""]))
    return vocab, merges


def loose(*texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


class Preparing:
    """A call, its inputs and its checkout."""

    def __init__(self, folder):
        self.folder = folder
        self.vocab, self.merges = write_vocabulary(folder)
        self.text, self.output = folder / "text", folder / "output"
        self.checkout = folder / "checkout"
        self.calls = self.checkout / "tools" / "calls"
        self.text.mkdir()
        (self.text / "a.jsonl").write_text(loose("one", "two", "one") + "{torn\n")
        (self.text / "b.txt").write_text("a whole\nfile")
        (self.checkout / "tools").mkdir(parents=True)
        (self.checkout / "tools" / "preprocess_data.py").write_text(PREPROCESS)
        gpt2 = self.checkout / "megatron" / "tokenizer" / "gpt2_tokenization.py"
        gpt2.parent.mkdir(parents=True)
        gpt2.write_text(
            "class GPT2Tokenizer:\n"
            "    def __init__(self, vocab, merges): open(vocab), open(merges)\n"
            "    def tokenize(self, text): return text.split()\n"
        )
        self.behave("--vocab-file --merge-file")

    def behave(self, how):
        (self.checkout / "tools" / "how").write_text(how)

    def run(self, *words, output=None):
        words = [self.text, "--megatron", self.checkout, "--vocab", self.vocab, *words]
        words += ["--merges", self.merges, "--output", output or self.output, "--workers", 3]
        return CliRunner().invoke(prepare_webtext.main, list(map(str, words)))

    def run_well(self, *words):
        result = self.run(*words)
        assert result.exit_code == 0, (result.output, result.exception)
        return result.output

    def run_badly(self, *words, **options):
        result = self.run(*words, **options)
        assert result.exit_code == 1, result.exception
        assert isinstance(result.exception, SystemExit)
        return result.output

    @property
    def command(self):
        """The words of the last call of the preprocessing."""
        return json.loads(self.calls.read_text().splitlines()[-1])

    @property
    def documents(self):
        """The texts that the tokens stand for."""
        index = files.read_index(self.output / "webtext_text_document.idx")
        tokens = np.fromfile(self.output / "webtext_text_document.bin", index.token_type)
        return [bytes(each[:-1].tolist()).decode() for each in np.split(tokens, index.ends)[:-1]]


@pytest.fixture
def preparing(tmp_path):
    return Preparing(tmp_path)


# Vocabulary


@pytest.mark.parametrize(
    ("which", "old", "new", "said"),
    [
        (0, "{", "[{", "cannot be read"),
        (0, ": 7,", ": 8,", "not numbered from 0"),
        (0, "endoftext", "end", "missing: <|endoftext|>"),
        (0, '"A"', '"AB"', "missing: A"),
        (1, "#version: 0.2\n", "", "gpt2-merges.txt: does not begin with #version"),
        (1, "Ġ the\n", "Ġ the", "its last line has no end"),
        (1, "th e", "the", "gpt2-merges.txt:3: not two tokens"),
    ],
)
def test_another_vocabulary_is_refused(vocabulary, which, old, new, said):
    assert files.check_vocabulary(*vocabulary)["<|endoftext|>"] == 259
    content = vocabulary[which].read_text()
    assert old in content
    vocabulary[which].write_text(content.replace(old, new, 1))
    with pytest.raises(files.DataError) as error:
        files.check_vocabulary(*vocabulary)
    assert said in str(error.value)
    assert "Give gpt2-vocab.json" in str(error.value)


# Collected text


def test_files_are_found_once_and_in_order(tmp_path):
    for name in ("b/two.txt", "b/one.json.gz", "a.jsonl.xz", "c.csv", "d.txt.zst", "e.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found, ignored = files.find_files([tmp_path / "b" / "two.txt", tmp_path])
    assert [str(path.relative_to(tmp_path)) for path in found] == [
        "b/two.txt", "a.jsonl.xz", "b/one.json.gz",
    ]  # fmt: skip
    assert ignored == {".csv": 2, ".zst": 1}
    for wrong in ("c.csv", "d.txt.zst", "nowhere"):
        with pytest.raises(files.DataError, match="unpack others first"):
            files.find_files([tmp_path / wrong])


@pytest.mark.parametrize("pack", [lambda content: content, gzip.compress, lzma.compress])
def test_documents_and_why_others_cannot_be_used(tmp_path, pack):
    ending = {gzip.compress: ".gz", lzma.compress: ".xz"}.get(pack, "")
    lines = [
        b'\xef\xbb\xbf{"text": "\xc3\xbc\\n", "url": 1}', b"", b'{"text": "x"', b'{"txt": "x"}',
        b'{"text": 1}', b'["text"]', b'{"text": " \\n"}', b'{"text": "\xfc"}',
        b'{"text": "\\ud800"}', b'{"text": "last"}',
    ]  # fmt: skip
    path = tmp_path / f"a.json{ending}"
    path.write_bytes(pack(b"\n".join(lines)))
    found = list(files.read_documents(path))
    assert [document.text for document in found if not document.problem] == ["ü\n", "last"]
    assert found[-1].place == f"{path}:10"
    assert [document.problem for document in found[2:-1]] == [
        *["no object with a string `text`"] * 3, "the text is empty", *["not UTF-8"] * 2,
    ]  # fmt: skip
    assert "delimiter" in found[1].problem
    text = tmp_path / f"a.txt{ending}"
    text.write_bytes(pack(b'{"text":\n 1}'))
    assert list(files.read_documents(text)) == [files.Document(str(text), '{"text":\n 1}')]


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_a_torn_file_is_an_error_and_leaves_nothing(tmp_path, pack):
    path = tmp_path / f"a.json.{'gz' if pack is gzip.compress else 'xz'}"
    path.write_bytes(pack(loose("a", "b").encode())[:-9])
    with pytest.raises(files.DataError, match="cannot be read to its end"):
        files.merge([path], tmp_path / "merged", tmp_path / "unusable")
    assert list(tmp_path.iterdir()) == [path]


# Megatron's index


@pytest.mark.parametrize("size", [0, 33, -1])
def test_a_torn_index_is_refused(preparing, size):
    preparing.run_well()
    path = preparing.output / "webtext_text_document.idx"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(files.DataError, match="Not a whole index"):
        files.read_index(path)


# The whole


def test_text_becomes_tokens_and_arguments(preparing):
    said = preparing.run_well()
    prefix = preparing.output / "webtext_text_document"
    tokenizer = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(preparing.vocab)]
    tokenizer += ["--merge-file", str(preparing.merges)]
    assert said.splitlines()[-1] == " ".join(["--data-path", str(prefix), *tokenizer])
    assert "left out: 1 exact duplicates, 1 that cannot be used" in said
    assert "  3 documents, 21 tokens" in said
    (unusable,) = preparing.output.glob("*unusable*")
    assert unusable.read_text().startswith(f"{preparing.text / 'a.jsonl'}:4: ")
    assert preparing.command == [
        "--input", str(preparing.output / "webtext.jsonl"), *tokenizer,
        "--output-prefix", str(preparing.output / "part" / "webtext"), "--append-eod",
        "--workers", "3",
    ]  # fmt: skip
    assert preparing.documents == ["one", "two", "a whole\nfile"]
    assert not list(preparing.output.glob("*part*"))


def test_it_can_be_started_from_anywhere(tmp_path):
    script = LAUNCH / "prepare_webtext.py"
    assert os.access(script, os.X_OK)
    done = subprocess.run(
        [sys.executable, script, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "python launch/prepare_webtext.py collected/" in done.stdout


def test_a_tokenizer_with_a_switch_gets_it(preparing):
    preparing.behave("--vocab-file --legacy-tokenizer")
    assert preparing.run_well().endswith(" --legacy-tokenizer\n")
    assert "--legacy-tokenizer" in preparing.command


def test_without_a_tokenizer_of_its_own_it_gets_a_folder(preparing, monkeypatch):
    (preparing.checkout / "megatron" / "tokenizer" / "gpt2_tokenization.py").unlink()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "Install transformers" in preparing.run_badly()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "transformers")
    folder = preparing.output / "tokenizer"
    assert preparing.run_well().endswith(
        f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}\n"
    )
    assert (folder / "vocab.json").read_bytes() == preparing.vocab.read_bytes()
    assert (folder / "merges.txt").read_bytes() == preparing.merges.read_bytes()


def test_ends_that_are_not_counted_are_mended(preparing):
    index = preparing.output / "webtext_text_document.idx"
    preparing.run_well()
    right = index.read_bytes()
    index.unlink()
    preparing.behave("uncounted")
    preparing.run_well()
    assert preparing.documents == ["one", "two", "a whole\nfile"]
    assert index.read_bytes() == right


def test_triton_which_megatron_imports_unasked_is_stood_in_for(preparing, monkeypatch):
    hidden = preparing.folder / "sitecustomize.py"
    hidden.write_text("import sys; sys.modules['triton'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(preparing.folder), prepend=os.pathsep)
    (preparing.checkout / "megatron" / "kernels.py").write_text("import triton\n")
    tool = preparing.checkout / "tools" / "preprocess_data.py"
    tool.write_text(f"import megatron.kernels\n{PREPROCESS}")
    preparing.run_well()
    tool.write_text(f"import triton\n{PREPROCESS}")  # others than Megatron do without
    assert "triton" in preparing.run_badly()


def test_finished_steps_are_not_done_again(preparing):
    preparing.run_well()
    said = preparing.run_well()
    assert said.count("done before") == 2
    assert "  3 documents, 21 tokens" in said
    tokens = preparing.output / "webtext_text_document.bin"
    tokens.write_bytes(tokens.read_bytes()[:-2])
    assert "merge: done before\n" in (said := preparing.run_well())
    assert "tokenize: ...\n" in said
    (preparing.text / "c.json").write_text(loose("three"))
    assert "done before" not in preparing.run_well()
    assert preparing.documents == ["one", "two", "a whole\nfile", "three"]
    assert len(preparing.calls.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("dies", "ValueError: of a child"),
        ("hangs", "ValueError: of a child"),
        ("loses", "webtext_text_document.idx: 2 documents, and 3 went in"),
        ("ends", "document 0 does not end in <|endoftext|>"),
    ],
)
def test_what_is_not_whole_is_an_error(preparing, monkeypatch, how, said):
    monkeypatch.setattr(tools, "_GRACE_S", 0.0)
    preparing.behave(how)
    assert said in preparing.run_badly()
    assert not list(preparing.output.glob("webtext_text_document.*"))


def test_all_is_checked_before_anything_is_done(preparing):
    def refused(*words, **options):
        said = preparing.run_badly(*words, **options)
        assert not (preparing.output / "webtext.jsonl").exists()
        return said

    assert "--output lies in a folder" in refused(output=preparing.text / "new")
    preparing.behave("package")
    said = refused()
    assert "No module named 'six'" in said
    assert f"install it for {sys.executable}" in said
    preparing.behave("well")
    (preparing.text / "z.json").write_text(json.dumps([{"text": "a"}], indent=1))
    assert f"{preparing.text / 'z.json'}:1: " in refused()
    (preparing.text / "z.json").unlink()
    (preparing.checkout / "tools" / "preprocess_data.py").unlink()
    assert "has no tools/preprocess_data.py" in refused()


# Clean-up

KEEP = """
import json, sys
from tokenizer import Tokenizer
tokenizer = Tokenizer(cache_dir="./cache")
with open(sys.argv[1]) as texts, open(sys.argv[2], "w") as out:
    for line in texts:
        if len(tokenizer.tokenize_document(json.loads(line)["text"])) < 3:
            out.write(line)
"""


@pytest.fixture
def cleaning(preparing, monkeypatch):
    """A checkout that cleans up, with stand-ins of the packages that it takes."""
    packages = preparing.folder / "packages"
    (packages / "lsh").mkdir(parents=True)
    for name in ("ftfy", "regex", "lsh/__init__", "lsh/cache", "lsh/minhash"):
        (packages / f"{name}.py").touch()
    (packages / "langdetect.py").write_text("class DetectorFactory: pass")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("PYTHONPATH", os.fspath(packages))
    folder = preparing.checkout / "tools" / "openwebtext"
    folder.mkdir()
    (folder / "cleanup_dataset.py").write_text(KEEP)
    (folder / "find_duplicates.py").write_text(
        "import sys\nassert sys.argv[1::2] == ['--inputs', 'url', sys.argv[5]], sys.argv\n"
        "open(sys.argv[5], 'w').write(open(sys.argv[2]).readline())"
    )
    (folder / "group_duplicate_url.py").write_text(
        "import sys\nopen(sys.argv[2], 'w').write(open(sys.argv[1]).read())"
    )
    (folder / "remove_group_duplicates.py").write_text(
        "import sys\nout = open(sys.argv[3], 'w')\nfound = open(sys.argv[1]).read()\n"
        "out.writelines(line for line in open(sys.argv[2]) if line not in found)"
    )
    return preparing


def test_clean_up_runs_the_tools_of_the_checkout(cleaning):
    said = cleaning.run_well("--clean-up", cleaning.checkout)
    assert "  2 documents are English and long enough" in said
    assert "  1 documents are not similar to another" in said
    assert cleaning.documents == ["two"]
    assert cleaning.run_well("--clean-up", cleaning.checkout).count("done before") == 4
    assert "merge: done before" in (said := cleaning.run_well())
    assert "tokenize: ..." in said
    assert cleaning.documents == ["one", "two", "a whole\nfile"]


def test_clean_up_says_what_it_misses(cleaning):
    packages = cleaning.folder / "packages"
    (packages / "lsh" / "minhash.py").write_text("import no_such_module")
    said = cleaning.run_badly("--clean-up", cleaning.checkout)
    assert "misses packages (got lsh)" in said
    assert "USE_CYTHON = True" in said
    bare = cleaning.folder / "bare"
    bare.mkdir()
    said = cleaning.run_badly("--clean-up", bare)
    assert "Megatron-LM had it up to core_v0.12.0" in said
    assert not (cleaning.output / "webtext.jsonl").exists()
