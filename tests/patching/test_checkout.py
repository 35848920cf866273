"""Stock checkouts and forks, patched and reverted; by envpipe, git, hand, and another release."""

import errno
import json
import os
from pathlib import Path

import pytest
from patch_project import (
    NOBODY,
    by_hand,
    cloned,
    contents,
    copy_tree,
    edited_files,
    git,
    give_to_nobody,
    refused,
    snapshot,
    stock_files,
    write_tree,
)

from envpipe_megatron.patching.catalog import patch_file, sha256
from envpipe_megatron.patching.checkout import (
    RECORD_NAME,
    GitError,
    State,
    apply_patch,
    look_at,
    revert_patch,
)


@pytest.mark.parametrize(("minor", "clone"), [(0, False), (1, True)])
def test_apply_makes_the_edited_bytes_and_revert_the_stock_ones(tmp_path, catalog, minor, clone):
    root = write_tree(tmp_path / "checkout", stock_files(minor))
    if clone:
        cloned(root)
    before = snapshot(root)
    assert revert_patch(root)[1] == ()
    assert snapshot(root) == before
    found, files = apply_patch(root)
    assert found.patch.tag == f"v1.{minor}"
    after = snapshot(root)
    assert {path: content.encode() for path, content in edited_files(minor).items()} == {
        path: (root / path).read_bytes() for path in edited_files(minor)
    }
    assert set(after) - set(before) == {RECORD_NAME, "toy/training/envpipe.py"}
    assert {path: mode for path, (mode, _) in after.items() if path in before} == {
        path: mode for path, (mode, _) in before.items()
    }
    assert look_at(root).state is State.PATCHED
    assert apply_patch(root)[1] == ()
    assert snapshot(root) == after

    assert set(revert_patch(root)[1]) == set(files)
    assert snapshot(root) == before


def test_git_apply_makes_the_same_bytes_and_is_known_and_reverted(checkout, catalog, tmp_path):
    cloned(checkout)
    before = contents(checkout)
    other = copy_tree(checkout, tmp_path / "other")
    by_hand(checkout, catalog[0])
    assert look_at(checkout).state is State.PATCHED
    assert apply_patch(checkout)[1] == ()
    apply_patch(other)
    (other / RECORD_NAME).unlink()
    assert contents(other) == contents(checkout)
    revert_patch(checkout)
    assert contents(checkout) == before
    # The other way round: what envpipe applied, git takes back.
    by_hand(other, catalog[0], "-R")
    assert look_at(other).state is State.STOCK


# --- what is around a checkout -------------------------------------------------------------------


def test_a_folder_of_another_repository_is_patched_too(checkout):
    """There `git apply` itself does nothing, and says that all is well."""
    git(checkout.parent, "init", "-q")
    assert look_at(checkout).state is State.STOCK
    assert apply_patch(checkout)[1]
    assert look_at(checkout).state is State.PATCHED
    assert revert_patch(checkout)[1]


