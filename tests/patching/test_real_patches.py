"""The patches that are shipped, on real checkouts where there are any."""

import argparse
import importlib.util
import os
import py_compile
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from checkouts import (
    DEEPSPEED_VARIABLE,
    VARIABLE,
    checkout_of,
    copy_checkout,
    folder_of_checkouts,
)
from patch_project import REPOSITORY, contents, copy_tree, maker, snapshot

from envpipe_megatron.patching.catalog import load_catalog
from envpipe_megatron.patching.checkout import (
    State,
    apply_patch,
    git_apply,
    look_at,
    revert_patch,
)
from envpipe_megatron.patching.liveness import Outcome, ask_hooks

CATALOG = load_catalog()
#: From core_v0.18.2 on Megatron-LM takes a decorator of Python 3.12 from typing. Megatron-DeepSpeed
#: imports torchvision unasked, and what DeepSpeed has not any more.
STAND_INS = """\
import importlib.machinery, sys, types, typing

typing.override = getattr(typing, "override", lambda function: function)


class Classes(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


names = ("torchvision", "torchvision.transforms", "torchvision.datasets")
for name in (*names, "deepspeed.compression.compress"):
    sys.modules[name] = Classes(name)
    sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules[name].__path__ = []
"""
each_patch = pytest.mark.parametrize("patch", CATALOG, ids=lambda patch: patch.tag)


@pytest.fixture
def checkout(patch, tmp_path):
    if patch.project == "megatron-deepspeed":
        given = os.environ.get(DEEPSPEED_VARIABLE)
        found = Path(given) if given else None
        where = DEEPSPEED_VARIABLE
    else:
        found = checkout_of(patch.tag)
        where = f"{folder_of_checkouts()} ({VARIABLE})"
    if found is None:
        pytest.skip(f"no checkout of {patch.name} in {where}")
    copy = copy_checkout(found, tmp_path / "checkout")
    if patch.project == "megatron-deepspeed":  # its arguments import them
        shutil.copytree(found / "tools", copy / "tools")
    return copy


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    folder = tmp_path / "stand_ins"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(STAND_INS)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


def needs(patch):
    """Skip where the framework's own needs are not installed."""
    pytest.importorskip("torch")
    if patch.project == "megatron-deepspeed":
        for name in ("deepspeed", "transformers"):
            if importlib.util.find_spec(name) is None:
                pytest.skip(f"{patch.name} needs {name}")


@each_patch
def test_apply_equals_git_apply_compiles_and_reverts(patch, checkout, tmp_path):
    stock = snapshot(checkout)
    by_hand = copy_tree(checkout, tmp_path / "by_hand")
    subprocess.run(["git", "apply"], input=patch.text, cwd=by_hand, check=True)
    assert look_at(by_hand).state is State.PATCHED

    found, files = apply_patch(checkout)
    assert found.patch == patch
    assert not found.forked
    assert set(files) == set(patch.hashes)
    for path in files:
        assert (checkout / path).read_bytes() == (by_hand / path).read_bytes()
        py_compile.compile(str(checkout / path), cfile=str(tmp_path / "compiled.pyc"), doraise=True)
    revert_patch(checkout)
    assert snapshot(checkout) == stock
    revert_patch(by_hand)
    assert contents(by_hand) == contents(checkout)


@each_patch
def test_its_hooks_are_live_where_it_is_applied(patch, checkout, stand_ins):
    needs(patch)
    answers = ask_hooks(checkout, patch.hooks)
    assert {answer.outcome for answer in answers} == {Outcome.NOT_LIVE}
    apply_patch(checkout)
    answers = ask_hooks(checkout, patch.hooks)
    assert [(answer.outcome, answer.detail) for answer in answers] == [
        (Outcome.LIVE, str(checkout / (hook["module"].replace(".", "/") + ".py")))
        for hook in patch.hooks
    ]


@each_patch
def test_the_patch_is_what_make_makes_of_the_patched_tree(patch, checkout, tmp_path):
    """So that nobody has edited it by hand, and each hunk fits at one place only."""
    stock = copy_tree(checkout, tmp_path / "stock")
    apply_patch(checkout)
    shutil.copytree(
        REPOSITORY / "patches",
        tmp_path / "patches",
        ignore=shutil.ignore_patterns(*(known.tag for known in CATALOG)),
    )
    maker().make(stock, checkout, tmp_path / "patches", patch.project, patch.tag)
    assert load_catalog(tmp_path / "patches") == (patch,)


@each_patch
def test_little_of_the_stock_text_is_in_the_patch(patch):
    hunks = re.split(r"(?m)^@@ .*\n|^diff .*\n(?:.+\n)*?\+\+\+ .*\n", patch.text.decode())
    marks = [re.findall(r"(?m)^[ +-]", hunk) for hunk in hunks if hunk]
    assert marks
    for hunk in marks:
        assert hunk.count("-") <= 1  # hooks are added
        assert len(hunk) - hunk.count("+") <= 6


@pytest.fixture
def own_file(patch, monkeypatch):
    """Megatron's arguments of --envpipe as the patch adds them, for a command line."""

    def parse(*words):
        (added,) = [path for path, (released, _) in patch.hashes.items() if not released]
        files, _ = git_apply(patch, {added: None})
        found = {}
        exec(files[added], found)
        monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *words])
        parser = found["add_arguments"](argparse.ArgumentParser(allow_abbrev=False))
        return parser.parse_args(words), found["hooks"]

    return parse


@each_patch
def test_without_the_flag_nothing_is_imported_and_options_are_an_error(own_file, capsys):
    args, hooks = own_file()
    assert (args.envpipe, hooks) == (False, None)
    with pytest.raises(SystemExit):
        own_file("--envpipe-type", "optimal")
    assert "need --envpipe" in capsys.readouterr().err


@each_patch
def test_descriptions_name_the_commits_of_their_project(patch):
    project = tomllib.loads((REPOSITORY / "patches" / patch.project / "project.toml").read_text())
    assert patch.commit == project["commits"][patch.tag]
    assert len(patch.commit) == 40
    assert patch.hooks
