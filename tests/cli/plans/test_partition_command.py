"""`envpipe partition`: from a layer profile to Megatron's flags and a stage profile."""

import json
import shlex

import pytest
from cli_helpers import plan_for, rows_of
from commands import run_badly, run_well
from whole_layers import CURVE, write_layers

from envpipe_megatron.core.profile import read_profile


def write(path, transformer_layers=8, loss=2.0, heavy=None, power=True, clocks=None, held=None):
    """Layers of 10 + 20 ms, one twice that; an embedding of half of one, a loss of `loss`."""
    numbers = map(str, range(transformer_layers))
    weights = {"embedding": 0.5, **dict.fromkeys(numbers, 1.0), "loss": loss}
    if heavy is not None:
        weights[str(heavy)] = 2.0
    curve = {clock: (CURVE[clock][0], power * CURVE[clock][1]) for clock in clocks or CURVE}
    times_s = {name: (weight * 0.01, weight * 0.02) for name, weight in weights.items()}
    return write_layers(path, times_s, curve=curve, held=held and dict.fromkeys(weights, held))


@pytest.fixture
def layers_path(tmp_path):
    return write(tmp_path / "layers.json")


def partition(layers, output, *options, stages=4, microbatches=8):
    arguments = (
        "partition", "--layers", layers, "--num-stages", stages,
        "--num-microbatches", microbatches, "--output", output,
    )  # fmt: skip
    return run_well(*arguments, *options)


def partition_badly(layers, output, *options, stages=4):
    arguments = ("partition", "--layers", layers, "--num-stages", stages)
    return run_badly(*arguments, "--num-microbatches", 8, "--output", output, *options)


def flag(text, name):
    """The value of a flag as a shell would give it to Megatron."""
    line = next(
        line for line in text.splitlines() if line.strip().startswith("--") and name in line
    )
    words = shlex.split(line)
    return words[words.index(name) + 1]


@pytest.mark.parametrize("objective", ["bottleneck", "energy"])
def test_flags_and_a_profile_that_can_be_planned(layers_path, tmp_path, objective):
    output = tmp_path / "profile.csv"
    text = partition(
        layers_path, output, "--objective", objective, "--blocking-power", 80, stages=3
    ).stdout
    # Weights 3.5, 4 and 1 + 2: of the splits with bottleneck 4 the fastest ends on a short stage.
    assert flag(text, "--pipeline-model-parallel-layout") == "Et*3|t*4|tL"
    assert "embedding, 0-2" in text
    assert "7, loss" in text
    profile = read_profile(output)
    assert profile.sidecar.blocking_power_w == (80, 80, 80)
    times = [kinds["forward"][0].time_s for kinds in profile.rows]
    assert times == pytest.approx([0.035, 0.04, 0.03])
    plan_for(output, tmp_path / "plan.json", "--schedule", "envpipe", "--policy", "envelope")


def test_a_profile_of_tensor_parallel_layers_counts_all_gpus(layers_path, tmp_path):
    layers = json.loads(layers_path.read_text())
    for measure in layers["measures"]:
        measure["tensor_parallel"] = 2
    layers_path.write_text(json.dumps(layers))
    output = tmp_path / "profile.csv"
    partition(layers_path, output)
    assert read_profile(output).sidecar.tensor_parallel == 2


def test_the_figures_of_the_split(tmp_path):
    layers = write(tmp_path / "layers.json", transformer_layers=16, heavy=5)
    text = partition(layers, tmp_path / "profile.csv", "--blocking-power", 80).stdout
    assert flag(text, "--pipeline-model-parallel-layout") == "Et*4|t*4|t*5|t*3L"
    rows = rows_of(text)
    assert float(rows["bottleneck (ms)"][0]) == 150.0
    assert float(rows["planned time (s)"][0]) <= float(rows["iteration time (s)"][0])
    assert float(rows["planned energy (J)"][0]) > 0


def test_the_planned_energy_is_that_of_a_plan_of_the_stage_profile(layers_path, tmp_path):
    """Also where several GPUs share a microbatch: it is of one GPU of each stage."""
    text, output = layers_path.read_text(), tmp_path / "profile.csv"
    layers_path.write_text(text.replace('"tensor_parallel": 1', '"tensor_parallel": 2'))
    split = rows_of(partition(layers_path, output, "--blocking-power", 80).stdout)
    planned = rows_of(plan_for(output, tmp_path / "plan.json").stdout)
    assert split["planned energy (J)"][0] == planned["energy (J)"][0]


def test_times_alone_are_enough_for_the_bottleneck(tmp_path):
    layers = write(tmp_path / "layers.json", power=False, clocks=(1200,))
    result = partition(layers, tmp_path / "profile.csv")
    assert "energy" not in result.stdout
    assert "blocking power" not in result.stderr
    message = partition_badly(layers, tmp_path / "no.csv", "--objective", "energy")
    assert "no energies" in message
    assert "--objective bottleneck" in message
    assert not (tmp_path / "no.csv").exists()


def test_a_warning_without_blocking_power(layers_path, tmp_path, caplog):
    partition(layers_path, tmp_path / "profile.csv")
    assert "--blocking-power" in caplog.text
    assert read_profile(tmp_path / "profile.csv").sidecar.wait_power_w is None


def test_memory_limit(tmp_path):
    # Each layer 1 GB, and 0.1 GB in flight: stage 0 of 4 holds 4 microbatches.
    layers = write(tmp_path / "layers.json", loss=1.0, held=(1e9, 1e8))
    free = partition(layers, tmp_path / "free.csv", "--blocking-power", 80).stdout
    assert "(GiB)" in free
    held = partition(
        layers, tmp_path / "held.csv", "--blocking-power", 80, "--memory-limit", "3.95e9"
    ).stdout
    assert flag(free, "--pipeline-model-parallel-layout").startswith("Et*2|")
    assert flag(held, "--pipeline-model-parallel-layout").startswith("Et|")
    assert read_profile(tmp_path / "held.csv").sidecar.free_bytes is not None
    message = partition_badly(layers, tmp_path / "no.csv", "--memory-limit", "2e9")
    for part in ("least peak", "2e+09 bytes", "--memory-limit"):
        assert part in message


def test_bad_input(layers_path, tmp_path):
    out = tmp_path / "profile.csv"
    assert "too few layers for 12 stages" in partition_badly(layers_path, out, stages=12)
    assert "--num-stages" in partition_badly(layers_path, out, stages=1)
    assert "--memory-limit" in partition_badly(layers_path, out, "--memory-limit", "much")
    assert "no bytes" in partition_badly(layers_path, out, "--memory-limit", "1e9")
    layers_path.write_text(layers_path.read_text().replace("0.01,", '"fast",', 1))
    message = partition_badly(layers_path, out)
    assert str(layers_path) in message
    assert "fast" in message
    assert not out.exists()
