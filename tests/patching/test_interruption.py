"""Killed, failing and concurrent changes of a checkout."""

import errno
import os
import random
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from memory_folder import memory_folder
from on_request import asked_for, examples
from patch_project import in_child, snapshot

import envpipe_megatron.patching
from envpipe_megatron.patching.catalog import PatchError
from envpipe_megatron.patching.change import apply_patch, revert_patch, was_stopped
from envpipe_megatron.patching.checkout import TreeState, look_at

PATCHING = str(Path(envpipe_megatron.patching.__file__).parent)
#: These change files; the others read and compute.
CHANGING = f"{PATCHING}/change.py"
#: All lines, one by one, were tried too; a test takes one of several.
STEP = 7 if asked_for("CORE") else 11


class Lines:
    """Counts the lines that are run of the modules which change files, and may end at one."""

    def __init__(self, last=None):
        self.run = 0
        self._last = last

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, _):
        if frame.f_code.co_filename != CHANGING:
            return None
        if event == "line":
            self.run += 1
            if self.run == self._last:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._trace


def lines_of(do, root, catalog):
    def counted():
        with Lines() as lines:
            do(root, catalog)
        return lines.run

    return in_child(counted)


def killed_at(line, do, root, catalog):
    def until_killed():
        with Lines(line):
            do(root, catalog)

    assert in_child(until_killed) == -signal.SIGKILL


@pytest.fixture
def tmp_path():
    """In memory: a disk takes milliseconds for each of thousands of fsync, which no kill needs."""
    with memory_folder() as folder:
        yield folder


@pytest.fixture
def trees(checkout, catalog, copies):
    """Stock and patched, and what each holds."""
    patched = copies(checkout)
    apply_patch(patched, catalog)
    return {apply_patch: checkout, revert_patch: patched}, {
        apply_patch: snapshot(patched),
        revert_patch: snapshot(checkout),
    }


def recovered(root, do, wanted, catalog):
    """Whatever stopped a change, the files are old or new ones, and it can be completed."""
    unread = snapshot(root)
    found = look_at(root, catalog)
    assert not found.foreign
    if found.tree is TreeState.HALF_PATCHED:
        assert was_stopped(found)
    assert snapshot(root) == unread
    do(root, catalog)
    assert snapshot(root) == wanted


@pytest.mark.parametrize("do", [apply_patch, revert_patch])
def test_killed_anywhere_then_completed_or_taken_back(trees, catalog, copies, do):
    sources, wanted = trees
    lines = lines_of(do, copies(sources[do]), catalog)
    states = set()
    for line in range(random.Random(do.__name__).randint(1, STEP), lines + 1, STEP):
        root = copies(sources[do])
        killed_at(line, do, root, catalog)
        states.add(look_at(root, catalog).tree)
        after = random.Random(line).choice([apply_patch, revert_patch])
        recovered(root, after, wanted[after], catalog)
    assert states == {TreeState.STOCK, TreeState.HALF_PATCHED, TreeState.PATCHED}


@pytest.mark.parametrize("seed", range(examples(10)))
def test_killed_again_while_completing(trees, catalog, copies, seed):
    sources, wanted = trees
    chance = random.Random(seed)
    do = chance.choice([apply_patch, revert_patch])
    root = copies(sources[do])
    for _ in range(4):
        lines = lines_of(do, copies(root), catalog)
        killed_at(chance.randint(1, lines), do, root, catalog)
        do = chance.choice([apply_patch, revert_patch])
    recovered(root, do, wanted[do], catalog)


CALLS = (
    (os, "fsync"),
    (os, "fchmod"),
    (Path, "open"),
    (Path, "replace"),
    (Path, "unlink"),
    (Path, "mkdir"),
)


@pytest.mark.parametrize("do", [apply_patch, revert_patch])
@pytest.mark.parametrize(("owner", "name"), CALLS)
@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_failing_call_leaves_the_old_tree_or_one_to_complete(
    trees, catalog, copies, monkeypatch, do, owner, name, failure
):
    sources, wanted = trees
    other = revert_patch if do is apply_patch else apply_patch
    real = getattr(owner, name)
    call = 0
    failed = True
    while failed:
        call += 1
        left = call
        failed = False

        def failing(*arguments, **named):
            nonlocal left, failed
            left -= 1
            if left == 0:
                failed = True
                raise failure
            return real(*arguments, **named)

        root = copies(sources[do])
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, failing)
            with suppress(OSError, PatchError, KeyboardInterrupt):
                do(root, catalog)
        after = random.Random(call).choice([do, other])
        recovered(root, after, wanted[after], catalog)
    assert call > (name != "unlink" or do is revert_patch)


@pytest.mark.parametrize("do", [apply_patch, revert_patch])
def test_a_full_disk_leaves_the_old_tree(trees, catalog, copies, monkeypatch, do):
    sources, _ = trees

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    root = copies(sources[do])
    before = snapshot(root)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        do(root, catalog)
    assert snapshot(root) == before


def test_a_rename_that_fails_is_told_with_the_way_out(checkout, catalog, monkeypatch):
    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(PatchError, match=r"stopped halfway.*`envpipe patch apply` or `envpipe"):
        apply_patch(checkout, catalog)
    assert was_stopped(look_at(checkout, catalog))


# --- two at once ---------------------------------------------------------------------------------


def started(do, root, catalog, go):
    """Do something in a child from when `go` is closed; returns its end of a pipe."""
    results, sent = os.pipe()
    if os.fork() == 0:
        answer = b"failed"
        try:
            os.close(go[1])
            os.read(go[0], 1)
            answer = str(len(do(root, catalog).files)).encode()
        finally:
            os.write(sent, answer)
            os._exit(0)
    os.close(sent)
    return results


def answer(results):
    with os.fdopen(results, "rb") as file:
        said = file.read().decode()
    os.wait()
    return said


@pytest.mark.parametrize("others", [[apply_patch] * 3, [apply_patch, revert_patch] * 2])
@pytest.mark.parametrize("round_", range(examples(5)))
def test_concurrent_changes_come_one_after_the_other(trees, catalog, others, round_):
    sources, wanted = trees
    root = sources[apply_patch]
    go = os.pipe()
    children = [started(do, root, catalog, go) for do in others]
    os.close(go[1])
    os.close(go[0])
    said = [answer(child) for child in children]
    if revert_patch not in others:
        assert sorted(said) == ["0", "0", str(len(catalog[0].files))]
        assert snapshot(root) == wanted[apply_patch]
    else:
        assert "failed" not in said
        assert snapshot(root) in list(wanted.values())
