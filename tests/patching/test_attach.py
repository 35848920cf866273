"""A patch that is attached as modules are imported, to a checkout that stays as it is."""

import compileall
import json
import os
import subprocess
import sys

import pytest
from patch_project import (
    REPOSITORY,
    copy_tree,
    snapshot,
    write_tree,
)

from envpipe_megatron.attach import attach
from envpipe_megatron.patching.catalog import PatchError
from envpipe_megatron.patching.checkout import apply_patch

SCRIPT = """\
import json, sys
import toy.schedules, toy.training.loop
from neighbour import NAME

toy.schedules.envpipe_hook = lambda chosen: "hooked"
print(json.dumps({
    "name": __name__, "main": sys.modules["__main__"].NAME, "file": __file__,
    "argv": sys.argv, "path": sys.path[0], "chosen": toy.schedules.get_func(),
    "modules": [toy.schedules.__file__, toy.training.loop.envpipe.__file__],
}))
"""
FAILS = """\
import toy.schedules

def hook(chosen):
    raise ValueError("in a hook")

toy.schedules.envpipe_hook = hook
toy.schedules.get_func()
"""


@pytest.fixture
def start(modules, tmp_path):
    """Runs a script in a Python whose package has these patches, attached or by itself."""
    catalog = "import pathlib, envpipe_megatron.patching.catalog as catalog\n"
    patches = f"catalog.shipped_folder = lambda name: pathlib.Path({str(modules)!r})\n"
    site = write_tree(tmp_path / "site", {"sitecustomize.py": catalog + patches})

    def run(*words, attached=True, imports=(), **variables):
        how = ["-m", "envpipe_megatron.attach"] if attached else []
        path = os.pathsep.join(map(str, (site, REPOSITORY, *imports)))
        return subprocess.run(
            [sys.executable, "-B", *how, *map(str, words)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture
def checkout(checkout, install, modules):
    install(modules)
    files = {"train.py": SCRIPT, "fails.py": FAILS, "neighbour.py": "NAME = 'beside it'\n"}
    write_tree(checkout, files)
    compileall.compile_dir(checkout, quiet=1)
    return checkout


def test_a_script_runs_as_in_a_patched_checkout_and_nothing_is_written(start, checkout, tmp_path):
    words = ["--tag", "of its own", "--envpipe", "-h"]
    patched = copy_tree(checkout, tmp_path / "patched")
    apply_patch(patched)
    by_itself = start(patched / "train.py", *words, attached=False)
    seen = json.loads(by_itself.stdout)
    assert seen["chosen"] == "hooked"
    assert seen["argv"][1:] == words
    assert seen["path"] == str(patched)

    before = snapshot(checkout)
    attached = start(checkout / "train.py", *words)
    assert attached.stdout == by_itself.stdout.replace(str(patched), str(checkout)), attached.stderr
    assert snapshot(checkout) == before
    assert start(patched / "train.py", *words).stdout == by_itself.stdout


def test_what_a_script_elsewhere_imports_is_patched_too(start, checkout, tmp_path):
    script = write_tree(tmp_path / "mine", {"train.py": SCRIPT, "neighbour.py": "NAME = 1\n"})
    said = start(script / "train.py", imports=[checkout])
    seen = json.loads(said.stdout)
    assert seen["modules"][0] == str(checkout / "toy/schedules.py")
    assert (seen["chosen"], seen["path"]) == ("hooked", str(script))


def test_tracebacks_show_the_lines_that_ran(start, checkout):
    said = start(checkout / "fails.py")
    file = checkout / "toy/schedules.py"
    shown = f'File "{file}", line 11, in get_func\n    chosen = envpipe_hook(chosen)\n'
    assert shown in said.stderr
    assert said.stderr.endswith("ValueError: in a hook\n")


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"toy/schedules.py": "mine\n"}, "toy/schedules.py (changed: no place for the lines"),
        ({"toy/training/envpipe.py": "mine\n"}, "toy/training/envpipe.py (changed: already exists"),
        ({"toy/version.py": "MAJOR = 9\n"}, "toy/version.py says MAJOR = 9"),
    ],
)
def test_what_apply_refuses_is_refused_alike(start, checkout, files, named):
    write_tree(checkout, files)
    with pytest.raises(PatchError) as refused:
        apply_patch(checkout)
    assert named in str(refused.value)
    said = start(checkout / "train.py")
    where = f"The script would import it from {checkout}"
    assert (said.returncode, said.stderr) == (1, f"Error: {refused.value}\n{where}\n")


def test_more_than_modules_cannot_be_attached(checkout, install, patches):
    install(patches)
    finders = list(sys.meta_path)
    with pytest.raises(PatchError, match=r"more than Python modules.*run\.sh"):
        attach(checkout)
    assert sys.meta_path == finders


def test_without_git_the_job_runs_without_envpipe(start, checkout):
    script = (
        "import sys, toy.schedules\nprint(hasattr(toy.schedules, 'envpipe_hook'), sys.argv[1:])"
    )
    write_tree(checkout, {"train.py": script})
    ours = ["--envpipe", "--envpipe-type", "optimal", "--envpipe-level=x"]
    said = start(checkout / "train.py", "--lr", "-1", *ours, "--seed", "1", PATH="")
    assert (said.returncode, said.stdout) == (0, "False ['--lr', '-1', '--seed', '1']\n")
    assert said.stderr.startswith("Warning: this job runs without EnvPipe. EnvPipe patches by `git")
    assert "Install git" in said.stderr


def test_a_fork_takes_a_tag_and_no_checkout_is_told(start, checkout, tmp_path):
    write_tree(checkout, {"toy/version.py": "MAJOR = 9\n"})
    said = start("--tag", "v1.0", checkout / "train.py")
    assert json.loads(said.stdout)["chosen"] == "hooked"
    write_tree(tmp_path, {"train.py": SCRIPT})
    assert "This is no checkout of a supported project" in start("train.py").stderr
    assert "there is no script trian.py" in start("trian.py").stderr
