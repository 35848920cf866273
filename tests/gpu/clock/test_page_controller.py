"""What a guard's controller does with a page of requests, which a rank and a stream write here."""

from __future__ import annotations

import json
import math

import pytest
from fake_gpu import FakeGpu, look_until, pages_go  # noqa: F401 - a fixture

from envpipe_megatron.gpu.base import GpuError
from envpipe_megatron.gpu.clock import page as clock_page
from envpipe_megatron.gpu.clock.page import BEGUN, DUE, MASK, ClockPage, PageController


@pytest.fixture
def gpu():
    return FakeGpu()


@pytest.fixture
def page(request):
    return ClockPage.create(**getattr(request, "param", {}))


@pytest.fixture
def make(gpu, page):
    made = []

    def make():
        made.append(PageController(gpu, page))
        return made[-1]

    yield make
    gpu.driver.set()
    for controller in made:
        controller.close()


def ask(page, *clocks_mhz, ended=True):
    """Ask for clocks, each behind a unit that has ended, or has not; the last number."""
    for mhz in clocks_mhz:
        number = page.ask(mhz)
        if ended:
            page.count(DUE, number)
    return number


def served(page):
    """What the controller says of itself when all so far is served."""
    number = page.ask(0)
    look_until(lambda: page.is_answered(number))
    return json.loads(page.summary)


def test_a_clock_is_set_when_the_stream_has_counted_to_its_request(gpu, page, make):
    make()
    first, second = ask(page, 1000, ended=False), ask(page, 1200, ended=False)
    page.count(DUE, first)
    look_until(lambda: gpu.history == [1000])
    page.count(DUE, second)
    said = served(page)
    assert gpu.history == [1000, 1200]
    assert (said["changes"], said["lock_call_s"]["count"], said["error"]) == (2, 2, None)
    assert page.set_mhz == 1200
    assert 0 < page.last_change_s < math.inf


def test_of_requests_that_are_due_only_the_latest_is_set(gpu, page, make):
    ask(page, 1000, 1100, 1200)
    make()
    assert served(page)["coalesced"] == 0  # it begins with the last one
    page.count(DUE, ask(page, 1300, 1400, ended=False))
    served(page)
    assert gpu.history[0] == 1200
    assert gpu.history[-1] == 1400


@pytest.mark.parametrize("begins", [True, False])
def test_a_clock_may_wait_a_while_behind_the_unit_or_for_its_own(gpu, page, make, begins):
    make()
    parked, own = page.ask(1000), page.ask(1400, 3600.0 if begins else 0.02)
    page.count(DUE, parked)
    page.count(DUE, own)
    look_until(lambda: gpu.history[:1] == [1000])
    if begins:
        page.count(BEGUN, own)
    look_until(lambda: gpu.history == [1000, 1400])


@pytest.mark.parametrize("page", [{"min_dwell_s": 5.0, "relock": True}], indirect=True)
def test_dwell_time_and_equal_requests_are_as_any_controllers(gpu, page, make):
    make()
    ask(page, 1000)
    look_until(lambda: gpu.history == [1000])
    ask(page, 1000, 1100)
    served(page)
    assert gpu.history == [1000]
    gpu.now_s = 5.0
    ask(page, 1200)
    look_until(lambda: gpu.history == [1000, 1200])


def test_closing_waits_for_no_unit_and_resets(gpu, page, make):
    controller = make()
    ask(page, 1000)
    look_until(lambda: gpu.history == [1000])
    page.ask(1100)  # of a unit that never ends
    page.ask(1200, 1.0)
    controller.close()
    assert not controller._thread.is_alive()
    assert gpu.history == [1000, None]
    assert page.set_mhz is None
    make()  # goes on with what was due last
    look_until(lambda: gpu.history == [1000, None, 1000])


def test_nothing_is_set_for_a_rank_that_has_given_up(gpu, page, make):
    make()
    number = ask(page, 1000, ended=False)
    page.end()
    page.count(DUE, number)
    served(page)
    assert gpu.history == []
    assert page.is_over


def test_a_driver_that_fails_is_told(gpu, page, make):
    make()
    gpu.error = GpuError("no right to set a clock")
    ask(page, 1000)
    look_until(lambda: page.failure is not None)
    assert page.is_over
    assert "no right to set a clock" in page.failure


def test_a_call_under_way_can_be_seen(gpu, page, make):
    make()
    assert page.last_change_s == -math.inf
    gpu.driver.clear()
    ask(page, 1000)
    look_until(gpu.in_driver.is_set)
    assert page.last_change_s == math.inf
    gpu.driver.set()
    look_until(lambda: page.last_change_s < math.inf)


def test_a_page_holds_so_many_requests(gpu, page, make, monkeypatch):
    monkeypatch.setattr(clock_page, "CAPACITY", 4)
    assert [page.ask(1000) for _ in range(5)] == [1, 2, 3, None, None]
    page.count(DUE, 3)
    make()
    served(page)
    for mhz in (1100, 1200, 1300, 1400):  # round and round
        number = ask(page, mhz)
        served(page)
    assert gpu.history == [1000, 1100, 1200, 1300, 1400]
    assert number == 11  # and 12 was a question
    assert [page.has(n) for n in (8, 9, 12, 13)] == [False, True, True, False]


def test_numbers_begin_again_behind_their_largest(gpu, page, make, monkeypatch):
    monkeypatch.setattr(page, "_asked", MASK - 1)
    monkeypatch.setattr(page._words.guard, "taken", MASK - 1)
    page.count(DUE, MASK)  # as before the guard began again
    assert ask(page, 1000) == MASK
    assert page.counted(DUE, MASK - 1)
    assert not page.counted(DUE, 1)
    make()
    look_until(lambda: gpu.history == [1000])
    assert ask(page, 1100) == 1
    look_until(lambda: gpu.history == [1000, 1100])


@pytest.mark.parametrize("delay_s", [-0.001, 0.0, 1e-9])
def test_what_has_no_time_to_wait_is_due_with_the_unit(gpu, page, make, delay_s):
    number = page.ask(1000, delay_s)
    page.count(DUE, number)
    make()
    look_until(lambda: gpu.history == [1000])


def test_a_wait_without_end_is_for_the_next_unit_alone(page):
    number = page.ask(1000, 1e9)
    assert page.take(number) == (1000, MASK / 1e6)


@pytest.mark.parametrize(("why", "told"), [("é" * 5000, "é" * 2000), ("a \udcff", "a ?")])
def test_what_the_guard_says_fits(page, why, told):
    page.fail(why)
    assert page.failure.startswith(told)
