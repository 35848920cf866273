"""`launch/train_llama_deepspeed.sh`: what it refuses, what it starts, and one run to its bill."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from on_request import on_request

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")
import torch

pytestmark = pytest.mark.xdist_group("launch")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "train_llama_deepspeed.sh"
TRAINING = ROOT / "launch" / "train_llama_deepspeed.py"
GOOD = {"--type": "envelope", "--scheduling": "ours", "--reconfig": "balanced", "--gpus": "0,1,3"}
VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "DS_ACCELERATOR", "ENVPIPE_EMULATED_GPU")
#: Stands in for `envpipe`, and writes down how it was called.
FAKE = f"""#!/usr/bin/env bash
printf '%s\\0' "$@" >called
for name in {" ".join(VARIABLES)}; do printf '%s=%s\\n' "$name" "${{!name-unset}}"; done >variables
"""
PROGRAMS = str(Path(sys.executable).parent)


def words(**changed):
    """The command line, with options changed or, by None, left out."""
    options = GOOD | {f"--{name}": value for name, value in changed.items()}
    return [word for name, value in options.items() if value is not None for word in (name, value)]


def run(folder, *arguments, **environ):
    fake = folder / "programs" / "envpipe"
    fake.parent.mkdir()
    fake.write_text(FAKE)
    fake.chmod(0o755)
    path = os.pathsep.join((str(fake.parent), os.environ["PATH"]))
    return subprocess.run(
        [SCRIPT, *arguments],
        cwd=folder,
        env={"PATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def started(folder):
    lines = (folder / "variables").read_text().splitlines()
    called = (folder / "called").read_text().split("\0")[:-1]
    return called, dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (words(gpus=None), "--gpus is missing"),
        (words(type=""), "--type is missing"),
        (words(type="fast"), "--type is one of baseline uniform envelope optimal, not 'fast'"),
        (words(scheduling="gpipe"), "--scheduling is one of 1f1b ours envpipe auto, not 'gpipe'"),
        (words(reconfig="best"), "--reconfig is one of default greedy balanced, not 'best'"),
        (words(type="uniform"), "--reconfig balanced goes with --type envelope, not uniform"),
        (words(scheduling="auto"), "--scheduling auto goes with --type optimal, not envelope"),
        (words(gpus="0;1"), "--gpus is a list of numbers such as 0,1,3, or emulated:4, not '0;1'"),
        (words(gpus="0,2,0"), "--gpus has 0 more than once"),
        (words(gpus="emulated:1"), "--gpus emulated:1 is no pipeline"),
        ([*words(), "--type"], "--type needs a value"),
        ([*words(), "--model"], "no option --model; those of the training script follow --"),
    ],
)
def test_what_is_wrong_is_named_and_starts_nothing(tmp_path, arguments, message):
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "--help tells the options" in done.stderr
    assert not (tmp_path / "called").exists()


def test_help_tells_all_options(tmp_path):
    done = run(tmp_path, "--help")
    assert done.returncode == 0
    for text in (*GOOD, "--help", "emulated:4", "ENVPIPE_EMULATED_GPU", "--model", "OUTPUT"):
        assert text in done.stdout
    assert not (tmp_path / "called").exists()


def test_it_starts_a_stage_on_each_gpu_and_bills_them(tmp_path):
    rest = ["--model", "llama-1b", "--data", "a b.jsonl", "--type", "uniform", ""]
    done = run(tmp_path, *words(), "--", *rest)
    assert done.returncode == 0, done.stderr
    called, variables = started(tmp_path)
    output = called[called.index("--output") + 1]
    assert re.fullmatch(r"runs/llama-envelope-ours-balanced-\d{8}-\d{6}", output)
    config = str(ROOT / "configs" / "deepspeed" / "llama.json")
    assert called == [
        "launch", "--standalone", "--nproc-per-node", "3", "--output", output,
        str(TRAINING), "--deepspeed_config", config, *words(gpus=None),
        "--output", output, *rest,
    ]  # fmt: skip
    assert variables == {
        "CUDA_VISIBLE_DEVICES": "0,1,3",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "DS_ACCELERATOR": "unset",
        "ENVPIPE_EMULATED_GPU": "unset",
    }


@pytest.mark.parametrize("gpu", ["a100-sxm", "v100"])
def test_it_emulates_gpus_where_there_are_none(tmp_path, gpu):
    environ = {} if gpu == "a100-sxm" else {"ENVPIPE_EMULATED_GPU": gpu}
    done = run(tmp_path, *words(gpus="emulated:4"), OUTPUT="here", **environ)
    assert done.returncode == 0, done.stderr
    called, variables = started(tmp_path)
    assert called[called.index("--nproc-per-node") + 1] == "4"
    folders = [called[i + 1] for i, word in enumerate(called) if word == "--output"]
    assert folders == ["here", "here"], "one report shows all"
    assert variables["CUDA_VISIBLE_DEVICES"] == ""
    assert (variables["DS_ACCELERATOR"], variables["ENVPIPE_EMULATED_GPU"]) == ("cpu", gpu)


# The training script


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_llama_deepspeed", TRAINING)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(script, monkeypatch, *given):
    monkeypatch.setattr(sys, "argv", ["train_llama_deepspeed.py", *given])
    return script.parse()


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("a.txt", "one\ntwo\n", ["one\ntwo\n"]),
        ("a.json", '["one", "two"]', ["one", "two"]),
        (
            "a.json",
            '{"prompt": "one", "n": 1, "output": "two"}\n\n"three"\n',
            ["one\ntwo", "three"],
        ),
        ("a.jsonl", '{"text": "one"}', ["one"]),
    ],
)
def test_texts_are_read(script, tmp_path, name, content, texts):
    (tmp_path / name).write_text(content)
    assert script.read_texts(tmp_path / name) == texts


def test_stages_draw_the_same_sequences_and_what_comes_next(script):
    tokens = torch.arange(10, 41, dtype=torch.int32)
    first, last = (script.batches(tokens, 4, 5, seed=3) for _ in range(2))
    for _ in range(3):
        inputs, labels = next(first)
        assert torch.equal(next(last)[1], labels)
        assert inputs.shape == (4, 5)
        assert torch.equal(labels, inputs + 1)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "cannot be read: .*No such file"),
        ('{"text": ', [], "cannot be read: .*delimiter|cannot be read: Expecting value"),
        ('"short"', ["--sequence-length", "6"], "6 tokens in .*Give more text"),
        ('"text"', ["--tokenizer", "somewhere"], "folder of --tokenizer is not there"),
    ],
)
def test_data_that_cannot_be_trained_with(script, monkeypatch, tmp_path, content, options, message):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    args = arguments(script, monkeypatch, "--data", str(path), *options)
    with pytest.raises(script.DataError, match=message):
        script.make_tokens(args, 512)


# One real run


@on_request("DEEPSPEED")  # which compiles first
def test_it_trains_to_its_bill(tmp_path):
    texts = [{"prompt": f"How much is {n} and {n}?", "output": f"It is {2 * n}."} for n in range(3)]
    (tmp_path / "data.json").write_text("\n".join(map(json.dumps, texts)))
    config = json.loads((ROOT / "configs" / "deepspeed" / "llama.json").read_text())
    config["gradient_accumulation_steps"] = 4
    config["envpipe"]["baseline_steps"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [
        SCRIPT, *words(type="baseline", scheduling="1f1b", reconfig="default", gpus="emulated:2"),
        "--", "--model", "tiny", "--data", "data.json", "--deepspeed_config", "config.json",
        "--sequence-length", "16", "--train-steps", "4",
    ]  # fmt: skip
    environ = {
        **os.environ,
        "PATH": os.pathsep.join((PROGRAMS, os.environ["PATH"])),
        "OUTPUT": "out",
        "ENVPIPE_EMULATED_FORWARD_S": "0.002",
    }
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tiny on 2 stages; data.json: " in done.stdout
    losses = re.findall(r"^step \d/4: loss (\S+), \S+ s$", done.stdout, re.M)
    assert len(losses) == 4
    assert float(losses[3]) < float(losses[0])
    assert "only measuring, in the framework's order" in done.stdout, "the flags win"
    assert "energy of 2 GPUs in training: " in done.stdout
    bill = json.loads((tmp_path / "out" / "bill.json").read_text())
    assert bill["complete"] is True
    assert (tmp_path / "out" / "summary.json").exists()
