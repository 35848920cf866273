"""The picture of levels is of plans on one axis, each of which saves more than the one above it."""

import re

from benchmarks.schedules.curves import levels


def test_each_level_saves_more_and_only_one_clock_takes_longer():
    charts = levels()
    titles = [chart.title for chart in charts]
    assert [title.split(":")[0] for title in titles] == ["observe", "uniform", "units", "order"]
    assert len({chart.x_range for chart in charts}) == 1
    saved = [float(re.search(r"([\d.]+) % saved", title)[1]) for title in titles]
    assert saved == sorted(set(saved))
    assert saved[0] == 0
    times_s = [float(re.search(r"([\d.]+) s,", title)[1]) for title in titles]
    assert times_s[1] <= 1.03 * times_s[0]
    assert max(times_s[2:]) <= times_s[0]
