"""The JSON schemas of docs/schemas: what we write fits, and they know what the readers know."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from core_cases import uniform_profile
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from test_sidecar import FULL

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.kinds import SPLIT, unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import PLAN_FORMAT, Plan, max_frequencies, read_plan
from envpipe_megatron.core.profile_rows import SplitBackward
from envpipe_megatron.core.schedule import Placement, Schedule
from envpipe_megatron.core.sidecar import SIDECAR_FORMAT, Sidecar, read_sidecar
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.search.layer_file import LAYERS_FORMAT

FOLDER = Path(__file__).parents[2] / "docs" / "schemas"
SCHEMAS = {path.name: json.loads(path.read_text()) for path in FOLDER.iterdir()}
REGISTRY = Registry().with_resources(
    [(name, Resource.from_contents(schema)) for name, schema in SCHEMAS.items()]
)
CURVE = {1400: (0.1, 40.0), 1200: (0.11, 34.0)}
CONDITIONS = Conditions(
    (80.0, 81.0), (0.01,), (0.1, 0.2), (2, 1), ({1400: 80.0}, {1400: 81.0, 1200: 70.0}), 0.01, 0.5,
)  # fmt: skip
#: Of other types, or out of range, for any field.
STRANGE = (None, True, -1, 1.5, "strange", {}, {"strange": 1}, [-1], ["strange"], [None], [[-1]])


def fits(name, data):
    return Draft202012Validator(SCHEMAS[name], registry=REGISTRY).is_valid(data)


def v_shaped():
    there, back = (0, 1), (1, 0)
    ways = ((SPLIT[0], there), (SPLIT[1], back), (SPLIT[2], back))
    order = tuple(
        unit(kind, m, chunk) for kind, chunks in ways for chunk in chunks for m in range(2)
    )
    return Schedule("v", 2, 2, (order, order), Placement.V)


def plan_on(schedule, conditions=CONDITIONS, park_mhz=0, **options):
    own = replace(uniform_profile(2, CURVE), interpolates=True)
    profile = own.with_split_backwards(SplitBackward(0.4, 0.1)) if schedule.split else own
    profile = profile.for_chunks(schedule.num_chunks)
    clocks = max_frequencies(schedule, profile)
    parks = np.zeros_like(clocks)
    parks[0, 0] = park_mhz
    return Plan("test", schedule, clocks, profile, conditions, park_mhz=parks, **options), own


PLANS = {
    "plain": plan_on(builders.one_f_one_b(2, 3), Conditions((80.0, 80.0))),
    "all that is around": plan_on(
        builders.one_f_one_b(2, 3), energy_lower_bound_j=10.0, objective={"goal": "time"}
    ),
    "parked": plan_on(
        builders.one_f_one_b(2, 3), replace(CONDITIONS, change_time_s=0.0), park_mhz=1200
    ),
    "chunks": plan_on(builders.interleaved(2, 4, 2), replace(CONDITIONS, group_size=2)),
    "split, in a V": plan_on(v_shaped()),
    "whole iterations": plan_on(builders.whole_iteration(2), Conditions((80.0, 80.0))),
}


@pytest.mark.parametrize("plan", [plan for plan, _ in PLANS.values()], ids=PLANS)
def test_plans_fit_and_every_field_is_described(plan):
    data = json.loads(json.dumps(plan.to_json()))
    assert fits("plan.json", data)
    assert data.keys() <= SCHEMAS["plan.json"]["properties"].keys()


def test_together_they_have_every_field():
    written = {name for plan, _ in PLANS.values() for name in plan.to_json()}
    assert written == SCHEMAS["plan.json"]["properties"].keys()
    assert SCHEMAS["plan.json"]["properties"]["format"]["const"] == PLAN_FORMAT


#: Not read, or compared with what the plan and its own profile give.
NOT_READ = {"created_by", "peak_in_flight", "baseline", "profile_sha256", "iteration_time_s",
            "energy_j"}  # fmt: skip


@pytest.mark.parametrize("name", ["plain", "all that is around", "parked", "split, in a V"])
def test_the_schema_refuses_what_a_plans_reader_refuses(tmp_path, name):
    plan, profile = PLANS[name]
    profile = replace(profile, sha256="another")  # or all figures would have to be right
    data = json.loads(json.dumps(plan.to_json()))
    for field in data.keys() - NOT_READ:
        without = {at: value for at, value in data.items() if at != field}
        wrong = [{**data, field: value} for value in STRANGE]
        for changed in [*wrong, without] if name == "plain" else wrong:
            read = is_read(lambda path: read_plan(path, profile), tmp_path, changed)
            assert read == fits("plan.json", changed), (field, changed.get(field))


def is_read(reader, folder, data):
    path = folder / "read.json"
    path.write_text(json.dumps(data))
    try:
        reader(path)
    except EnvPipeError:
        return False
    return True


@pytest.mark.parametrize("sidecar", [FULL, Sidecar()])
def test_sidecars_fit(sidecar):
    data = json.loads(sidecar.to_json_text())
    assert fits("sidecar.json", data)
    if sidecar is FULL:
        assert data.keys() == SCHEMAS["sidecar.json"]["properties"].keys()
    assert data["format"] == SIDECAR_FORMAT


def test_the_schema_refuses_what_a_sidecars_reader_refuses(tmp_path):
    data = json.loads(FULL.to_json_text())
    for field in (*data, "strange"):
        for value in STRANGE:
            changed = {**data, field: value}
            read = is_read(read_sidecar, tmp_path, changed)
            assert read == fits("sidecar.json", changed), (field, value)


@pytest.mark.parametrize("path", sorted((FOLDER.parents[1] / "configs/profiles").glob("*.json")))
def test_examples_fit(path):
    data = json.loads(path.read_text())
    schema = "sidecar.json" if data["format"] == SIDECAR_FORMAT else "layers.json"
    assert fits(schema, data)
