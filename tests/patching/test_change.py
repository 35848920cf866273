"""Stock checkouts and forks, patched and reverted; by envpipe, git, hand, and another release."""

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

from envpipe_megatron.patching.catalog import PatchError
from envpipe_megatron.patching.change import apply_patch, revert_patch, temporary_of
from envpipe_megatron.patching.checkout import RECORD_NAME, TreeState, look_at


@pytest.mark.parametrize("minor", [0, 1])
@pytest.mark.parametrize("clone", [False, True])
def test_apply_makes_the_edited_bytes_and_revert_the_stock_ones(tmp_path, catalog, minor, clone):
    root = write_tree(tmp_path / "checkout", stock_files(minor))
    if clone:
        cloned(root)
    before = snapshot(root)
    outcome = apply_patch(root, catalog)
    assert outcome.found.patch.tag == f"v1.{minor}"
    after = snapshot(root)
    assert {path: content.encode() for path, content in edited_files(minor).items()} == {
        path: (root / path).read_bytes() for path in edited_files(minor)
    }
    new = {"toy/new", "toy/new/parts", "toy/new/parts/__init__.py", "toy/new/parts/envpipe.py"}
    assert set(after) - set(before) == {RECORD_NAME, *new}
    assert {path: mode for path, (mode, _) in after.items() if path in before} == {
        path: mode for path, (mode, _) in before.items()
    }
    assert look_at(root, catalog).tree is TreeState.PATCHED

    reverted = revert_patch(root, catalog)
    assert set(reverted.files) == set(outcome.files)
    assert snapshot(root) == before


def test_the_record_says_what_was_done(checkout, catalog):
    apply_patch(checkout, catalog)
    record = json.loads((checkout / RECORD_NAME).read_text())
    patch = catalog[0]
    assert record["format"] == "envpipe-patch-record/1"
    assert (record["tag"], record["patch_sha256"]) == (patch.tag, patch.sha256)
    assert record["envpipe_megatron"]
    assert {file["path"]: file["sha256_before"] for file in record["files"]} == {
        path: before or None for path, (before, _) in patch.hashes.items()
    }


def test_git_apply_makes_the_same_bytes_and_is_known_and_reverted(checkout, catalog, copies):
    cloned(checkout)
    before = contents(checkout)
    other = copies(checkout)
    by_hand(checkout, catalog[0])
    assert look_at(checkout, catalog).tree is TreeState.PATCHED
    assert apply_patch(checkout, catalog).files == ()
    apply_patch(other, catalog)
    (other / RECORD_NAME).unlink()
    assert contents(other) == contents(checkout)
    revert_patch(checkout, catalog)
    assert contents(checkout) == before
    # The other way round: what envpipe applied, git takes back.
    by_hand(other, catalog[0], "-R")
    assert look_at(other, catalog).tree is TreeState.STOCK


def test_the_second_time_does_nothing(checkout, catalog):
    stock = snapshot(checkout)
    assert revert_patch(checkout, catalog).files == ()
    assert snapshot(checkout) == stock
    apply_patch(checkout, catalog)
    patched = snapshot(checkout)
    assert apply_patch(checkout, catalog).files == ()
    assert snapshot(checkout) == patched


# --- forks and own edits -------------------------------------------------------------------------


def edit(root, path, old, new):
    content = (root / path).read_bytes()
    assert content.count(old.encode()) == 1
    (root / path).write_bytes(content.replace(old.encode(), new.encode()))


def test_a_fork_is_patched_where_the_lines_stand_and_keeps_its_own(checkout, catalog):
    edit(checkout, "toy/schedules.py", '    return "plain"', '    # fork\n    return "plain"')
    edit(checkout, "run.sh", "-m toy\n", "-m toy\necho fork\n")
    (checkout / "untouched.txt").write_text("of the fork")
    stock = snapshot(checkout)
    outcome = apply_patch(checkout, catalog)
    assert set(outcome.found.forked) == {"toy/schedules.py", "run.sh"}
    schedules = (checkout / "toy/schedules.py").read_text()
    assert '    # fork\n    return "plain"' in schedules
    assert "        chosen = envpipe_hook(chosen)\n    return chosen\n\n\ndef other" in schedules
    assert look_at(checkout, catalog).tree is TreeState.PATCHED
    assert apply_patch(checkout, catalog).files == ()
    revert_patch(checkout, catalog)
    assert snapshot(checkout) == stock


