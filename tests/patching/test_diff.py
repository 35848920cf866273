"""Diffs as patches/make.py writes them: where they fit, and what they may hold."""

import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from on_request import examples
from patch_project import REPOSITORY, edited_files, maker, stock_files, write_tree

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.patching.catalog import PatchError, load_catalog, read_patch

make = maker()
# Few different lines, so that the same stretch stands in many places.
LINES = st.lists(st.sampled_from([b"a", b"b", b"", b"c\r", b"\xff\xfe"]), max_size=14)


@st.composite
def contents(draw):
    text = b"\n".join(draw(LINES))
    return text + b"\n" if draw(st.booleans()) else text


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(contents(), contents())
def test_git_apply_makes_the_same_bytes(tmp_path, before, after):
    if before == after or not after:
        return
    file = tmp_path / "dir" / "file.txt"
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    if before:
        file.write_bytes(before)
    text = make.diff(make.Change("dir/file.txt", before or None, after))
    for flag, wanted in ((), after), (("-R",), before):
        subprocess.run(["git", "apply", *flag], input=text, cwd=tmp_path, check=True)
        assert (file.read_bytes() if file.exists() else b"") == wanted


def context(text):
    """The lines of a diff's hunks that are on both sides."""
    return [line[1:] for line in text.splitlines(keepends=True) if line.startswith(b" ")]


@pytest.mark.parametrize("number", [1, 3])
def test_context_grows_only_where_a_hunk_would_fit_twice(number):
    """For `git apply` takes the nearest of several places, which in a fork may be another."""
    alike = [b"x\n", b"y\n", b"z\n"] * number
    before = [b"head\n", *alike, b"tail\n"]
    after = [*before[:2], b"new\n", *before[2:]]
    made = make.diff(make.Change("f", b"".join(before), b"".join(after)))
    # `x`, `y` around the new line are there `number` times; with `head` in front, once.
    assert context(made) == [b"x\n", b"y\n"] if number == 1 else [b"head\n", *alike[:3]]


@pytest.fixture
def trees(tmp_path):
    stock = write_tree(tmp_path / "stock", stock_files(0))
    products = ("toy/__pycache__/x.cpython-311.pyc", ".git/config", ".envpipe-patch.json")
    return stock, write_tree(tmp_path / "edited", edited_files(0) | dict.fromkeys(products, "x"))


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
    assert "new     toy/training/envpipe.py" in done.stdout
    (patch,) = load_catalog(folder.parent)
    assert (patch.project, patch.tag, patch.commit) == ("toy", "odd", "33")
    assert [hook["attribute"] for hook in patch.hooks] == ["a"]
    assert patch.recognition.fits(trees[0])
    assert patch.recognition.fits(trees[1])
    (trees[0] / "untouched.txt").write_text("of another version")
    assert not patch.recognition.fits(trees[0])

    done = subprocess.run([*command, "v9"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no commit of the tag (got 'v9')" in done.stderr


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda root: (root / "untouched.txt").unlink(), "removed"),
        (lambda root: (root / "untouched.txt").chmod(0o755), "mode"),
        (lambda root: (root / "untouched.txt").write_bytes(b"\0"), "Only text"),
        (lambda root: (root / "untouched.txt").write_bytes(b""), "Only text"),
        (lambda root: (root / "link").symlink_to("untouched.txt"), "Only text"),
        (lambda root: write_tree(root, {"new/file.py": "x"}), "new folder"),
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
        (patch.description[:-5], patch.text),
    ):
        with pytest.raises(PatchError):
            read_patch(description, text)
