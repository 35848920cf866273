"""`envpipe profile --layers`: which jobs it starts, and what becomes of what they leave."""

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import run

from envpipe_megatron.gpu.registry import VISIBLE_VARIABLE
from envpipe_megatron.search.layer_file import layers_text, read_layers
from envpipe_megatron.search.layer_jobs import JOB_VARIABLE, LayerJob, add_measures
from envpipe_megatron.search.layer_profile import (
    AllReduce,
    Block,
    BytesPerParameter,
    Curve,
    LayerProfile,
    Links,
    Measure,
    Sizes,
)

pytest.importorskip("torch")

MEASURE = Measure(np.array([0.25]), np.array([0.5]), parameters=12e6, activation_bytes=2**24)
PROFILE = LayerProfile((Block(("layer",), 4),), np.array([1980]), {}, BytesPerParameter(), Links())
LINKS = Links(Curve(np.array([1e6]), np.array([1e-4])))


class Jobs:
    """Stands for torchrun: leaves what a job would, but for a microbatch size that fails."""

    def __init__(self) -> None:
        self.words: list[list[str]] = []
        self.visible: list[str] = []
        self.fails_at = 0

    def run(self, words: list[str], environment: dict[str, str], _signals: object) -> int:
        self.words.append(words)
        if JOB_VARIABLE not in environment:
            Path(words[-1]).write_bytes(pickle.dumps((LINKS, [640.0, 608.0])))
            return 0
        self.visible.append(environment.get(VISIBLE_VARIABLE, "all"))
        job = LayerJob.of_text(environment[JOB_VARIABLE])
        for sizes in job.sizes:
            if sizes.microbatch_size == self.fails_at:
                return 1
            measures = {sizes: {"layer": MEASURE}}
            add_measures(Path(job.output), replace(PROFILE, measures=measures, source=job.source))
        return 0


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    jobs = Jobs()
    monkeypatch.delenv(VISIBLE_VARIABLE, raising=False)
    monkeypatch.setattr("envpipe_megatron.cli.jobs.profile.run_torchrun", jobs.run)
    return jobs


def profile(folder: Path, *options: str, gpus: int = 2) -> tuple[int, str]:
    script = folder / "train.py"
    script.write_text("")
    words = ["profile", "--layers", "--output", str(folder / "layers.json"), *options, "--"]
    words += ["--standalone", "--nproc-per-node", str(gpus), str(script), "--bf16"]
    result = run(*words)
    return result.exit_code, result.output


def test_a_job_for_each_way_to_share_a_microbatch(tmp_path: Path, jobs: Jobs) -> None:
    code, told = profile(tmp_path)
    assert code == 0, told
    made = read_layers(tmp_path / "layers.json")
    assert set(made.measures) == {Sizes(t, b) for t in (1, 2) for b in (1, 2, 4)}
    assert made.links.message_s(1e6, False) == 1e-4
    links, *of_layers = jobs.words
    assert links[:3] == ["--standalone", "--nproc-per-node", "2"]
    assert [words[words.index("-m") - 1] for words in of_layers] == ["1", "2"]
    assert all(words[-2:] == [str(tmp_path / "train.py"), "--bf16"] for words in of_layers)
    assert jobs.visible == ["1", "0,1"]
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "layers.json"}


@pytest.mark.parametrize(
    ("seen", "given"),
    [
        ("4, 5,6", ["5", "4,5"]),
        ("GPU-a,GPU-b", ["GPU-b", "GPU-a,GPU-b"]),
        ("", ["", ""]),
        ("3", ["3", "3"]),
    ],
)
def test_jobs_see_gpus_by_the_names_that_the_command_sees_them_by(
    tmp_path: Path, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, seen: str, given: list[str]
) -> None:
    monkeypatch.setenv(VISIBLE_VARIABLE, seen)
    assert profile(tmp_path)[0] == 0
    assert jobs.visible == given


