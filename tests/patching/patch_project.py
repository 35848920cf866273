"""A made-up project of two versions with a patch each, and checkouts of it."""

import hashlib
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from envpipe_megatron.patching.catalog import PatchError

REPOSITORY = Path(__file__).resolve().parents[2]
NOBODY = 65534

SCHEDULES = """\
def plain():
    return "plain"


def get_func():
    chosen = plain
    return chosen


def other():
    chosen = plain
    return chosen
"""
LOOP = """\
import os\r
\r
\r
def train():\r
    return os.getpid()"""
PROJECT = """\
title = "Toy"
repository = "https://toy.example"

[recognition]
file = "toy/version.py"
constants = ["MAJOR", "MINOR"]

[commits]
"v1.0" = "1111111111111111111111111111111111111111"
"v1.1" = "2222222222222222222222222222222222222222"
"odd" = "3333333333333333333333333333333333333333"

[[hooks]]
module = "toy.schedules"
attribute = "envpipe_hook"
used_in = ["get_func"]

[[hooks]]
module = "toy.training.loop"
attribute = "envpipe"
used_in = ["train"]
"""


def stock_files(minor):
    return {
        "toy/__init__.py": "",
        "toy/version.py": f"MAJOR = 1\nMINOR = {minor}\nNAME = 'toy'\n",
        "toy/schedules.py": SCHEDULES.replace("plain", "plain" if minor == 0 else "simple"),
        "toy/training/__init__.py": "",
        "toy/training/loop.py": LOOP,
        "run.sh": "#!/bin/sh\necho start\nexec python -m toy\n",
        "untouched.txt": "as it is\n",
    }


def edited_files(minor):
    files = stock_files(minor)
    end = "\n\n\ndef other"
    files["toy/schedules.py"] = "envpipe_hook = None\n\n\n" + files["toy/schedules.py"].replace(
        f"    return chosen{end}",
        f"    if envpipe_hook:\n        chosen = envpipe_hook(chosen)\n    return chosen{end}",
    )
    files["toy/training/loop.py"] = LOOP.replace(
        "import os\r\n", "import os\r\nfrom toy.training import envpipe\r\n"
    ).replace("    return", "    envpipe.hooks()\r\n    return")
    files["run.sh"] = files["run.sh"].replace("echo start", "echo started")
    files["toy/training/envpipe.py"] = "def hooks():\n    return None\n"
    return files


def write_tree(root, files):
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content.encode())
        (root / path).chmod(0o755 if path.endswith(".sh") else 0o640)
    return root


@cache
def maker():
    """patches/make.py, a script. No compiled file is left beside it, as its folder is shipped."""
    spec = importlib.util.spec_from_file_location("make_patch", REPOSITORY / "patches" / "make.py")
    sys.modules["make_patch"] = module = importlib.util.module_from_spec(spec)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    spec.loader.exec_module(module)
    sys.dont_write_bytecode = writes
    return module


def make_patches(folder):
    patches = folder / "patches"
    (patches / "toy").mkdir(parents=True)
    (patches / "toy" / "project.toml").write_text(PROJECT)
    for minor in (0, 1):
        stock = write_tree(folder / f"stock{minor}", stock_files(minor))
        edited = write_tree(folder / f"edited{minor}", edited_files(minor))
        maker().make(stock, edited, patches, "toy", f"v1.{minor}")
    return patches


def snapshot(root):
    """Everything in a folder: what each path is, its mode, its bytes."""
    seen = {}
    for path in sorted(root.rglob("*")):
        if path.relative_to(root).parts[0] == ".git":
            continue
        mode = stat.S_IMODE(path.lstat().st_mode)
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
        seen[str(path.relative_to(root))] = (mode, content)
    return seen


def contents(root):
    """All but the modes, of which git keeps one bit."""
    return {path: content for path, (_, content) in snapshot(root).items()}


def copy_tree(source, target):
    return Path(shutil.copytree(source, target, symlinks=True))


def git(root, *command):
    settings = ["-c", "user.name=x", "-c", "user.email=x@example"]
    subprocess.run(["git", *settings, *command], cwd=root, check=True, capture_output=True)


def cloned(root):
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "all")
    return root


def by_hand(root, patch, *flags):
    subprocess.run(["git", "apply", *flags], input=patch.text, cwd=root, check=True)


def refused(do, root, *words):
    """Assert that nothing is changed and the error names `words`; returns the error's text."""
    before = snapshot(root)
    with pytest.raises(PatchError) as raised:
        do(root)
    for word in words:
        assert word in str(raised.value)
    assert snapshot(root) == before
    return str(raised.value)


def give_to_nobody(root):
    for path in (root, *root.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
