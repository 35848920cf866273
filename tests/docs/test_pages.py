"""What pages name is there: links, commands, options, files of tests; and tables are short."""

import re
import shlex
from pathlib import Path
from typing import Any

import click
import page_commands
import page_options
import pytest
from on_request import on_request

from envpipe_megatron.cli import main
from envpipe_megatron.integrations.options import flag_of
from envpipe_megatron.runtime.job.options import OPTIONS
from envpipe_megatron.search.layer_file import read_layers

ROOT = Path(__file__).resolve().parents[2]
PAGES = page_commands.pages()
JOB_OPTIONS = {*map(flag_of, OPTIONS), "--envpipe", "--envpipe-recompute"}
#: Commands that hand over what follows the script, or `--`, to another program.
STARTERS = ("explain", "launch", "profile")


def ids(path):
    return str(path.relative_to(ROOT))


def without_code(text):
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(page):
    """The anchors that GitHub and mkdocs make of a page's headings."""
    lines = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).splitlines()
    titles = [line.lstrip("#").strip().lower() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), target


def test_every_page_is_reached_from_the_start_page():
    seen, found = set(), [ROOT / "README.md"]
    while found:
        page = found.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        targets = re.findall(r"\]\(([^)#\s]+)", without_code(page.read_text()))
        found += [(page.parent / target).resolve() for target in targets if "://" not in target]
    assert not set(PAGES) - seen


def test_the_table_of_options_is_made_from_the_code():
    """Where it fails: python docs/tools/page_options.py."""
    text = page_options.PAGE.read_text()
    assert text == page_options.with_table(text)


def command_of(words):
    """The command that words begin with, and the words behind its name."""
    command: Any = main
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    return command, words


def known_options(command):
    options = {"--help"}
    for parameter in command.params:
        options.update(parameter.opts, parameter.secondary_opts)
    if command.name in STARTERS:
        options |= {"--nproc-per-node", "--standalone", "--max-restarts"}  # torchrun's
    return options


def envpipe_commands(page):
    """Each `envpipe` command of a page, in its blocks and within lines, as words."""
    text = page.read_text()
    blocks = [line for block in page_commands.blocks(page) for line in block.commands()]
    spans = re.findall(r"`(envpipe [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for line in blocks + [" ".join(span.split()) for span in spans]:
        line = re.sub(r"<[a-z' ]+>|\$\(.*?\)", "X", line)
        if found := re.search(r"(?:^|[=\s/])envpipe ((?:[a-z]|--dry).*)", line):
            yield shlex.split(found[1].split(" && ")[0], comments=True)


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_and_their_options_exist(page):
    for words in envpipe_commands(page):
        command, rest = command_of(words)
        assert command is not main or rest[0] in ("...", "COMMAND"), words
        if isinstance(command, click.Group):
            continue
        options, known = set(), known_options(command)
        for word in rest:
            if command.name in STARTERS and (word == "--" or word.endswith(".py")):
                break
            if re.match(r"--[a-z]", word):
                options.add(word.partition("=")[0])
        assert not options - known - JOB_OPTIONS, words


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_options_of_jobs_exist(page):
    named = re.findall(r"--envpipe(?:-[a-z]+)*(?![a-z-])", page.read_text())
    assert not {name for name in named if name not in JOB_OPTIONS | {"--envpipe-"}}


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_files_of_this_repository_exist(page):
    text = re.sub(r"\S*(of|at) [0-9a-f]{7,8}\b|`[^`]*` of [0-9a-f]{7,8}", "", page.read_text())
    named = re.findall(r"(?<![\w/.-])((?:tests|launch|configs|patches)/[\w/.-]+\.\w+)", text)
    assert not [name for name in named if not (ROOT / name).exists()]


def test_pages_that_code_names_exist():
    tracked = ["envpipe_megatron", "benchmarks", "launch", "patches", "configs"]
    files = [path for name in tracked for path in (ROOT / name).rglob("*") if path.is_file()]
    texts = [path.read_text() for path in files if path.suffix in (".py", ".sh", ".toml", ".patch")]
    named = set(re.findall(r"(?<![\w/.])(docs/[\w/]+\.(?:md|json))", "".join(texts)))
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "evidence").glob("*.md")), ids=ids)
def test_cells_of_evidence_are_short(page):
    """The words of a cell; a link counts by what is shown of it."""
    if page.name == "archive.md":
        return
    for line in page.read_text().splitlines():
        if line.startswith("|") and page.name != "index.md":
            for cell in re.split(r"(?<!\\)\|", line)[1:-1]:
                assert len(re.sub(r"\]\([^)]*\)|[*`\[]", "", cell).strip()) < 120, cell


def test_the_sample_of_a_layer_profile_can_be_read():
    assert len(read_layers(ROOT / "configs" / "profiles" / "layers.json").pieces) == 26


@on_request("DOCS")
def test_every_command_that_needs_no_gpu_runs():
    assert page_commands.main([]) == 0
