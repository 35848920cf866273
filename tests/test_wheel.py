"""The wheel, made from the source distribution and installed: it works outside of a checkout."""

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from energy_lines import window
from on_request import on_request

from envpipe_megatron import __version__
from envpipe_megatron.patching.catalog import load_catalog

REPOSITORY = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.xdist_group("wheel")  # one worker makes what they share


def ran(*words, cwd, **variables):
    done = subprocess.run(
        [*map(str, words)],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def build(target, source, folder):
    """Make a distribution without an environment of its own, which would need a network."""
    code, said = ran(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder,
                     cwd=source)  # fmt: skip
    assert code == 0, said


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of an installation from the wheel that the source distribution makes."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    build("sdist", REPOSITORY, folder)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    build("wheel", folder / archive.name.removesuffix(".tar.gz"), folder)
    (wheel,) = folder.glob("*.whl")
    install = "install", "--quiet", "--no-index", "--no-deps", "--target", folder / "site", wheel
    code, said = ran(sys.executable, "-m", "pip", *install, cwd=folder)
    assert code == 0, said
    return folder / "site"


@pytest.fixture
def envpipe(site, tmp_path):
    """Run the installed command in an empty folder; returns what it printed."""

    def run(*words, code=0):
        done = ran(sys.executable, site / "bin" / "envpipe", *words,
                   cwd=tmp_path, PYTHONPATH=str(site), COLUMNS="200")  # fmt: skip
        assert done[0] == code, done[1]
        return done[1]

    return run


def test_type_checkers_read_the_api(site):
    assert (site / "envpipe_megatron" / "py.typed").is_file()  # PEP 561


def test_one_version_everywhere():
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    changes = (REPOSITORY / "CHANGELOG.md").read_text()
    assert str(citation["version"]) == __version__
    newest = re.search(r"^## (\S+) - (\S+)$", changes, re.MULTILINE)
    assert newest[1] == __version__
    assert newest[2] == str(citation["date-released"])


def test_files_that_are_no_modules_are_in_it(site):
    def of(folder):
        found = (path for path in folder.rglob("*") if path.is_file())
        return {
            str(path.relative_to(folder)) for path in found if path.suffix not in (".py", ".pyc")
        }

    package = site / "envpipe_megatron"
    assert of(package / "report") == of(REPOSITORY / "envpipe_megatron" / "report")
    assert of(package / "patches") == of(REPOSITORY / "patches")
    assert of(package / "configs" / "gpus") == of(REPOSITORY / "configs" / "gpus")
    assert load_catalog(package / "patches") == load_catalog()


def test_commands_from_the_wheel(envpipe, site, tmp_path):
    assert envpipe("--version").split() == ["envpipe,", "version", __version__]
    where = "import envpipe_megatron; print(envpipe_megatron.__file__)"
    _, file = ran(sys.executable, "-c", where, cwd=tmp_path, PYTHONPATH=str(site))
    assert Path(file.strip()).is_relative_to(site)
    assert "level order" in envpipe("explain", "--", "--pipeline-model-parallel-size", "4")
    said = envpipe("patch", "apply", tmp_path, code=1)
    assert all(patch.tag in said for patch in load_catalog())


def test_a_report_from_the_wheel(envpipe, tmp_path):
    log = tmp_path / "run" / "energy.jsonl"
    log.parent.mkdir()
    log.write_text("".join(f"{json.dumps(window(0, number))}\n" for number in range(9)))
    assert "energy of 1 GPUs: 900 J, 0.25 Wh" in envpipe("report", "run")
    page = (tmp_path / "run" / "report" / "index.html").read_text()
    assert "<style>" in page
    assert "bokeh" in page.lower()


@on_request("QUICKSTART")
def test_the_quickstart_from_the_wheel(envpipe, tmp_path):
    pytest.importorskip("megatron.core")
    said = envpipe("quickstart")
    assert "less energy" in said
    assert (tmp_path / "runs" / "quickstart" / "report" / "index.html").is_file()