@pytest.mark.parametrize("record", [True, False])
def test_edits_after_the_patch_are_kept(checkout, catalog, record):
    cloned(checkout)
    apply_patch(checkout, catalog)
    if not record:
        (checkout / RECORD_NAME).unlink()
    plain = '    return "plain"'
    edit(checkout, "toy/schedules.py", plain, f"    # mine\n{plain}")
    assert look_at(checkout, catalog).tree is TreeState.PATCHED
    assert revert_patch(checkout, catalog).files
    edit(checkout, "toy/schedules.py", "    # mine\n", "")
    assert (checkout / "toy/schedules.py").read_text() == stock_files(0)["toy/schedules.py"]
    assert (checkout / "run.sh").read_text() == stock_files(0)["run.sh"]
    apply_patch(checkout, catalog)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("echo start\n", "echo other\n", "near 1, are missing"),
        ("echo start\n", "#!/bin/sh\necho start\nexec python -m toy\n#!/bin/sh\n" * 2, "one place"),
    ],
)
def test_a_fork_that_the_patch_does_not_fit_is_refused_by_name(checkout, catalog, old, new, reason):
    edit(checkout, "run.sh", old, new)
    (checkout / "toy/training/loop.py").unlink()
    named = ("run.sh (changed: lines", reason, "toy/training/loop.py (missing)")
    put = "Put the files of commit 111111111111 back, then apply again"
    refused(apply_patch, checkout, catalog, "Toy v1.0 does not fit", *named, put)
    assert look_at(checkout, catalog).tree is TreeState.DIRTY
    before = snapshot(checkout)
    assert revert_patch(checkout, catalog).files == ()
    assert snapshot(checkout) == before


def test_a_file_in_the_way_of_a_new_one_is_to_be_moved(checkout, catalog):
    write_tree(checkout, {"toy/new/parts/envpipe.py": "mine = True\n"})
    move = "ove toy/new/parts/envpipe.py away, which commit 111111111111 does not have"
    refused(apply_patch, checkout, catalog, "in the way", f"M{move}, then apply again")
    (checkout / "run.sh").write_text("mine\n")
    put = "ut the files of commit 111111111111 back"
    refused(apply_patch, checkout, catalog, f"P{put} and m{move}, then apply again")


def test_line_ends_that_git_turned_are_told_from_edits(checkout, catalog):
    file = checkout / "toy/schedules.py"
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    refused(apply_patch, checkout, catalog, "every line ends in CRLF", "core.autocrlf")


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("run.sh", "echo started", "echo mine"),
        ("toy/new/parts/envpipe.py", "return None", "return 1"),
        ("toy/new/parts/envpipe.py", "return None\n", "return None\n# mine\n"),
    ],
)
def test_changed_lines_of_the_patch_are_refused(checkout, catalog, path, old, new):
    apply_patch(checkout, catalog)
    edit(checkout, path, old, new)
    for do in (apply_patch, revert_patch):
        refused(do, checkout, catalog, "own lines or files were changed", f"{path} (changed")
    assert look_at(checkout, catalog).tree is TreeState.CHANGED_AFTER
    edit(checkout, path, new, old)
    assert revert_patch(checkout, catalog).files


@pytest.mark.parametrize("do", [apply_patch, revert_patch, look_at])
def test_an_unknown_version_is_refused_with_what_is_supported(checkout, catalog, do):
    supported = ("Toy v1.0 (commit 1111111)", "Toy v1.1 (commit 2222222)", "--tag")
    (checkout / "toy/version.py").write_text("MAJOR = 2\nMINOR = 0\n")
    refused(do, checkout, catalog, "MAJOR = 2, MINOR = 0", *supported)
    (checkout / "toy/version.py").write_text("not python (")
    refused(do, checkout, catalog, "toy/version.py is another", *supported)
    refused(do, checkout / "toy", catalog, "Give the root folder", *supported[:2])


