"""The files of `prepare_webtext.py`: GPT-2's vocabulary, collected text, and Megatron's index."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import lzma
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import written_beside

END_OF_DOCUMENT = "<|endoftext|>"
_LINES, _TEXT = (".json", ".jsonl"), ".txt"
_PACKED = (".gz", ".xz")
#: Lines of a file that are looked at before hours of work.
_LOOKED_AT = 20
#: Of Megatron's index: what it begins with, and the types that tokens can have, by their number.
_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_HEADER = np.dtype([("magic", "S9"), ("version", "<u8"), ("type", "u1"), ("counts", "<u8", 2)])
_TOKEN_TYPES: dict[int, np.dtype[Any]] = {4: np.dtype("<i4"), 8: np.dtype("<u2")}


class DataError(EnvPipeError):
    """Text, vocabulary or tokens that cannot be trained with."""


# Vocabulary


def bytes_of_alphabet() -> dict[str, int]:
    """The byte that each character of GPT-2's alphabet stands for.

    Printable bytes of Latin-1 stand for themselves, the others for characters from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


def check_vocabulary(vocab: Path, merges: Path) -> dict[str, int]:
    """Read the number of each of GPT-2's tokens, and check that the merges belong to them.

    Raises DataError where a file is of another format, or they do not belong together.
    """

    def refuse(what: str) -> DataError:
        remedy = "Give gpt2-vocab.json, and the gpt2-merges.txt that belongs to it."
        return DataError(what, remedy=remedy)

    try:
        numbers = json.loads(vocab.read_text("utf-8"))
        first, *lines = merges.read_text("utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise refuse(f"{vocab} or {merges} cannot be read: {error}") from error
    if not isinstance(numbers, dict) or sorted(map(str, numbers.values())) != sorted(
        map(str, range(len(numbers)))
    ):
        raise refuse(f"{vocab}: tokens are not numbered from 0 without a gap")
    if missing := {*bytes_of_alphabet(), END_OF_DOCUMENT} - numbers.keys():
        raise refuse(f"{vocab}: a token of GPT-2's is missing: {min(missing)}")
    # Megatron takes neither the first line nor what is behind the last end of a line.
    if not first.startswith("#version") or len(lines) < 2 or lines[-1]:
        raise refuse(f"{merges}: does not begin with #version, or its last line has no end")
    for number, line in enumerate(lines[:-1], 2):
        merge = line.split(" ")
        if len(merge) != 2 or not {*merge, "".join(merge)} <= numbers.keys():
            raise refuse(f"{merges}:{number}: not two tokens of {vocab} that make a third: {line}")
    return numbers


# Collected text


@dataclass(frozen=True)
class Document:
    """A text that was found at a place, file and line, or the problem why it cannot be used."""

    place: str
    text: str
    problem: str = ""


def find_files(inputs: Sequence[Path]) -> tuple[list[Path], Counter[str]]:
    """Find the files of text in files and folders.

    Returns the files, each once, in the order of the inputs and by name in a folder; and how many
    files of which endings were passed by. Raises DataError where there are none, or a file that was
    named has another ending.
    """
    remedy = (
        f"Text is in files that end in {', '.join((*_LINES, _TEXT))}, packed or not "
        f"({', '.join(_PACKED)}); unpack others first."
    )
    files: dict[Path, Path] = {}
    ignored: Counter[str] = Counter()
    for given in inputs:
        if given.is_dir():
            found = sorted(path for path in given.rglob("*") if path.is_file())
        elif given.is_file() and _kind(given):
            found = [given]
        else:
            raise DataError("Not a folder, and no file of text", value=str(given), remedy=remedy)
        for path in found:
            if _kind(path):
                files.setdefault(path.resolve(), path)
            else:
                ignored[path.suffix or path.name] += 1
    if not files:
        raise DataError("No file of text", value=[str(path) for path in inputs], remedy=remedy)
    return list(files.values()), ignored


def _kind(path: Path) -> str:
    """The ending that tells what a file holds, or none."""
    suffix = (path.with_suffix("") if path.suffix in _PACKED else path).suffix
    return suffix if suffix in (*_LINES, _TEXT) else ""


def check_files(files: Sequence[Path]) -> None:
    """Refuse a file of JSON none of whose first documents can be used."""
    for path in (path for path in files if _kind(path) in _LINES):
        first = list(itertools.islice(read_documents(path), _LOOKED_AT))
        if first and all(document.problem for document in first):
            raise DataError(
                f"{first[0].place}: {first[0].problem}, and so on for {len(first)} documents",
                remedy='It needs an object a line, {"text": "..."}: convert it, or take it away.',
            )


def read_documents(path: Path) -> Iterator[Document]:
    """Read a file's documents, also those that cannot be used; empty lines are none.

    Raises DataError where it cannot be read to its end.
    """
    open_file: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    try:
        with open_file(path, "rb") as stream:
            if _kind(path) == _TEXT:
                yield _document(str(path), stream.read(), is_json=False)
                return
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield _document(f"{path}:{number}", line, is_json=True)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(
            f"{path}: cannot be read to its end: {error}",
            remedy="Fetch it again, or take it away.",
        ) from error


def _document(place: str, content: bytes, is_json: bool) -> Document:
    try:
        text: Any = content.decode("utf-8-sig")
        if is_json:
            line = json.loads(text)
            text = line.get("text") if isinstance(line, dict) else None
            if not isinstance(text, str):
                raise ValueError("no object with a string `text`")
        text.encode()  # JSON can spell half of a surrogate pair, which is no text
    except UnicodeError:
        return Document(place, "", "not UTF-8")
    except (ValueError, RecursionError) as error:
        return Document(place, "", str(error))
    return Document(place, text) if text.strip() else Document(place, "", "the text is empty")


# Merging


def merge(files: Sequence[Path], merged: Path, unusable: Path) -> dict[str, int]:
    """Merge all documents into one file of loose JSON, each text once.

    A line is `{"text": ..., "url": ...}`, as Megatron's tools want it; `url` is file and line: they
    ask for another one in each line.

    `unusable` gets place and problem of each document that cannot be used. Returns the numbers of
    `documents`, of exact `duplicates`, and of those `unusable`; raises DataError where a file
    cannot be read to its end, or there is no document at all.
    """
    seen: set[bytes] = set()
    found: Counter[str] = Counter(documents=0, duplicates=0, unusable=0)
    with (
        written_beside(merged) as draft,
        written_beside(unusable) as problems,
        draft.open("w", encoding="ascii") as lines,
        problems.open("w", encoding="utf-8", errors="backslashreplace") as listed,
    ):
        for document in itertools.chain.from_iterable(map(read_documents, files)):
            digest = hashlib.blake2b(document.text.encode(), digest_size=16).digest()
            if document.problem:
                found["unusable"] += 1
                listed.write(f"{document.place}: {document.problem}\n")
            elif digest in seen:
                found["duplicates"] += 1
            else:
                seen.add(digest)
                found["documents"] += 1
                lines.write(json.dumps({"text": document.text, "url": document.place}) + "\n")
        if not seen:
            raise DataError("No document with a text", value=[str(path) for path in files])
    return dict(found)


def count_lines(path: Path) -> int:
    """Count the documents of a merged file."""
    with path.open("rb") as stream:
        return sum(1 for _ in stream)


# Megatron's index


@dataclass(frozen=True)
class Index:
    """An index of tokens (.idx), as Megatron-LM and Megatron-DeepSpeed write it.

    Attributes:
        content: of the file; the arrays are views of it.
        lengths: tokens of each sequence, shape (sequences,).
        starts: the first byte of each sequence, shape (sequences,).
        documents: the first sequence of each document, and one behind the last, shape
            (documents + 1,).
    """

    content: bytearray
    token_type: np.dtype[Any]
    lengths: np.ndarray
    starts: np.ndarray
    documents: np.ndarray

    @property
    def ends(self) -> np.ndarray:
        """The place behind each sequence's last token, in tokens, shape (sequences,)."""
        return np.cumsum(self.lengths, dtype=np.int64)


def read_index(path: Path) -> Index:
    """Read an index; DataError if it is not one, or not whole."""
    content = bytearray(path.read_bytes())
    size = _HEADER.itemsize
    header = np.frombuffer(content[:size].ljust(size, b"\0"), _HEADER)[0]
    sequences, documents = map(int, header["counts"])
    if (
        bytes(header["magic"]) != _MAGIC.rstrip(b"\0")
        or int(header["version"]) != _VERSION
        or int(header["type"]) not in _TOKEN_TYPES
        or len(content) != size + (4 + 8) * sequences + 8 * documents
    ):
        raise DataError("Not a whole index of Megatron's", value=str(path))
    return Index(
        content,
        _TOKEN_TYPES[int(header["type"])],
        np.frombuffer(content, "<i4", sequences, size),
        np.frombuffer(content, "<i8", sequences, size + 4 * sequences),
        np.frombuffer(content, "<i8", documents, size + (4 + 8) * sequences),
    )


def check_tokens(prefix: Path, num_documents: int, end_of_document: int) -> int:
    """Check that tokens and index are whole, and repair an index that leaves out documents' ends.

    Megatron-DeepSpeed (4efb479) appends the end to each document's tokens and does not count it in
    the document's length: the n-th document would begin n tokens too early.

    Returns how many tokens there are. Raises DataError where documents are missing, or do not end
    where the index says so.
    """
    idx, bin_ = (prefix.with_name(f"{prefix.name}.{ending}") for ending in ("idx", "bin"))
    for path in (idx, bin_):
        if not path.is_file():
            raise DataError("Megatron's preprocessing ended without it", value=str(path))
    index = read_index(idx)
    if len(index.documents) != num_documents + 1:
        raise DataError(f"{idx}: {len(index.documents) - 1} documents, and {num_documents} went in")
    token_bytes = index.token_type.itemsize
    num_tokens, rest = divmod(bin_.stat().st_size, token_bytes)
    if num_tokens == int(index.lengths.sum()) + len(index.lengths):
        index.lengths[:] += 1
        index.starts[:] = (index.ends - index.lengths) * token_bytes
        with written_beside(idx) as draft:
            draft.write_bytes(index.content)
    if rest or num_tokens != int(index.lengths.sum()):
        raise DataError(f"{bin_}: {num_tokens} tokens, and {int(index.lengths.sum())} in the index")
    tokens = np.memmap(bin_, index.token_type, "r")
    wrong = np.flatnonzero(tokens[index.ends - 1] != end_of_document)
    if len(wrong):
        raise DataError(f"{bin_}: document {wrong[0]} does not end in {END_OF_DOCUMENT}")
    return num_tokens