def test_settings_of_git_change_nothing(checkout, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # in a repository
    git(write_tree(tmp_path, {".gitattributes": "* text eol=crlf\n"}), "init", "-q", ".")
    settings = "[core]\nautocrlf = true\n[apply]\nwhitespace = error-all\nignoreWhitespace = change"
    write_tree(tmp_path, {".gitconfig": settings})
    before = snapshot(checkout)
    apply_patch(checkout)
    assert {path: (checkout / path).read_bytes().decode() for path in edited_files(0)} == (
        edited_files(0)
    )
    revert_patch(checkout)
    assert snapshot(checkout) == before


def test_where_git_does_not_run_nothing_is_done_and_it_is_said(checkout, tmp_path, monkeypatch):
    said = "git: error while loading shared libraries: libpcre2-8.so.0"
    script = f"#!/bin/sh\necho '{said}' >&2\nexit 127\n"
    (write_tree(tmp_path / "bin", {"git": script}) / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    before = snapshot(checkout)
    for do in (look_at, apply_patch, revert_patch):
        with pytest.raises(GitError, match=r"`git apply`, which cannot be run.*Install git"):
            do(checkout)
    assert snapshot(checkout) == before


@pytest.mark.parametrize("do", [apply_patch, revert_patch])
def test_a_full_disk_leaves_the_old_tree(checkout, monkeypatch, do):
    """There `git apply` itself cuts a file off."""
    if do is revert_patch:
        apply_patch(checkout)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = snapshot(checkout)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        do(checkout)
    assert snapshot(checkout) == before


def test_what_a_stop_leaves_is_named_and_put_back(checkout, monkeypatch):
    apply_patch(checkout)
    patched = snapshot(checkout)
    revert_patch(checkout)
    replace = Path.replace

    def fails_at_run_sh(draft, place):
        if place.name == "run.sh":
            raise OSError(errno.EIO, "Input/output error")
        return replace(draft, place)

    with monkeypatch.context() as stopping:
        stopping.setattr(Path, "replace", fails_at_run_sh)
        with pytest.raises(OSError, match="Input/output"):
            apply_patch(checkout)
    assert not list(checkout.rglob("*.new"))
    for do in (apply_patch, revert_patch):
        refused(do, checkout, "run.sh (changed: no place", "put the files of commit 111111111111")
    write_tree(checkout, stock_files(0))
    assert apply_patch(checkout)[1]
    assert snapshot(checkout) == patched


def test_reverting_takes_away_new_files_that_were_left(checkout, monkeypatch):
    """By a revert that was stopped, or by `git checkout`, which puts back only what it knows."""
    before = snapshot(checkout)
    apply_patch(checkout)
    unlink = Path.unlink

    def stop(path, **missing):
        if path.name == "envpipe.py":
            raise KeyboardInterrupt
        unlink(path, **missing)

    with monkeypatch.context() as stopping:
        stopping.setattr(Path, "unlink", stop)
        with pytest.raises(KeyboardInterrupt):
            revert_patch(checkout)
    assert look_at(checkout).state is State.STOCK
    assert revert_patch(checkout)[1] == ("toy/training/envpipe.py",)
    assert snapshot(checkout) == before


# --- forks and own edits -------------------------------------------------------------------------


def edit(root, path, old, new):
    content = (root / path).read_bytes()
    assert content.count(old.encode()) == 1
    (root / path).write_bytes(content.replace(old.encode(), new.encode()))


def test_a_fork_is_patched_where_the_lines_are_and_keeps_its_own(checkout):
    edit(checkout, "toy/schedules.py", '    return "plain"', '    # fork\n    return "plain"')
    edit(checkout, "run.sh", "-m toy\n", "-m toy\necho fork\n")
    (checkout / "untouched.txt").write_text("of the fork")
    stock = snapshot(checkout)
    found, _ = apply_patch(checkout)
    assert found.forked == {"toy/schedules.py", "run.sh"}
    schedules = (checkout / "toy/schedules.py").read_text()
    assert '    # fork\n    return "plain"' in schedules
    assert "        chosen = envpipe_hook(chosen)\n    return chosen\n\n\ndef other" in schedules
    assert look_at(checkout).state is State.PATCHED
    assert apply_patch(checkout)[1] == ()
    revert_patch(checkout)
    assert snapshot(checkout) == stock


def test_edits_after_the_patch_are_kept(checkout):
    apply_patch(checkout)
    plain = '    return "plain"'
    edit(checkout, "toy/schedules.py", plain, f"    # mine\n{plain}")
    assert look_at(checkout).state is State.PATCHED
    assert revert_patch(checkout)[1]
    edit(checkout, "toy/schedules.py", "    # mine\n", "")
    assert (checkout / "toy/schedules.py").read_text() == stock_files(0)["toy/schedules.py"]
    assert (checkout / "run.sh").read_text() == stock_files(0)["run.sh"]
    apply_patch(checkout)


def test_a_fork_that_the_patch_does_not_fit_is_refused_by_name(checkout):
    edit(checkout, "run.sh", "echo start\n", "echo other\n")
    (checkout / "toy/training/loop.py").unlink()
    named = ("run.sh (changed: no place for the lines near 1)", "toy/training/loop.py (missing)")
    put = "Put the files of commit 111111111111 back, then apply again"
    refused(apply_patch, checkout, "Toy v1.0 does not fit", *named, put)
    assert look_at(checkout).state is State.DIRTY
    before = snapshot(checkout)
    assert revert_patch(checkout)[1] == ()
    assert snapshot(checkout) == before


def test_line_ends_that_git_turned_are_told_from_edits(checkout):
    file = checkout / "toy/schedules.py"
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    refused(apply_patch, checkout, "every line ends in CRLF", "core.autocrlf")


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("run.sh", "echo started", "echo mine"),
        ("toy/training/envpipe.py", "return None", "return 1"),
        ("toy/training/envpipe.py", "return None\n", "return None\n# mine\n"),
    ],
)
def test_changed_lines_of_the_patch_are_refused(checkout, path, old, new):
    apply_patch(checkout)
    edit(checkout, path, old, new)
    for do in (apply_patch, revert_patch):
        refused(do, checkout, "own lines or files were changed", f"{path} (changed")
    assert look_at(checkout).state is State.CHANGED_AFTER
    edit(checkout, path, new, old)
    assert revert_patch(checkout)[1]


