import json
import os

import pytest
from patch_project import (
    NOBODY,
    by_hand,
    cloned,
    contents,
    edited_files,
    give_to_nobody,
    in_child,
    refused,
    snapshot,
    stock_files,
    write_tree,
)

from envpipe_megatron.patching import operations
from envpipe_megatron.patching.checkout import TreeState
from envpipe_megatron.patching.journal import JOURNAL_NAME
from envpipe_megatron.patching.operations import apply_patch, revert_patch, status
from envpipe_megatron.patching.unified_diff import PatchError

RECORD = ".envpipe-patch.json"


@pytest.mark.parametrize("minor", [0, 1])
@pytest.mark.parametrize("clone", [False, True])
def test_apply_makes_the_edited_bytes_and_revert_the_stock_ones(tmp_path, catalog, minor, clone):
    root = write_tree(tmp_path / "checkout", stock_files(minor))
    if clone:
        cloned(root)
    before = snapshot(root)
    outcome = apply_patch(root, catalog)
    assert outcome.patch.tag == f"v1.{minor}"
    after = snapshot(root)
    assert {path: content.encode() for path, content in edited_files(minor).items()} == {
        path: (root / path).read_bytes() for path in edited_files(minor)
    }
    assert set(after) - set(before) == {
        RECORD,
        "toy/new",
        "toy/new/parts",
        "toy/new/parts/__init__.py",
        "toy/new/parts/envpipe.py",
    }
    assert {path: mode for path, (mode, _) in after.items() if path in before} == {
        path: mode for path, (mode, _) in before.items()
    }
    assert status(root, catalog).seen.tree is TreeState.PATCHED

    reverted = revert_patch(root, catalog)
    assert set(reverted.files) == set(outcome.files)
    assert snapshot(root) == before


def test_the_record_says_what_was_done(checkout, catalog):
    apply_patch(checkout, catalog)
    record = json.loads((checkout / RECORD).read_text())
    patch = catalog[0]
    assert record["format"] == "envpipe-patch-record/1"
    assert (record["tag"], record["patch_sha256"]) == (patch.tag, patch.sha256)
    assert record["envpipe_megatron"]
    assert {file["path"]: file["sha256_before"] for file in record["files"]} == {
        file.path: file.before or None for file in patch.files
    }


def test_git_apply_makes_the_same_bytes_and_is_known_and_reverted(checkout, catalog, copies):
    cloned(checkout)
    before = contents(checkout)
    other = copies(checkout)
    by_hand(checkout, catalog[0])
    assert status(checkout, catalog).seen.tree is TreeState.PATCHED
    assert apply_patch(checkout, catalog).files == ()
    apply_patch(other, catalog)
    (other / RECORD).unlink()
    assert contents(other) == contents(checkout)
    revert_patch(checkout, catalog)
    assert contents(checkout) == before
    # The other way round: what envpipe applied, git takes back.
    by_hand(other, catalog[0], "-R")
    assert status(other, catalog).seen.tree is TreeState.STOCK


def test_git_need_not_be_installed(checkout, catalog, monkeypatch, tmp_path):
    cloned(checkout)
    monkeypatch.setenv("PATH", str(tmp_path))
    before = snapshot(checkout)
    apply_patch(checkout, catalog)
    revert_patch(checkout, catalog)
    assert snapshot(checkout) == before


def test_the_second_time_does_nothing(checkout, catalog):
    stock = snapshot(checkout)
    assert revert_patch(checkout, catalog).files == ()
    assert snapshot(checkout) == stock
    apply_patch(checkout, catalog)
    patched = snapshot(checkout)
    assert apply_patch(checkout, catalog).files == ()
    assert snapshot(checkout) == patched


def test_a_new_file_gets_the_users_own_mode(checkout, catalog):
    def with_umask():
        os.umask(0o027)
        apply_patch(checkout, catalog)

    in_child(with_umask)
    assert (checkout / "toy/new/parts/envpipe.py").stat().st_mode & 0o777 == 0o640


# --- refusals change nothing ---------------------------------------------------------------------


@pytest.mark.parametrize("do", [apply_patch, revert_patch, status])
def test_an_unknown_version_is_refused_with_what_is_supported(checkout, catalog, do):
    supported = ("Toy v1.0 (commit 1111111)", "Toy v1.1 (commit 2222222)")
    (checkout / "toy/version.py").write_text("MAJOR = 2\nMINOR = 0\n")
    refused(do, checkout, catalog, "MAJOR = 2, MINOR = 0", *supported)
    (checkout / "toy/version.py").write_text("not python (")
    refused(do, checkout, catalog, "toy/version.py is another", *supported)
    refused(do, checkout / "toy", catalog, "Give the root folder", *supported)


