from functools import partial

import commands
import pytest
from patch_project import snapshot, stock_files, write_tree

from envpipe_megatron.patching.checkout import apply_patch
from envpipe_megatron.patching.liveness import Outcome, ask_hooks


def hook(module, attribute, *used_in):
    return {"module": module, "attribute": attribute, "used_in": used_in}


SCHEDULES = hook("toy.schedules", "envpipe_hook", "get_func")
LOOP = hook("toy.training.loop", "envpipe", "train")


@pytest.fixture
def patched(checkout):
    apply_patch(checkout)
    return checkout


def asked(root, *hooks):
    (answer,) = ask_hooks(root, hooks)
    return answer.outcome, answer.detail


UNASKED = "envpipe_hook = None\ndef get_func():\n    return 1\n"
WRAPPED = """\
import functools
envpipe = None
def wrapping(function):
    @functools.wraps(function)
    def wrapper():
        return function()
    return wrapper
@wrapping
def train():
    def inner():
        return [envpipe for _ in range(2)]
    return inner
class Loop:
    def step(self):
        return envpipe
"""


@pytest.mark.parametrize(
    ("text", "place", "live", "said"),
    [
        (UNASKED, SCHEDULES, False, "get_func does not use envpipe_hook"),
        ("envpipe = None\ndef train(): pass\n", LOOP, False, "train does not use envpipe"),
        (UNASKED, hook("toy.schedules", "other"), False, "toy.schedules has no other"),
        (UNASKED, hook("toy.schedules", "envpipe_hook", "gone"), False, "AttributeError"),
        (WRAPPED, hook("toy.training.loop", "envpipe", "train", "Loop.step"), True, ""),
    ],
)
def test_a_hook_is_asked_in_what_its_module_holds(checkout, text, place, live, said):
    write_tree(checkout, {f"{place['module'].replace('.', '/')}.py": text})
    got, detail = asked(checkout, place)
    assert (got, said in detail) == (Outcome.LIVE if live else Outcome.NOT_LIVE, True)


@pytest.mark.parametrize("inside", [False, True], ids=["elsewhere", "in the checkout"])
def test_an_installed_package_that_wins_is_named(patched, tmp_path, monkeypatch, inside):
    """As megatron is: without __init__.py in the checkout, with one in what is installed."""
    (patched / "toy/__init__.py").unlink()
    installed = patched / ".venv/lib/site-packages" if inside else tmp_path / "site"
    monkeypatch.setenv("PYTHONPATH", str(installed))
    # One without __init__.py too shares its name with the checkout, which goes first.
    write_tree(installed, {"toy/schedules.py": "envpipe_hook = None\n"})
    assert asked(patched, SCHEDULES)[0] is Outcome.LIVE
    write_tree(installed, {"toy/__init__.py": ""})
    for place in (SCHEDULES, LOOP):  # the installed one lacks the latter
        assert asked(patched, place) == (Outcome.ELSEWHERE, str(installed / "toy"))
    (answer,) = ask_hooks(patched, [LOOP])
    assert "uninstall it" in answer.remedy


@pytest.mark.parametrize(
    ("line", "outcome", "words"),
    [
        ("import no_such_thing.part", Outcome.DEPENDENCY, "no_such_thing"),
        ("from broken import thing", Outcome.DEPENDENCY, "broken (ImportError"),
        ("import fails", Outcome.DEPENDENCY, "libcuda.so"),
        ("from typing import NoSuchName", Outcome.IMPORT_FAILED, "this is Python"),
        ("import toy.missing", Outcome.IMPORT_FAILED, "toy.missing"),
        ("this is no python", Outcome.IMPORT_FAILED, "SyntaxError"),
        ("import os; os._exit(7)", Outcome.IMPORT_FAILED, "exit status 7"),
        ("import os, signal; os.kill(os.getpid(), 11)", Outcome.IMPORT_FAILED, "SIGSEGV"),
        ("import sys; print('last words'); sys.exit(0)", Outcome.IMPORT_FAILED, "last words"),
    ],
)
def test_why_an_import_fails_is_told(patched, tmp_path, monkeypatch, line, outcome, words):
    dependencies = {"broken.py": "", "fails.py": "raise OSError('libcuda.so is missing')\n"}
    monkeypatch.setenv("PYTHONPATH", str(write_tree(tmp_path / "site", dependencies)))
    write_tree(patched, {"toy/training/loop.py": line + "\n"})
    answer, other = ask_hooks(patched, [LOOP, LOOP])
    assert answer.outcome is outcome
    assert words in answer.detail
    assert other.outcome is outcome


NEEDS_TRITON = """\
import outside, triton
import triton.language as tl
from triton.runtime import driver
assert triton.__version__ >= "3.4.0"
@triton.jit
def kernel(size: tl.constexpr = tl.constexpr(1)):
    pass
try:
    kernel[1](2)
except TypeError as error:
    assert "not subscriptable" in str(error)
else:
    raise AssertionError("a stand-in computes nothing")
"""
SEES_NO_TRITON = """\
try:
    import triton
except ImportError:
    pass
else:
    raise AssertionError("torch would call it")
"""