def test_links_that_are_known_are_kept(tmp_path: Path, jobs: Jobs) -> None:
    assert profile(tmp_path, "--microbatch-size", "1")[0] == 0
    path = tmp_path / "layers.json"
    known = read_layers(path)
    curve = Curve(np.array([1e6]), np.array([7e-4]))
    more = Links(curve, curve, (AllReduce(8, False, curve), AllReduce(16, True, curve)))
    path.write_text(layers_text(replace(known, links=more)))
    assert profile(tmp_path, "--microbatch-size", "1,2")[0] == 0
    made = read_layers(path)
    assert set(made.measures) == {Sizes(t, b) for t in (1, 2) for b in (1, 2)}
    assert made.links.message_s(1e6, True) == made.links.message_s(1e6, False) == 7e-4
    assert [each.gpus for each in made.links.all_reduce] == [8, 16]
    assert jobs.visible[2:] == ["1", "0,1"]
    path.write_text(layers_text(replace(made, links=Links())))  # they alone are missing
    assert profile(tmp_path, "--microbatch-size", "1,2")[0] == 0
    assert read_layers(path).links.message_s(1e6, False) == 1e-4
    assert len(jobs.visible) == 4


def test_it_goes_on_where_a_job_failed(tmp_path: Path, jobs: Jobs) -> None:
    jobs.fails_at = 2
    code, told = profile(tmp_path, gpus=1)
    assert code == 1
    assert "leave out sizes that do not fit" in told
    assert set(read_layers(tmp_path / "layers.json").measures) == {Sizes(1, 1)}
    jobs.fails_at = 0
    code, told = profile(tmp_path, "--microbatch-size", "1,2", gpus=1)
    assert code == 0, told
    assert set(read_layers(tmp_path / "layers.json").measures) == {Sizes(1, 1), Sizes(1, 2)}
    assert len(jobs.words) == 2
    code, told = profile(tmp_path, "--microbatch-size", "1,2", gpus=1)
    assert code == 0
    assert "nothing to measure" in told
    assert "Wrote" not in told
    assert len(jobs.words) == 2


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("other.py --bf16", (), "of another command (got 'other.py --bf16')"),
        ("{script} --bf16", ("--clocks", "1500"), "at other clocks (MHz) (got 1980)"),
    ],
)
def test_what_is_there_of_another_profile_is_refused_before_any_job(
    tmp_path: Path, jobs: Jobs, source: str, options: tuple[str, ...], said: str
) -> None:
    known = replace(
        PROFILE,
        measures={Sizes(1, b): {"layer": MEASURE} for b in (1, 2, 4)},
        source=source.format(script=tmp_path / "train.py"),
    )
    (tmp_path / "layers.json").write_text(layers_text(known))
    code, told = profile(tmp_path, "--tensor-parallel", "1", *options)
    assert code
    assert said in " ".join(told.split())
    assert not jobs.words


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tensor-parallel", "4"), "more GPUs than the command's 2"),
        (("--expert-parallel", "4"), "more GPUs than the command's 2"),
        (("--microbatch-size", "0"), "at least 1"),
    ],
)
def test_sizes_that_cannot_be_measured_are_refused(
    tmp_path: Path, jobs: Jobs, options: tuple[str, ...], said: str
) -> None:
    code, told = profile(tmp_path, *options)
    assert code
    assert said in " ".join(told.split())
    assert not jobs.words


def test_what_it_would_write_over_must_be_a_layer_profile(tmp_path: Path, jobs: Jobs) -> None:
    (tmp_path / "layers.json").write_text("{}")
    code, told = profile(tmp_path)
    assert code
    assert "from elsewhere" in told
    assert not jobs.words


def test_sizes_are_for_layers(tmp_path: Path) -> None:
    words = ["profile", "--output", str(tmp_path / "a.csv"), "--clocks", "1000", "--", "train.py"]
    result = run(*words)
    assert result.exit_code == 2
    assert "for --layers only" in result.output