def test_changed_files_are_named(checkout, catalog):
    (checkout / "run.sh").write_text("#!/bin/sh\n")
    (checkout / "toy/training/loop.py").unlink()
    named = ("run.sh (changed)", "toy/training/loop.py (missing)")
    refused(apply_patch, checkout, catalog, "differ from those of Toy v1.0", *named)
    assert status(checkout, catalog).seen.tree is TreeState.DIRTY


def test_a_file_in_the_way_of_a_new_one_is_to_be_moved(checkout, catalog):
    write_tree(checkout, {"toy/new/parts/envpipe.py": "mine = True\n"})
    move = "ove toy/new/parts/envpipe.py away, which commit 111111111111 does not have"
    told = refused(
        apply_patch, checkout, catalog, "envpipe.py (changed)", f"M{move}, then apply again"
    )
    assert "back" not in told
    (checkout / "run.sh").write_text("mine\n")
    put = "ut the files of commit 111111111111 back"
    refused(apply_patch, checkout, catalog, f"P{put} and m{move}, then apply again")


def test_revert_of_what_holds_no_patch_does_not_say_apply(checkout, catalog):
    (checkout / "run.sh").write_text("mine\n")
    put = "put the files of commit 111111111111 back"
    told = refused(revert_patch, checkout, catalog, "The patch is not in", put)
    assert "again" not in told


def test_line_ends_that_git_turned_are_told_from_edits(checkout, catalog):
    file = checkout / "toy/schedules.py"
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    refused(apply_patch, checkout, catalog, "every line ends in CRLF", "core.autocrlf")


def test_revert_refuses_what_was_changed_afterwards(checkout, catalog):
    apply_patch(checkout, catalog)
    patched = (checkout / "run.sh").read_bytes()
    (checkout / "run.sh").write_bytes(patched + b"echo mine\n")
    refused(revert_patch, checkout, catalog, "changed after the patch", "run.sh (changed)")
    refused(apply_patch, checkout, catalog, "changed after the patch", "run.sh (changed)")
    assert status(checkout, catalog).seen.tree is TreeState.CHANGED_AFTER
    (checkout / "run.sh").write_bytes(patched)
    assert revert_patch(checkout, catalog).files


def test_all_files_changed_afterwards_are_known_by_the_record(checkout, catalog):
    apply_patch(checkout, catalog)
    for file in catalog[0].files:
        (checkout / file.path).write_text("mine\n")
    assert status(checkout, catalog).seen.tree is TreeState.CHANGED_AFTER


# --- halfway, and other versions of the patch ----------------------------------------------------


@pytest.mark.parametrize("do", [apply_patch, revert_patch])
@pytest.mark.parametrize("record", [False, True])
def test_half_patched_is_completed(checkout, catalog, do, record):
    stock = snapshot(checkout)
    apply_patch(checkout, catalog)
    patched = snapshot(checkout)
    (checkout / "run.sh").write_text(stock_files(0)["run.sh"])
    (checkout / "toy/new/parts/__init__.py").unlink()
    if not record:
        (checkout / RECORD).unlink()
    assert status(checkout, catalog).seen.tree is TreeState.HALF_PATCHED
    outcome = do(checkout, catalog)
    assert outcome.before is TreeState.HALF_PATCHED
    assert snapshot(checkout) == (patched if do is apply_patch else stock)


def test_what_an_older_release_patched_is_reverted_from_its_record(
    checkout, catalog, newer_catalog
):
    stock = snapshot(checkout)
    apply_patch(checkout, catalog)
    refused(apply_patch, checkout, newer_catalog, "Another version of the patch", "revert")
    found = status(checkout, newer_catalog)
    assert (found.seen.tree, found.superseded) == (TreeState.PATCHED, True)
    revert_patch(checkout, newer_catalog)
    assert snapshot(checkout) == stock
    assert not status(checkout, newer_catalog).superseded


def test_a_record_that_outlived_its_patch_is_replaced(checkout, catalog, newer_catalog):
    apply_patch(checkout, catalog)
    by_hand(checkout, catalog[0], "-R")
    found = status(checkout, newer_catalog)
    assert (found.seen.tree, found.recorded) == (TreeState.STOCK, True)
    apply_patch(checkout, newer_catalog)
    assert status(checkout, newer_catalog).seen.tree is TreeState.PATCHED
    # The same folder with another tag checked out.
    write_tree(checkout, stock_files(1))
    assert status(checkout, catalog).seen.patch.tag == "v1.1"