@pytest.mark.parametrize("do", [apply_patch, revert_patch, look_at])
def test_an_unknown_version_is_refused_with_what_is_supported(checkout, do):
    names = ["Toy v1.0 (commit 1111111)", "Toy v1.1 (commit 2222222)"]
    (checkout / "toy/version.py").write_text("MAJOR = 2\nMINOR = 0\n")
    refused(do, checkout, "MAJOR = 2, MINOR = 0", f"nearest first: {', '.join(names)}", "--tag")
    (checkout / "toy/schedules.py").write_text(stock_files(1)["toy/schedules.py"])
    (checkout / "toy/version.py").write_text("not python (")
    refused(do, checkout, "toy/version.py is another", f"first: {', '.join(reversed(names))}")
    refused(do, checkout / "toy", "Give the root folder", *names)


def test_a_branch_between_versions_takes_the_patch_that_its_files_have_place_for(checkout):
    (checkout / "toy/schedules.py").write_text(stock_files(1)["toy/schedules.py"])
    found, _ = apply_patch(checkout)
    assert (found.patch.tag, found.state, found.forked) == ("v1.1", State.STOCK, set())
    assert revert_patch(checkout)[0].patch.tag == "v1.1"
    (checkout / "toy/schedules.py").write_text("neither\n")
    refused(apply_patch, checkout, "The patch for Toy v1.0 does not fit", "1111111")


# --- other versions of the patch -----------------------------------------------------------------


def test_what_an_older_release_patched_is_reverted_from_its_record(checkout, install, modules):
    stock = snapshot(checkout)
    apply_patch(checkout)
    install(modules)
    refused(apply_patch, checkout, "Another version of the patch", "revert")
    found = look_at(checkout)
    assert (found.state, patch_file(found.patch)) == (State.PATCHED, None)
    revert_patch(checkout)
    assert snapshot(checkout) == stock
    assert patch_file(look_at(checkout).patch)


def test_a_record_that_outlived_its_patch_is_replaced(checkout, catalog, patches, install, modules):
    apply_patch(checkout)
    by_hand(checkout, catalog[0], "-R")
    install(modules)
    found = look_at(checkout)
    assert found.state is State.STOCK
    assert revert_patch(checkout)[1] == ()
    assert not (checkout / RECORD_NAME).exists()
    install(patches)
    apply_patch(checkout)
    by_hand(checkout, catalog[0], "-R")
    install(modules)
    apply_patch(checkout)
    assert look_at(checkout).state is State.PATCHED


def test_another_tag_checked_out_over_the_patch_is_patched_anew(checkout):
    apply_patch(checkout)
    write_tree(checkout, stock_files(1))  # git leaves the new file and the record
    found, files = apply_patch(checkout)
    assert (found.patch.tag, found.state) == ("v1.1", State.STOCK)
    assert "toy/training/envpipe.py" in files
    assert look_at(checkout).state is State.PATCHED


