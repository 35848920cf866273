"""Checkouts that git, a hand or another release has had a part in."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from patch_project import (
    by_hand,
    cloned,
    git,
    give_to_nobody,
    refused,
    stock_files,
    write_tree,
)

from envpipe_megatron.patching.checkout import TreeState
from envpipe_megatron.patching.journal import RECORD_NAME
from envpipe_megatron.patching.operations import apply_patch, revert_patch, status


def holds(root, files):
    return all((root / path).read_bytes() == content.encode() for path, content in files.items())


def test_a_clone_with_uncommitted_changes_is_refused(checkout, catalog):
    cloned(checkout)
    (checkout / "untracked").write_text("is no change")
    git(checkout, "mv", "untouched.txt", "moved name.txt")
    (checkout / "toy/training/__init__.py").write_text("edited = True\n")
    named = ("'moved name.txt'", "toy/training/__init__.py", "Commit or stash")
    refused(apply_patch, checkout, catalog, *named)
    git(checkout, "commit", "-a", "-q", "-m", "own work")
    apply_patch(checkout, catalog)
    assert status(checkout, catalog).seen.tree is TreeState.PATCHED


def test_git_that_cannot_say_is_no_clean_checkout(checkout, catalog):
    (checkout / ".git").write_text("gitdir: /nowhere\n")
    told = refused(apply_patch, checkout, catalog, "git can't say", "git says: fatal: ", "/nowhere")
    assert not set("\\\n\t") & set(told)


def settings(monkeypatch, **named):
    """Settings of git by the environment, as `git -c` has them."""
    monkeypatch.setenv("GIT_CONFIG_COUNT", str(len(named)))
    for number, (key, value) in enumerate(named.items()):
        monkeypatch.setenv(f"GIT_CONFIG_KEY_{number}", key)
        monkeypatch.setenv(f"GIT_CONFIG_VALUE_{number}", value)


def test_gits_settings_in_the_environment_count(checkout, catalog, monkeypatch):
    cloned(checkout)
    (checkout / "untouched.txt").chmod(0o755)
    refused(apply_patch, checkout, catalog, "untouched.txt")
    settings(monkeypatch, **{"core.fileMode": "false"})
    assert apply_patch(checkout, catalog).files


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
def test_another_users_clone_is_taken_where_git_takes_it(checkout, catalog, monkeypatch):
    cloned(checkout)
    give_to_nobody(checkout)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    command = f"call: git config --global --add safe.directory {checkout}"
    refused(apply_patch, checkout, catalog, "dubious ownership", command)
    settings(monkeypatch, **{"safe.directory": "*"})
    assert apply_patch(checkout, catalog).files


def test_another_repositorys_settings_do_not_count(checkout, catalog, tmp_path, monkeypatch):
    cloned(checkout)
    other = cloned(write_tree(tmp_path / "other", {"file": "x\n"}))
    (other / "file").write_text("changed\n")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    assert apply_patch(checkout, catalog).files


@pytest.fixture(params=["clone", "archive", "archive in a clone"])
def edited(request, tmp_path, catalog):
    """A patched checkout in whose schedules the user has then changed something else."""
    root = write_tree(tmp_path / "out er" / "check out", stock_files(0))
    if request.param == "clone":
        cloned(root)
    apply_patch(root, catalog)
    if request.param == "archive in a clone":
        cloned(root.parent)
    schedules = root / "toy/schedules.py"
    schedules.write_text(schedules.read_text() + "# mine\n")
    return root


@pytest.mark.parametrize("older", [False, True])
def test_edits_are_kept_by_the_command_that_a_refusal_gives(
    edited, catalog, newer_catalog, patch_files, older
):
    installed = newer_catalog if older else catalog
    told = refused(revert_patch, edited, catalog, "keep them and take the patch out alone")
    if older:  # the patch file is not in the installation, so it comes from the record
        Path(patch_files["v1.0"]).rename(patch_files["v1.0"] + ".gone")
        try:
            told = refused(revert_patch, edited, installed, "python3 -c", RECORD_NAME)
        finally:
            Path(patch_files["v1.0"] + ".gone").rename(patch_files["v1.0"])
    else:
        assert patch_files["v1.0"] in told
    subprocess.run(told.split("`")[1], shell=True, cwd="/", check=True)
    files = stock_files(0) | {"toy/schedules.py": stock_files(0)["toy/schedules.py"] + "# mine\n"}
    assert holds(edited, files)
    # The record is still there, and no longer believed.
    found = status(edited, installed)
    assert (found.seen.tree, found.recorded, found.superseded) == (TreeState.DIRTY, True, False)
    refused(apply_patch, edited, installed, "differ from those of Toy v1.0")
    (edited / "toy/schedules.py").write_text(stock_files(0)["toy/schedules.py"])
    if (edited / ".git").exists():
        git(edited, "checkout", ".")
    apply_patch(edited, installed)
    record = json.loads((edited / RECORD_NAME).read_text())
    assert record["patch_sha256"] == installed[0].sha256


def test_another_version_that_was_applied_by_hand_is_thought_of(checkout, catalog, tmp_path):
    other = write_tree(tmp_path / "other", stock_files(0))
    older = replace(catalog[0], text=catalog[0].text.replace(b"started", b"begun"))
    by_hand(checkout, older)
    another = "If another version of the patch was applied by hand, `git apply -R` of that one"
    for do in (apply_patch, revert_patch):
        told = refused(do, checkout, catalog, "Files differ from what the patch", another)
        assert "changed after" not in told
    # And where no file of the two is the same.
    for file in catalog[0].files:
        content = (checkout / file.path).read_bytes()
        (checkout / file.path).write_bytes(content + b"# older\n")
    assert status(checkout, catalog).seen.tree is TreeState.DIRTY
    refused(apply_patch, checkout, catalog, another)
    # With a record, what was applied is known.
    apply_patch(other, catalog)
    (other / "run.sh").write_text("mine\n")
    assert another not in refused(revert_patch, other, catalog, "were changed after")


@pytest.mark.parametrize("version", ["MINOR = 17", "MINOR = 1", "MINOR = None"])
def test_an_edited_version_does_not_hide_the_recorded_patch(checkout, catalog, version):
    apply_patch(checkout, catalog)
    file = checkout / "toy/version.py"
    file.write_text(file.read_text().replace("MINOR = 0", version))
    found = status(checkout, catalog)
    assert (found.seen.patch, found.seen.tree) == (catalog[0], TreeState.PATCHED)
    assert apply_patch(checkout, catalog).files == ()
    (checkout / "run.sh").write_text(stock_files(0)["run.sh"])
    assert revert_patch(checkout, catalog).files
    assert holds(checkout, {**stock_files(0), "toy/version.py": file.read_text()})


@pytest.mark.parametrize("carried", [{}, {"toy/schedules.py": "other = True\n"}])
def test_what_was_left_behind_does_not_make_another_version_known(checkout, catalog, carried):
    apply_patch(checkout, catalog)
    # The new files alone, or all but one that the other version has otherwise.
    version = {"toy/version.py": "MAJOR = 2\nMINOR = 0\n"}
    write_tree(checkout, (carried or stock_files(0)) | version)
    refused(apply_patch, checkout, catalog, "MAJOR = 2, MINOR = 0")
