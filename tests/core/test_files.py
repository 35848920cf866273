"""Reading text, and replacing files whole."""

import os
from pathlib import Path

import pytest

from envpipe_megatron import files
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import read_text, refuse_foreign, replace_files, shipped_folder


def left(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def breaking():
    yield "half"
    raise OSError(28, "No space left on device")


def test_files_are_written_and_replaced(tmp_path):
    (tmp_path / "a").write_text("old and longer")
    replace_files({tmp_path / "a": ["ne", "w"], tmp_path / "b": ["é"]})
    assert left(tmp_path) == {"a": "new", "b": "é"}


def test_a_failed_write_leaves_all_files_as_they_were(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(OSError, match="No space") as caught:
        replace_files({tmp_path / "a": ["new"], tmp_path / "b": breaking()})
    assert caught.value.filename == str(tmp_path / "b")
    assert left(tmp_path) == {"a": "old"}


def test_a_read_only_folder_is_named_by_the_file_that_was_to_be_in_it(tmp_path, monkeypatch):
    """Linux refuses to remove what is not there, too."""

    def refuse(path, *args, **kwargs):
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OSError, match="Read-only") as caught:
        replace_files({tmp_path / "a": ["new"]})
    assert caught.value.filename == str(tmp_path / "a")


def test_links_modes_and_devices_stay_what_they_are(tmp_path):
    target = tmp_path / "target"
    target.write_text("old")
    target.chmod(0o640)
    (tmp_path / "link").symlink_to("target")
    replace_files({tmp_path / "link": ["new"], tmp_path / "dangling": ["x"]})
    assert (tmp_path / "link").is_symlink()
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("new", 0o640)
    device = tmp_path / "device"
    device.symlink_to("/dev/null")
    replace_files({device: ["gone"]})
    assert device.is_char_device()


def test_an_owner_that_the_container_does_not_know_stops_no_write(tmp_path, monkeypatch):
    def refuse(path, uid, gid):
        raise OSError(22, "Invalid argument")  # as in a user namespace without this owner

    monkeypatch.setattr(os, "chown", refuse)
    (tmp_path / "a").write_text("old")
    replace_files({tmp_path / "a": ["new"]})
    assert left(tmp_path) == {"a": "new"}


def test_a_text_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    path, synced = tmp_path / "a", []
    path.write_text("old")
    monkeypatch.setattr(
        os, "fsync", lambda file: synced.append((os.fstat(file).st_size, path.read_text()))
    )
    replace_files({path: ["longer"]})
    assert synced == [(len("longer"), "old")]


def test_a_file_that_may_not_be_written_is_not_replaced(tmp_path, monkeypatch):
    path = tmp_path / "kept"
    path.write_text("old")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everything
    with pytest.raises(PermissionError) as caught:
        replace_files({path: ["new"]})
    assert caught.value.filename == str(path)
    assert left(tmp_path) == {"kept": "old"}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_text_is_read_with_and_without_a_mark(tmp_path, encoding):
    (tmp_path / "text").write_text("é,1", encoding=encoding)
    assert read_text(tmp_path / "text") == "é,1"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("é,1".encode("utf-16"), "UTF-16; save it as UTF-8"),
        (b"a\nb,\xe9", "line 2 is not UTF-8; save"),
        (b"\n\xe9\n", "line 2 is not UTF-8; save"),
    ],
)
def test_other_encodings_are_told_what_to_do(tmp_path, content, said):
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read_text(tmp_path / "text")


def test_files_of_the_same_names_need_the_mark(tmp_path):
    refuse_foreign(tmp_path / "new", ["index.html"], "trace")
    refuse_foreign(tmp_path, ["index.html"], "trace")
    (tmp_path / "index.html").touch()
    with pytest.raises(EnvPipeError, match=r"index\.html"):
        refuse_foreign(tmp_path, ["index.html"], "trace")
    (tmp_path / "trace").touch()
    refuse_foreign(tmp_path, ["index.html"], "trace")


def test_files_whose_long_names_begin_alike_are_two(tmp_path):
    name = "gpt3-175b-a100-sxm-tensor8-pipeline8-microbatch4-2026-profile"
    replace_files({tmp_path / f"{name}.csv": ["table"], tmp_path / f"{name}.json": ["facts"]})
    assert left(tmp_path) == {f"{name}.csv": "table", f"{name}.json": "facts"}


def test_a_pipe_is_written_into_by_any_name_of_it():
    reads, writes = os.pipe()
    with os.fdopen(reads) as told:
        replace_files({Path(f"/dev/fd/{writes}"): ["through"]})
        os.close(writes)
        assert told.read() == "through"


def test_where_files_that_come_with_the_package_are(tmp_path, monkeypatch):
    """Beside the installed package's modules, or in the checkout that it is run from."""
    package = tmp_path / "checkout" / "envpipe_megatron"
    monkeypatch.setattr(files, "__file__", str(package / "files.py"))
    assert shipped_folder("configs/gpus") == tmp_path / "checkout" / "configs" / "gpus"
    (package / "configs" / "gpus").mkdir(parents=True)
    assert shipped_folder("configs/gpus") == package / "configs" / "gpus"