@pytest.mark.parametrize("text", ["", "[]", '{"format": "envpipe-patch-record/1"}', "{"])
def test_a_damaged_record_is_named(checkout, catalog, text):
    apply_patch(checkout, catalog)
    (checkout / RECORD).write_text(text)
    refused(revert_patch, checkout, catalog, RECORD, "damaged", "Remove it")
    (checkout / RECORD).unlink()
    assert revert_patch(checkout, catalog).files


def test_a_record_cannot_lead_out_of_the_checkout(checkout, catalog):
    apply_patch(checkout, catalog)
    text = (checkout / RECORD).read_text()
    (checkout / RECORD).write_text(text.replace("run.sh", "../run.sh"))
    refused(revert_patch, checkout, catalog, "leads out of the checkout")


# --- links, rights, file systems -----------------------------------------------------------------


def test_a_link_to_a_checkout_is_the_checkout(checkout, catalog, tmp_path):
    (tmp_path / "link").symlink_to(checkout)
    apply_patch(tmp_path / "link", catalog)
    assert (tmp_path / "link").is_symlink()
    assert status(checkout, catalog).seen.tree is TreeState.PATCHED


@pytest.mark.parametrize("linked", ["toy/training", "run.sh"])
def test_a_checkout_whose_files_lie_elsewhere_is_refused(checkout, catalog, tmp_path, linked):
    elsewhere = tmp_path / "elsewhere"
    (checkout / linked).rename(elsewhere)
    (checkout / linked).symlink_to(elsewhere)
    kept = elsewhere.stat().st_mtime_ns
    refused(apply_patch, checkout, catalog, "symbolic link", str(elsewhere))
    assert elsewhere.stat().st_mtime_ns == kept


def test_hard_linked_copies_are_left_alone(checkout, catalog, tmp_path):
    twin = tmp_path / "twin.sh"
    os.link(checkout / "run.sh", twin)
    apply_patch(checkout, catalog)
    assert twin.read_text() == stock_files(0)["run.sh"]


@pytest.mark.parametrize("closed", [".", "toy/training", "toy"])
def test_a_read_only_folder_stays_as_it_is(open_folder, catalog, closed):
    root = write_tree(open_folder / "checkout", stock_files(0))
    give_to_nobody(root)
    (root / closed).chmod(0o555)
    before = snapshot(root)
    with pytest.raises(RuntimeError, match="PermissionError"):
        in_child(lambda: apply_patch(root, catalog), as_nobody=True)
    assert snapshot(root) == before
    assert in_child(lambda: status(root, catalog).seen.tree, as_nobody=True) is TreeState.STOCK


def test_nothing_to_do_needs_no_rights(open_folder, catalog):
    root = write_tree(open_folder / "checkout", stock_files(0))
    give_to_nobody(root)
    for do, other in ((revert_patch, apply_patch), (apply_patch, revert_patch)):
        root.chmod(0o555)
        before = snapshot(root)
        assert in_child(lambda do=do: do(root, catalog).files, as_nobody=True) == ()
        assert snapshot(root) == before
        root.chmod(0o755)
        (root / JOURNAL_NAME).touch()  # of a change that goes on or was stopped
        root.chmod(0o555)
        if os.getuid() == 0:
            with pytest.raises(RuntimeError, match="PermissionError"):
                in_child(lambda do=do: do(root, catalog).files, as_nobody=True)
        root.chmod(0o755)
        (root / JOURNAL_NAME).unlink()
        other(root, catalog)


def test_an_ordinary_user_patches_their_own(open_folder, catalog):
    root = write_tree(open_folder / "checkout", stock_files(0))
    give_to_nobody(root)
    before = snapshot(root)
    in_child(lambda: bool(apply_patch(root, catalog)), as_nobody=True)
    assert status(root, catalog).seen.tree is TreeState.PATCHED
    in_child(lambda: bool(revert_patch(root, catalog)), as_nobody=True)
    assert snapshot(root) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
def test_root_leaves_files_to_their_owner(checkout, catalog):
    give_to_nobody(checkout)
    apply_patch(checkout, catalog)
    assert (checkout / "run.sh").stat().st_uid == NOBODY


def test_a_file_system_without_locks_is_told(checkout, catalog, patch_files, monkeypatch):
    def flock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    command = f"git -C {checkout} apply {patch_files['v1.0']}`"
    refused(apply_patch, checkout, catalog, "no locks", command)
    by_hand(checkout, catalog[0])
    refused(revert_patch, checkout, catalog, "no locks", command.replace("apply", "apply -R"))


def test_the_catalog_of_the_package_is_the_default(checkout):
    with pytest.raises(PatchError, match=r"no checkout of a supported project.*Megatron-LM"):
        operations.apply_patch(checkout)