def test_a_fork_with_its_own_version_is_patched_by_tag(checkout, catalog):
    edit(checkout, "toy/version.py", "MINOR = 0", "MINOR = 99")
    stock = snapshot(checkout)
    with pytest.raises(PatchError, match=r"no patch for this tag \(got 'v7'\).*Toy v1.0"):
        apply_patch(checkout, catalog, tag="v7")
    assert apply_patch(checkout, catalog, tag="v1.0").files
    assert look_at(checkout, catalog).tree is TreeState.PATCHED
    assert apply_patch(checkout, catalog).files == ()
    assert revert_patch(checkout, catalog).files
    assert snapshot(checkout) == stock


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
        (checkout / RECORD_NAME).unlink()
    assert look_at(checkout, catalog).tree is TreeState.HALF_PATCHED
    assert do(checkout, catalog).found.tree is TreeState.HALF_PATCHED
    assert snapshot(checkout) == (patched if do is apply_patch else stock)


def test_what_an_older_release_patched_is_reverted_from_its_record(
    checkout, catalog, newer_catalog
):
    stock = snapshot(checkout)
    apply_patch(checkout, catalog)
    refused(apply_patch, checkout, newer_catalog, "Another version of the patch", "revert")
    found = look_at(checkout, newer_catalog)
    assert (found.tree, found.superseded) == (TreeState.PATCHED, True)
    revert_patch(checkout, newer_catalog)
    assert snapshot(checkout) == stock
    assert not look_at(checkout, newer_catalog).superseded


def test_a_record_that_outlived_its_patch_is_replaced(checkout, catalog, newer_catalog):
    apply_patch(checkout, catalog)
    by_hand(checkout, catalog[0], "-R")
    found = look_at(checkout, newer_catalog)
    assert (found.tree, found.recorded) == (TreeState.STOCK, True)
    assert revert_patch(checkout, newer_catalog).files == ()
    assert not (checkout / RECORD_NAME).exists()
    apply_patch(checkout, catalog)
    by_hand(checkout, catalog[0], "-R")
    apply_patch(checkout, newer_catalog)
    assert look_at(checkout, newer_catalog).tree is TreeState.PATCHED
    # The same folder with another tag checked out.
    write_tree(checkout, stock_files(1))
    assert look_at(checkout, catalog).patch.tag == "v1.1"


def test_another_version_that_was_applied_by_hand_is_thought_of(checkout, catalog):
    by_hand(checkout, catalog[0])
    for file, ours in (("run.sh", "started"), ("toy/schedules.py", "if envpipe_hook:")):
        edit(checkout, file, ours, "if envpipe_other:")
    another = "If another version of the patch was applied by hand, `git apply -R` of that one"
    for do in (apply_patch, revert_patch):
        refused(do, checkout, catalog, another)
    # Lines of ours where this patch would fit: they are not added twice.
    write_tree(checkout, stock_files(0))
    edit(checkout, "toy/schedules.py", "def plain", "import envpipe_megatron\ndef plain")
    refused(apply_patch, checkout, catalog, "holds lines of EnvPipe that this patch does not make")


@pytest.mark.parametrize("version", ["MINOR = 17", "MINOR = 1", "MINOR = None"])
def test_an_edited_version_does_not_hide_the_recorded_patch(checkout, catalog, version):
    apply_patch(checkout, catalog)
    edit(checkout, "toy/version.py", "MINOR = 0", version)
    found = look_at(checkout, catalog)
    assert (found.patch, found.tree) == (catalog[0], TreeState.PATCHED)
    assert apply_patch(checkout, catalog).files == ()
    (checkout / "run.sh").write_text(stock_files(0)["run.sh"])
    assert revert_patch(checkout, catalog).files
    edit(checkout, "toy/version.py", version, "MINOR = 0")
    assert {path: (checkout / path).read_bytes().decode() for path in stock_files(0)} == (
        stock_files(0)
    )


@pytest.mark.parametrize("carried", [{}, {"toy/schedules.py": "other = True\n"}])
def test_what_was_left_behind_does_not_make_another_version_known(checkout, catalog, carried):
    apply_patch(checkout, catalog)
    # The new files alone, or all but one that the other version has otherwise.
    version = {"toy/version.py": "MAJOR = 2\nMINOR = 0\n"}
    write_tree(checkout, (carried or stock_files(0)) | version)
    refused(apply_patch, checkout, catalog, "MAJOR = 2, MINOR = 0")


