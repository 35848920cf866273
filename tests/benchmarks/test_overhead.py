"""The overhead: what is measured is the runtime's own, and rows and claims agree."""

from itertools import pairwise

import pytest

pytest.importorskip("torch")
from benchmarks.overhead import host


def test_every_unit_asks_for_a_clock(monkeypatch):
    asked, request = [], host.RankClock.request

    def noting(self, frequency_mhz, later):
        asked.append(frequency_mhz)
        request(self, frequency_mhz, later)

    monkeypatch.setattr(host.RankClock, "request", noting)
    costs_ns = host.thread_costs_ns(0.05, clocks=True)
    assert len(costs_ns) % (2 * host.MICROBATCHES) == 0
    assert min(costs_ns) > 0
    assert len(asked) >= len(costs_ns)
    assert all(one != following for one, following in pairwise(asked))
    asked.clear()
    assert host.thread_costs_ns(0.01, clocks=False)
    assert not asked
