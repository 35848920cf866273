"""The options of a job, as flags or by name: what goes without saying, and what is refused."""

import argparse
import os
import re
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from envpipe_megatron.core.fields import Option
from envpipe_megatron.core.kinds import WHOLE
from envpipe_megatron.core.profile import make_profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.presets import resolve_preset
from envpipe_megatron.integrations.levels import JobError, Level
from envpipe_megatron.integrations.options import (
    OF_LEVELS,
    add_arguments,
    flag_of,
    flags_given,
    merged,
    prepare_files,
    read_options,
    read_settings,
    read_values,
)
from envpipe_megatron.policies.objective import Objective

PLANNED = f"--profile {__file__} --plan {__file__}"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("TYPE", "SCHEDULING", "RECONFIGURE"):
        monkeypatch.delenv(f"ENVPIPE_{name}", raising=False)


def parsed(flags):
    """Arguments from EnvPipe's flags, which are written without `envpipe-` here."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser.add_argument_group("envpipe"))
    return parser.parse_args(re.sub(r"--(?=[a-z])", "--envpipe-", flags).split())


def read(flags="", *, save=None, on_gpu=True, num_stages=4, **environment):
    with patch.dict(os.environ, environment):
        given = flags_given(parsed(flags))
        job = {"num_stages": num_stages, "save_folder": save, "on_gpu": on_gpu}
        return read_options(given, **job, named=flag_of)


@pytest.mark.parametrize(
    ("words", "scheduling", "reconfigure", "max_in_flight"),
    [
        ("", "auto", "default", "memory"),
        ("--type envelope", "ours", "balanced", "memory"),
        ("--reconfigure greedy", "ours", "greedy", "memory"),
        ("--type baseline", "1f1b", "default", None),
        ("--type optimal", "auto", "default", "memory"),
        ("--scheduling 1f1b", "1f1b", "default", None),
        ("--max-in-flight 6", "auto", "default", 6),
        ("--max-in-flight 6,5,4,3", "auto", "default", (6, 5, 4, 3)),
    ],
)
def test_what_is_not_given_goes_with_the_type(words, scheduling, reconfigure, max_in_flight):
    options = read(words)
    assert (options.scheduling, options.reconfigure) == (scheduling, reconfigure)
    assert options.max_in_flight == max_in_flight


def test_optimal_plans_are_corrected_unless_they_are_to_stand(tmp_path):
    assert read().closed_loop
    assert read(f"--profile {__file__}").closed_loop
    for words in ("--sweep", "--type envelope", PLANNED, f"--profile-only --output {tmp_path}"):
        assert not read(words).closed_loop
    for words in (PLANNED, "--type baseline"):
        with pytest.raises(EnvPipeError, match=r"measures clocks first|only measures"):
            read(f"--sweep {words}")


def test_an_objective_becomes_the_plans():
    """Without one, it depends on what may change clocks, which is not known yet."""
    assert (read().objective, read().request().objective) == (None, Objective("energy"))
    for goal in ("energy", "time", "edp"):
        options = read(f"--objective {goal}")
        assert (options.objective, options.request().objective) == (goal, Objective(goal))
    prices = "--energy-price 0.3 --gpu-price 2"
    priced = read(f"--objective cost {prices}").request()
    assert priced.objective == Objective("cost", energy_price=0.3, gpu_price=2.0)
    assert read("--objective energy --type uniform").closed_loop is False


def test_a_job_without_a_pipeline_has_one_clock():
    alone = partial(read, num_stages=1)
    assert (alone().type, alone().max_slowdown) == ("uniform", None)
    assert alone("--max-slowdown 2.5").max_slowdown == 2.5
    assert alone("--type baseline").type == "baseline"
    for words in ("--type envelope", f"--profile {__file__}", "--profile-only --output here"):
        with pytest.raises(EnvPipeError, match="needs a pipeline"):
            alone(words)
    with pytest.raises(EnvPipeError, match=r"objective time needs a pipeline: .* Leave it out\."):
        alone("--objective time")
    for wrong in ("-1", "nan", "inf"):
        with pytest.raises(
            EnvPipeError, match=f"max-slowdown is a number of at least 0.*'{wrong}'"
        ):
            alone(f"--max-slowdown {wrong}")


@pytest.mark.parametrize(
    ("option", "given", "said"),
    [("max-slowdown", "2%", "2 % is 2"), ("min-dwell-ms", "0.05s", "0.05 s is 50 ms")],
)
def test_a_number_in_another_unit_is_named(option, given, said):
    with pytest.raises(EnvPipeError, match=f"^--envpipe-{option} is a number .*{said}.*'{given}'"):
        read(f"--{option} {given}")


def test_files_are_read_before_anything_is_built(tmp_path, monkeypatch):
    rows = [(stage, kind, ProfileRow(1000, 0.1, 10.0)) for stage in range(4) for kind in WHOLE]
    profile, plan = tmp_path / "profile.csv", tmp_path / "plan.json"
    make_profile(rows, source="a test's").write(profile)
    plan.write_text("{}")
    by_file = read(f"--profile {profile} --output {tmp_path}/a/b")
    known, _ = prepare_files(by_file, 4).files_read
    assert known.num_stages == 4
    assert (tmp_path / "a" / "b").is_dir()
    for words, stages, why in (
        (f"--profile {profile}", 2, "4 stages, and the pipeline 2"),
        (f"--profile {profile} --plan {plan}", 4, r"plan\.json"),
        (f"--profile {__file__}", 4, "header"),
        ("--profile nowhere.csv", 4, "nowhere.csv is not readable"),
        (f"--output {__file__}", 4, r"no output folder: .*--envpipe-output"),
        ("--output a\0b", 4, r"no output folder: embedded null byte .*--envpipe-output"),
    ):
        with pytest.raises(EnvPipeError, match=why):
            prepare_files(read(words), stages)
    monkeypatch.setenv("RANK", "3")  # another node's, perhaps, without the file
    assert prepare_files(by_file, 2).files_read is None
    prepare_files(read("--profile nowhere.csv"), 4)


def test_an_output_folder_that_a_link_points_to_is_made_again(tmp_path):
    """As on a scratch disk that is cleaned between two starts of a job."""
    (tmp_path / "link").symlink_to(tmp_path / "scratch" / "job")
    prepare_files(read(f"--output {tmp_path}/link"), 4)
    assert (tmp_path / "scratch" / "job").is_dir()
    (tmp_path / "other").symlink_to("/proc/job")  # where nobody can make a folder
    prepare_files(read(f"--output {tmp_path}/other"), 4)  # costs its files only


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--type uniform --reconfigure greedy", "greedy needs --envpipe-type envelope"),
        ("--type envelope --scheduling auto", "auto needs --envpipe-type optimal"),
        ("--max-in-flight 0", "got '0'"),
        ("--max-in-flight 4,3", "each of 4 stages"),
        ("--scheduling 1f1b --max-in-flight 4", "needs --envpipe-scheduling envpipe or auto"),
        (f"--plan {__file__}", "--envpipe-profile"),
        ("--profile-only", "--envpipe-output"),
        ("--baseline-steps 1", "whole number of at least 2"),
        ("--split never", "split is auto or off"),
        ("--min-dwell-ms -1", "at least 0"),
        (f"--type baseline --profile {__file__}", "only measures"),
        (
            f"{PLANNED} --max-in-flight 4",
            "plan does not go with --envpipe-max-in.*runs as it is",
        ),
        (f"{PLANNED} --reconfigure greedy", "not go with --envpipe-reconfigure"),
        ("--gpu-control none --profile-only --output here", "changes no clock"),
        ("--gpu-control none --require-control", "changes no clock"),
        ("--gpu-control dry_run --require-control", "changes no clock"),
        ("--objective cost", "cost needs --envpipe-energy-price or"),
        ("--gpu-price 2", "gpu-price needs --envpipe-objective cost"),
        ("--objective edp --energy-price 0.3", "price needs --envpipe-objective cost"),
        ("--objective cost --gpu-price -1", "gpu-price is a number of at least 0"),
        (f"--objective time {PLANNED}", "time does not go with --envpipe-plan"),
        ("--objective edp --type envelope", "edp needs --envpipe-type"),
        ("--objective cost --gpu-price 2 --sweep", "-sweep"),
        ("--objective time --scheduling 1f1b", "another order than"),
        (f"--objective time --profile {__file__}", "what units take in this"),
        ("--gpu-control emulated", r"without GPUs\. Leave it out"),
    ],
)
def test_wrong_combinations_are_refused_by_name(words, told):
    with pytest.raises(EnvPipeError, match=told) as error:
        read(words)
    assert "zb-v" not in str(error.value)  # which no job runs
    named = re.findall(r"--[a-z][\w-]*", str(error.value))
    assert all(name.startswith("--envpipe-") for name in named)


def test_a_wrong_variable_is_named():
    with pytest.raises(EnvPipeError, match=r"ENVPIPE_SCHEDULING .*'theirs'"):
        read(ENVPIPE_SCHEDULING="theirs")


def test_memory_is_refused_without_gpus():
    with pytest.raises(EnvPipeError, match="needs GPUs"):
        read("--max-in-flight memory", on_gpu=False)


HERE = Path.cwd()
OF_FLAGS = {"scheduling": "1f1b", "reconfigure": "greedy"}
VARIABLES = {"ENVPIPE_TYPE": "envelope"}
VARIABLES |= {f"ENVPIPE_{name.upper()}": value for name, value in OF_FLAGS.items()}
OF_AUTO = {"ENVPIPE_SCHEDULING": "auto", "ENVPIPE_RECONFIGURE": "balanced"}


@pytest.mark.parametrize(
    ("words", "how", "expected"),
    [
        # A plan's order runs also without control of clocks; it is not adjusted or limited.
        (f"--gpu-control none {PLANNED}", {}, {"plan": Path(__file__)}),
        (PLANNED, {}, {"reconfigure": "default", "max_in_flight": None}),
        ("", {}, {"level": None, "self_check": "auto", "output": None}),
        ("--level auto", {}, {"level": None}),
        *((f"--level {level}", {}, {"level": level}) for level in Level),
        *((f"--self-check {word}", {}, {"self_check": word}) for word in ("off", "always")),
        ("", {"on_gpu": False}, {"max_in_flight": None}),
        ("", {"save": "checkpoints"}, {"output": HERE / "checkpoints/envpipe"}),
        ("", {"save": 2026}, {"output": HERE / "2026/envpipe"}),  # as `explain` reads a name
        ("", {"save": "msc://profile/checkpoints"}, {"output": None}),
        ("--output here", {"save": "checkpoints"}, {"output": HERE / "here"}),
        # Names in any case.
        ("--scheduling 1F1B", {}, {"scheduling": "1f1b"}),
        (
            "",
            {"ENVPIPE_SCHEDULING": "1F1B", "ENVPIPE_TYPE": "Optimal"},
            {"scheduling": "1f1b", "type": "optimal"},
        ),
        # Variables stand for flags; flags win, and variables that do not go with them give way.
        ("", VARIABLES, {"type": "envelope", **OF_FLAGS}),
        ("--reconfigure default", VARIABLES, {"reconfigure": "default"}),
        ("", {"ENVPIPE_TYPE": ""}, {"type": "optimal"}),
        ("--type baseline", OF_AUTO, {"scheduling": "1f1b", "reconfigure": "default"}),
        ("--objective time", {"ENVPIPE_SCHEDULING": "1f1b"}, {"scheduling": "auto"}),
        (PLANNED, OF_AUTO, {"reconfigure": "default"}),
        (PLANNED, {"ENVPIPE_SCHEDULING": "theirs"}, {"plan": Path(__file__)}),
        ("", {"num_stages": 1, **VARIABLES}, {"type": "uniform", "reconfigure": "default"}),
        ("", {"num_stages": 1, "ENVPIPE_TYPE": "baseline"}, {"type": "baseline"}),
    ],
)
def test_options_are_what_flags_variables_and_the_job_say(words, how, expected):
    options = read(words, **how)
    assert {name: getattr(options, name) for name in expected} == expected


def test_a_script_may_change_its_working_folder(tmp_path, monkeypatch):
    """Files are read when training begins, and again by a job that is made at a lower level."""
    monkeypatch.chdir(tmp_path)
    own = resolve_preset("v100").read_text()
    (tmp_path / "own.toml").write_text(own)
    options = read("--profile p.csv --plan q.json --output out --gpu own.toml")
    assert {options.profile, options.plan, options.output, Path(options.gpu)} == {
        tmp_path / name for name in ("p.csv", "q.json", "out", "own.toml")
    }


def test_a_working_folder_that_is_gone_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert read("--output out").output == Path("out")


def read_by_name(settings):
    return read_settings(settings, OF_LEVELS, num_stages=4, on_gpu=False)


def test_envpipes_own_block():
    options = read_by_name(
        {"type": "envelope", "scheduling": "ours", "reconfig": "greedy", "gpu": "V100"}
    )
    assert (options.type, options.scheduling, options.reconfigure) == (
        "envelope",
        "ours",
        "greedy",
    )
    assert options.gpu == "v100"


def test_nothing_said_is_as_without_flags():
    assert read_by_name({}) == read_by_name({"type": None, "gpu": "auto", "require_control": False})


def test_values_of_all_kinds(tmp_path):
    options = read_by_name(
        {
            "max_in_flight": [5, 4, 3, 2],
            "baseline-steps": 7,
            "min_dwell_ms": 2.5,
            "require_control": True,
            "output": tmp_path,
        }
    )
    assert options.max_in_flight == (5, 4, 3, 2)
    assert options.baseline_steps == 7
    assert options.min_dwell_ms == 2.5
    assert options.require_control
    assert options.output == tmp_path


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tpye": "uniform"}, r"No such option.*'tpye'.*baseline_steps, channel, energy_p"),
        ({"level": "units"}, "No such option.*'level'"),
        ({"reconfig": "greedy", "reconfigure": "greedy"}, "given twice.*'reconfigure'"),
        ({"baseline_steps": True}, "baseline_steps takes a value"),
        ({"require_control": "yes"}, "require_control takes true or false"),
        ({"gpu": "v1000"}, "v1000.*v100"),
        ({"type": "uniform", "reconfig": "optimal"}, "reconfigure optimal .* with type uniform"),
        ({"scheduling": "1f1b", "max_in_flight": 4}, "or use scheduling .*zb-h1"),
        ({"objective": "joules"}, "objective is energy, time, cost or edp .*'joules'"),
        (
            {"profile": "nowhere.csv"},
            r"^The profile .*/nowhere\.csv is not readable: .*No such file",
        ),
        (
            {"gpu_control": "none", "require_control": True},
            "gpu_control none does not go with require_control",
        ),
    ],
)
def test_what_is_wrong_is_named(settings, said):
    with pytest.raises(Exception, match=said) as error:
        read_by_name(settings)
    assert "Error" in type(error.value).__name__
    if settings.keys().isdisjoint({"gpu", "profile"}):  # whose files have errors of their own
        assert isinstance(error.value, JobError)


def test_words_are_read_in_any_case_and_those_with_capitals_as_they_are():
    own = Option("", ("auto", "AcmeGpu"))
    assert [own.value_of(given) for given in ("AUTO", "AcmeGpu")] == ["auto", "AcmeGpu"]
    with pytest.raises(ValueError, match="auto or AcmeGpu"):
        own.value_of("Acme")


def test_levels_and_their_check_are_named_where_a_framework_has_them():
    named = {"level": "order", "self_check": "always"}
    assert read_values(named) == {"level": Level.ORDER, "self_check": "always"}
    with pytest.raises(JobError, match=r"self_check is off, auto or always \(got 'never'"):
        read_values({"self_check": "never"})


def test_a_call_goes_before_a_file():
    file = {"type": "envelope", "scheduling": "ours", "reconfig": "greedy", "gpu": "a40"}
    assert merged(file, {}) == read_names(file)
    assert merged(file, {"reconfigure": "balanced"})["reconfigure"] == "balanced"
    # What the file says of an order may not go with another type.
    assert merged(file, {"type": "baseline"}) == {"type": "baseline", "gpu": "a40"}
    assert merged(file, {"type": None, "gpu": None})["scheduling"] == "ours"
    priced = {"objective": "cost", "gpu-price": 2.0, "gpu": "a40"}
    assert merged(priced, {"type": "baseline"}) == {"type": "baseline", "gpu": "a40"}


def read_names(settings):
    return {("reconfigure" if name == "reconfig" else name): v for name, v in settings.items()}