@pytest.mark.parametrize("text", ["", "[]", '{"format": "envpipe-patch-record/1"}', "{"])
def test_a_damaged_record_is_named(checkout, catalog, text):
    apply_patch(checkout, catalog)
    (checkout / RECORD_NAME).write_text(text)
    refused(revert_patch, checkout, catalog, RECORD_NAME, "damaged", "Remove it")
    (checkout / RECORD_NAME).unlink()
    assert revert_patch(checkout, catalog).files


def test_a_record_cannot_lead_out_of_the_checkout(checkout, catalog):
    apply_patch(checkout, catalog)
    text = (checkout / RECORD_NAME).read_text()
    (checkout / RECORD_NAME).write_text(text.replace("run.sh", "../run.sh"))
    refused(revert_patch, checkout, catalog, "leads out of the checkout")


# --- links, rights, file systems -----------------------------------------------------------------


@pytest.mark.parametrize("linked", ["toy/training", "run.sh"])
def test_a_checkout_whose_files_lie_elsewhere_is_refused(checkout, catalog, tmp_path, linked):
    elsewhere = tmp_path / "elsewhere"
    (checkout / linked).rename(elsewhere)
    (checkout / linked).symlink_to(elsewhere)
    kept = elsewhere.stat().st_mtime_ns
    refused(apply_patch, checkout, catalog, "symbolic link", str(elsewhere))
    assert elsewhere.stat().st_mtime_ns == kept


def test_links_to_the_checkout_and_of_its_files_are_respected(checkout, catalog, tmp_path):
    (tmp_path / "link").symlink_to(checkout)
    twin = tmp_path / "twin.sh"
    os.link(checkout / "run.sh", twin)
    apply_patch(tmp_path / "link", catalog)
    assert (tmp_path / "link").is_symlink()
    assert look_at(checkout, catalog).tree is TreeState.PATCHED
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
    assert in_child(lambda: look_at(root, catalog).tree, as_nobody=True) is TreeState.STOCK


def test_nothing_to_do_needs_no_rights(open_folder, catalog):
    root = write_tree(open_folder / "checkout", stock_files(0))
    give_to_nobody(root)
    for do, other in ((revert_patch, apply_patch), (apply_patch, revert_patch)):
        root.chmod(0o555)
        before = snapshot(root)
        assert in_child(lambda do=do: do(root, catalog).files, as_nobody=True) == ()
        assert snapshot(root) == before
        root.chmod(0o755)
        other(root, catalog)


def test_an_ordinary_user_patches_their_own(open_folder, catalog):
    root = write_tree(open_folder / "checkout", stock_files(0))
    give_to_nobody(root)
    before = snapshot(root)

    def with_umask():
        os.umask(0o027)
        return bool(apply_patch(root, catalog))

    in_child(with_umask, as_nobody=True)
    assert look_at(root, catalog).tree is TreeState.PATCHED
    assert (root / "toy/new/parts/envpipe.py").stat().st_mode & 0o777 == 0o640
    in_child(lambda: bool(revert_patch(root, catalog)), as_nobody=True)
    assert snapshot(root) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
def test_root_leaves_files_to_their_owner(checkout, catalog):
    give_to_nobody(checkout)
    apply_patch(checkout, catalog)
    assert (checkout / "run.sh").stat().st_uid == NOBODY


def test_a_file_system_without_locks_will_do(checkout, catalog, monkeypatch):
    def flock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    stock = snapshot(checkout)
    assert apply_patch(checkout, catalog).files
    assert revert_patch(checkout, catalog).files
    assert snapshot(checkout) == stock


def test_a_link_in_the_place_of_a_temporary_file_is_not_followed(checkout, catalog, tmp_path):
    temporary_of(checkout / "run.sh").symlink_to(tmp_path / "elsewhere")
    apply_patch(checkout, catalog)
    assert not (tmp_path / "elsewhere").exists()
    assert not (checkout / "run.sh").is_symlink()


def test_the_catalog_of_the_package_is_the_default(checkout):
    with pytest.raises(PatchError, match=r"no checkout of a supported project.*Megatron-LM"):
        apply_patch(checkout)