def test_another_version_that_was_applied_by_hand_is_thought_of(checkout, catalog):
    by_hand(checkout, catalog[0])
    for file, ours in (("run.sh", "started"), ("toy/schedules.py", "if envpipe_hook:")):
        edit(checkout, file, ours, "if envpipe_other:")
    another = "If another version of the patch was applied by hand, `git apply -R` of that one"
    for do in (apply_patch, revert_patch):
        refused(do, checkout, another)
    # Lines of ours where this patch would fit: they are not added twice.
    write_tree(checkout, stock_files(0))
    edit(checkout, "toy/schedules.py", "def plain", "import envpipe_megatron\ndef plain")
    refused(apply_patch, checkout, "own lines or files were changed", another)


@pytest.mark.parametrize("version", ["MINOR = 17", "MINOR = 1", "MINOR = None"])
def test_an_edited_version_does_not_hide_the_recorded_patch(checkout, catalog, version):
    stock = contents(checkout)
    apply_patch(checkout)
    edit(checkout, "toy/version.py", "MINOR = 0", version)
    found = look_at(checkout)
    assert (found.patch, found.state) == (catalog[0], State.PATCHED)
    assert apply_patch(checkout)[1] == ()
    assert revert_patch(checkout)[1]
    edit(checkout, "toy/version.py", version, "MINOR = 0")
    assert contents(checkout) == stock


@pytest.mark.parametrize("carried", [{}, {"toy/schedules.py": "other = True\n"}])
def test_what_was_left_behind_does_not_make_another_version_known(checkout, carried):
    apply_patch(checkout)
    # The new files alone, or all but one that the other version has otherwise.
    version = {"toy/version.py": "MAJOR = 2\nMINOR = 0\n"}
    write_tree(checkout, (carried or stock_files(0)) | version)
    refused(apply_patch, checkout, "MAJOR = 2, MINOR = 0")


@pytest.mark.parametrize("text", ["", "[]", '{"format": "envpipe-patch-record/1"}'])
def test_a_damaged_record_is_named(checkout, text):
    apply_patch(checkout)
    (checkout / RECORD_NAME).write_text(text)
    refused(revert_patch, checkout, RECORD_NAME, "damaged", "Remove it")
    (checkout / RECORD_NAME).unlink()
    assert revert_patch(checkout)[1]


@pytest.mark.parametrize("path", ["../run.sh", "/run.sh", "toy/../../run.sh"])
def test_a_record_cannot_lead_out_of_the_checkout(checkout, catalog, path):
    apply_patch(checkout)
    patch = catalog[0].text.decode().replace("b/run.sh", f"b/{path}")
    hashed = catalog[0].description.replace(sha256(catalog[0].text), sha256(patch.encode()))
    description = hashed.replace('"run.sh"', f'"{path}"')
    record = {"format": "envpipe-patch-record/1", "description": description, "patch": patch}
    (checkout / RECORD_NAME).write_text(json.dumps(record))
    refused(revert_patch, checkout, f"{path} leads out of the checkout")


# --- links and rights ----------------------------------------------------------------------------


@pytest.mark.parametrize("linked", ["toy/training", "run.sh"])
def test_a_checkout_whose_files_lie_elsewhere_is_refused(checkout, tmp_path, linked):
    elsewhere = tmp_path / "elsewhere"
    (checkout / linked).rename(elsewhere)
    (checkout / linked).symlink_to(elsewhere)
    kept = elsewhere.stat().st_mtime_ns
    refused(apply_patch, checkout, "symbolic link", str(elsewhere))
    assert elsewhere.stat().st_mtime_ns == kept


def test_links_to_the_checkout_and_of_its_files_are_respected(checkout, tmp_path):
    (tmp_path / "link").symlink_to(checkout)
    twin = tmp_path / "twin.sh"
    os.link(checkout / "run.sh", twin)
    apply_patch(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert look_at(checkout).state is State.PATCHED
    assert twin.read_text() == stock_files(0)["run.sh"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_root_leaves_a_checkout_to_its_user(checkout):
    give_to_nobody(checkout)
    before = snapshot(checkout)
    umask = os.umask(0o027)
    apply_patch(checkout)
    os.umask(umask)
    assert (checkout / "toy/training/envpipe.py").stat().st_mode & 0o777 == 0o640
    assert (checkout / "run.sh").stat().st_uid == NOBODY
    revert_patch(checkout)
    assert snapshot(checkout) == before
    assert (checkout / "run.sh").stat().st_uid == NOBODY
