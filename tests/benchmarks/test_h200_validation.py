"""This project's own measurements: whole, and predicted as well as the guide says."""

import pytest

from benchmarks.planner.h200_validation import MEASURED, peaks, predict

FOLDERS = sorted(path.parent for path in MEASURED.glob("*/*/measured.json"))


def test_three_models_were_measured_and_one_over_one_sided_copies():
    names = [str(folder.relative_to(MEASURED)) for folder in FOLDERS]
    posted = ("gpt-1.3b", "gpt-1.3b-quarters", "llama-8b-shaped")
    assert names == ["one-sided/gpt-1.3b", *(f"posted/{name}" for name in posted)]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(MEASURED)))
class TestMeasuredModel:
    def test_times_are_predicted(self, folder):
        runs = predict(folder)
        assert max(abs(run["time_error_percent"]) for run in runs) < 6
        assert max(abs(run["time_error_by_order_percent"]) for run in runs) < 3
        assert max(run["timeline_error_by_order_percent"] for run in runs) < 3
        assert max(abs(run["energy_error_percent"]) for run in runs) < 7

    def test_units_depend_on_what_waits_beside_them_only_where_it_is_a_receive(self, folder):
        """From a profile made in 1F1B, EnvPipe's order then takes less than is predicted."""
        errors = {order: [] for order in ("1f1b", "envpipe")}
        for run in predict(folder):
            errors[run["order"]].append(run["time_error_percent"])
        if folder.parent.name == "posted":
            assert min(errors["envpipe"]) > max(0, sum(errors["1f1b"]) / len(errors["1f1b"]))
        else:
            assert max(abs(error) for own in errors.values() for error in own) < 1.5

    def test_peak_memory_is_predicted(self, folder):
        assert max(abs(one.error_percent) for one in peaks(folder)) < 0.01
        assert {one.in_flight for one in peaks(folder)} == {1, 3}