def test_triton_is_stood_in_for_and_said(run, patched, tmp_path, monkeypatch):
    hidden = {"sitecustomize.py": "import sys; sys.modules['triton'] = None\n"}
    site = write_tree(tmp_path / "site", {**hidden, "outside.py": SEES_NO_TRITON})
    monkeypatch.setenv("PYTHONPATH", str(site))
    write_tree(patched, {"toy/training/__init__.py": NEEDS_TRITON})
    said = run("check", patched)
    assert said.exit_code == 0, said.output
    assert "stood in for, as no hook calls it: triton\n" in said.output


def test_what_is_not_for_gpus_alone_is_still_missing(patched, tmp_path, monkeypatch):
    hidden = {"sitecustomize.py": "import sys; sys.modules['triton'] = None\n"}
    monkeypatch.setenv("PYTHONPATH", str(write_tree(tmp_path / "site", hidden)))
    write_tree(patched, {"toy/training/loop.py": "import triton, no_such_thing\n"})
    (answer,) = ask_hooks(patched, [LOOP])
    assert (answer.outcome, answer.detail) == (Outcome.DEPENDENCY, "no_such_thing")
    assert answer.remedy.startswith("Install it in this Python environment")


def test_the_probes_own_folder_is_not_on_the_path(patched):
    """As a training script sees it; this package has a catalog.py there."""
    write_tree(patched, {"toy/training/loop.py": "import catalog\n"})
    assert asked(patched, LOOP) == (Outcome.DEPENDENCY, "catalog")


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def run(catalog):
    return partial(commands.run, "patch")


def test_a_checkout_goes_there_and_back(run, checkout, patches):
    said = run("check", checkout)
    assert (said.exit_code, "stock" in said.output) == (1, True)
    assert f": {patches / 'toy/v1.0/envpipe.patch'}\n" in said.output
    said = run("apply", checkout)
    assert said.exit_code == 0
    assert "Patched Toy v1.0" in said.output
    assert "\n  run.sh\n" in said.output
    said = run("apply", checkout)
    assert (said.exit_code, "patched already" in said.output) == (0, True)
    patched = snapshot(checkout)
    said = run("check", checkout)
    assert said.exit_code == 0, said.output
    assert snapshot(checkout) == patched
    assert f"live: toy.schedules.envpipe_hook: {checkout}/toy/schedules.py" in said.output
    assert "Toy v1.0, patched" in said.output
    assert said.output.count("\nlive: ") == 2
    said = run("revert", checkout)
    assert (said.exit_code, "Took the patch" in said.output) == (0, True)
    said = run("revert", checkout)
    assert (said.exit_code, "Nothing was done" in said.output) == (0, True)


def test_a_fork_is_listed_and_proven(run, checkout):
    (checkout / "run.sh").write_text((checkout / "run.sh").read_text() + "echo fork\n")
    (checkout / "toy/version.py").write_text("MAJOR = 9\n")
    assert run("apply", checkout).exit_code == 1
    assert "no patch for this tag (got 'v7')" in run("apply", "--tag", "v7", checkout).output
    for command in (("apply", "--tag", "v1.0"), ("check",)):
        said = run(*command, checkout)
        assert said.exit_code == 0
        assert "differ from the released ones, and the patch fits them:\n  run.sh\n" in said.output
    assert run("revert", checkout).exit_code == 0


def test_commands_to_run_next_can_be_pasted(run, checkout):
    root = checkout.rename(checkout.with_name("check out"))
    assert f"is not applied; run `envpipe patch apply '{root}'`\n" in run("check", root).output
    assert f"envpipe patch check '{root}'\n" in run("apply", root).output


def test_what_is_patched_and_cannot_be_proven_is_its_own_exit_status(run, patched, tmp_path):
    write_tree(patched, {"toy/training/__init__.py": "import no_such_thing\n"})
    said = run("check", patched)
    assert said.exit_code == 3
    assert "needs a package: toy.training.loop.envpipe: no_such_thing" in said.output
    assert "Install it in this Python environment; then check again" in said.output


def test_check_names_what_was_changed(run, checkout):
    (checkout / "run.sh").write_text("mine\n")
    said = run("check", checkout)
    assert (said.exit_code, ", dirty: " in said.output) == (1, True)
    assert "  run.sh (changed: no place for the lines near 1)\n" in said.output
    (checkout / "run.sh").write_text(stock_files(0)["run.sh"])
    run("apply", checkout)
    (checkout / "run.sh").write_text("mine\n")
    (checkout / "toy/training/envpipe.py").unlink()
    said = run("check", checkout)
    assert said.exit_code == 1
    assert "changed-after" in said.output
    assert "  run.sh (changed: no place for the lines near 1)\n" in said.output
    assert "  toy/training/envpipe.py (missing" in said.output


def test_errors_are_messages(run, tmp_path, monkeypatch):
    for command in ("apply", "revert", "check"):
        said = run(command, tmp_path)
        assert said.exit_code == 1
        assert said.output.startswith("Error: This is no checkout of a supported project")
        assert "Toy v1.1" in said.output
    assert run("apply", tmp_path / "nowhere").exit_code == 2
    monkeypatch.setenv("PATH", "")
    said = run("apply", tmp_path)
    assert said.exit_code == 1
    assert "Install git, or run `envpipe patch apply` on a machine that has it" in said.output
