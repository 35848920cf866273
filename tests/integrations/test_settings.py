"""Options by name and value: the same as flags."""

import pytest

from envpipe_megatron.integrations.levels import Level
from envpipe_megatron.integrations.options import (
    OF_LEVELS,
    OptionError,
    merged,
    read_settings,
    read_values,
)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("TYPE", "SCHEDULING", "RECONFIGURE"):
        monkeypatch.delenv(f"ENVPIPE_{name}", raising=False)


def read(settings):
    return read_settings(settings, OF_LEVELS, num_stages=4, on_gpu=False)


def test_envpipes_own_block():
    options = read({"type": "envelope", "scheduling": "ours", "reconfig": "greedy", "gpu": "V100"})
    assert (options.type, options.scheduling, options.reconfigure) == (
        "envelope",
        "ours",
        "greedy",
    )
    assert options.gpu == "v100"


def test_nothing_said_is_as_without_flags():
    assert read({}) == read({"type": None, "gpu": "auto", "require_control": False})


def test_values_of_all_kinds(tmp_path):
    options = read(
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
        (
            {"scheduling": "1f1b", "max_in_flight": 4},
            "scheduling envpipe, .* zb-h2, or leave max_in_flight out",
        ),
        ({"objective": "joules"}, "objective is energy, time, cost or edp .*'joules'"),
        ({"profile": "nowhere.csv"}, "^The profile nowhere.csv is not readable: .*No such file"),
        (
            {"gpu_control": "none", "require_control": True},
            "gpu_control none does not go with require_control",
        ),
    ],
)
def test_what_is_wrong_is_named(settings, said):
    with pytest.raises(Exception, match=said) as error:
        read(settings)
    assert "Error" in type(error.value).__name__
    if settings.keys().isdisjoint({"gpu", "profile"}):  # whose files have errors of their own
        assert isinstance(error.value, OptionError)


def test_levels_and_their_check_are_named_where_a_framework_has_them():
    named = {"level": "order", "self_check": "always"}
    assert read_values(named) == {"level": Level.ORDER, "self_check": "always"}
    with pytest.raises(OptionError, match=r"self_check is off, auto or always \(got 'never'"):
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
