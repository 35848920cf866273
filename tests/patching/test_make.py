import os
import subprocess
import sys

import pytest
from patch_project import REPOSITORY, edited_files, maker, stock_files, write_tree

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.patching.catalog import PatchError, load_catalog, read_patch

make = maker()


@pytest.fixture
def trees(tmp_path):
    stock = write_tree(tmp_path / "stock", stock_files(0))
    return stock, write_tree(tmp_path / "edited", edited_files(0))


def changes(trees):
    return [change.path for change in make.find_changes(*trees)]


def test_the_script_writes_patch_and_description(tmp_path, trees):
    folder = tmp_path / "patches" / "toy"
    folder.mkdir(parents=True)
    # Known by a file's hash, as a project without a version is.
    (folder / "project.toml").write_text(
        'title = "Toy"\nrecognition = { file = "untouched.txt" }\n'
        'commits = { odd = "33" }\n[[hooks]]\nmodule = "toy"\nattribute = "a"\n'
        '[[hooks]]\nmodule = "toy"\nattribute = "b"\ntags = ["other"]\n'
    )
    command = [sys.executable, "patches/make.py", *map(str, trees), "--project", "toy"]
    command += ["--output", str(folder.parent), "--tag"]
    done = subprocess.run([*command, "odd"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "new     toy/new/parts/envpipe.py" in done.stdout
    (patch,) = load_catalog(folder.parent)
    assert (patch.project, patch.tag, patch.commit) == ("toy", "odd", "33")
    assert [hook.attribute for hook in patch.hooks] == ["a"]
    assert patch.recognition.fits(trees[0])
    assert patch.recognition.fits(trees[1])
    (trees[0] / "untouched.txt").write_text("of another version")
    assert not patch.recognition.fits(trees[0])

    done = subprocess.run([*command, "v9"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no commit of the tag (got 'v9')" in done.stderr


def test_build_products_are_passed_over(trees):
    before = changes(trees)
    for path in ("toy/__pycache__/x.cpython-311.pyc", ".git/config", ".envpipe-patch.json"):
        write_tree(trees[1], {path: "x"})
    assert changes(trees) == before


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda root: (root / "untouched.txt").unlink(), "removed"),
        (lambda root: (root / "untouched.txt").chmod(0o755), "mode"),
        (lambda root: (root / "untouched.txt").write_bytes(b"\0"), "Only text"),
        (lambda root: (root / "untouched.txt").write_bytes(b""), "Only text"),
        (lambda root: (root / "link").symlink_to("untouched.txt"), "Only text"),
        (lambda root: (root / "new.sh").write_text("x") and (root / "new.sh").chmod(0o755), "exec"),
    ],
)
def test_an_edit_that_a_patch_cannot_hold_is_refused(trees, edit, said):
    edit(trees[1])
    with pytest.raises(EnvPipeError, match=said):
        changes(trees)


def test_a_description_belongs_to_its_patch(catalog):
    patch, other = catalog
    assert read_patch(patch.description, patch.text) == patch
    for description, text in (
        (patch.description, other.text),
        (patch.description.replace("loop.py", "pool.py"), patch.text),
        (patch.description.replace("envpipe-patch/1", "envpipe-patch/2"), patch.text),
        (patch.description.replace("[recognition]", "[recog]"), patch.text),
        (patch.description.replace('"toy/version.py"', '"../../etc/passwd"'), patch.text),
        (patch.description[:-5], patch.text),
    ):
        with pytest.raises(PatchError):
            read_patch(description, text)


def test_executable_bits_of_unpacked_archives_are_compared_too(trees):
    assert os.access(trees[0] / "run.sh", os.X_OK)
    (trees[0] / "run.sh").chmod(0o644)
    with pytest.raises(EnvPipeError, match="mode"):
        changes(trees)
