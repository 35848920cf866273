"""What a guard's controller does with a page of requests, which a rank and a stream write here."""

import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
from fake_gpu import FakeGpu, ServedPage, look_until, pages_go  # noqa: F401 - a fixture

from envpipe_megatron.gpu.base import GpuError
from envpipe_megatron.gpu.clock import controller as clock_controller
from envpipe_megatron.gpu.clock import page as clock_page
from envpipe_megatron.gpu.clock.controller import PageController, spread
from envpipe_megatron.gpu.clock.page import BEGUN, DUE, GIVEN_BACK, MASK, ClockPage


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
        made.append(ServedPage(gpu, page))
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
    """Return what the controller says of itself when all so far is served."""
    number = page.ask(0)
    look_until(lambda: page.is_answered(number))
    return json.loads(page.summary)


# --- requests -------------------------------------------------------------------------------------


def test_a_clock_is_set_when_the_stream_has_counted_to_its_request(gpu, page, make):
    make()
    first, second = ask(page, 1000, ended=False), ask(page, 1200, ended=False)
    page.count(DUE, first)
    look_until(lambda: gpu.history == [1000])
    page.count(DUE, second)
    said = served(page)
    assert gpu.history == [1000, 1200]
    assert (said["changes"], said["lock_call_s"]["count"]) == (2, 2)
    assert page.set_mhz == 1200
    assert 0 < page.last_change_s < math.inf


def test_of_requests_that_are_due_only_the_latest_is_set(gpu, page, make):
    ask(page, 1000, 1100, 1200)
    make()
    assert served(page)["coalesced"] == 0  # it begins with the last one
    page.count(DUE, ask(page, 1300, 1400, ended=False))
    assert served(page)["coalesced"] == 1
    assert gpu.history == [1200, 1400]


def test_the_clock_that_is_set_is_set_again_only_if_it_is_asked_for_next(gpu, page):
    """A rank asks for it where somebody has reset it; others make no difference in the end."""
    controller = PageController(gpu, page)
    for clocks_mhz in ((1000,), (1000,), (1200, 1000), (1300,)):
        page.count(DUE, ask(page, *clocks_mhz, ended=False))
        assert controller.serve()
    assert gpu.history == [1000, 1000, 1300]
    assert not controller.serve()


def test_a_clock_is_given_back_and_taken_again(gpu, page):
    controller = PageController(gpu, page)
    for clock_mhz in (1000, GIVEN_BACK, GIVEN_BACK, 1200):
        page.count(DUE, page.ask(clock_mhz))
        assert controller.serve()
        assert page.set_mhz == (clock_mhz if clock_mhz < GIVEN_BACK else None)
    page.count(DUE, ask(page, 1000, GIVEN_BACK, 1200, ended=False))
    assert controller.serve()
    assert gpu.history == [1000, None, None, 1200]
    gpu.reset_error = GpuError("of a test")
    page.count(DUE, page.ask(GIVEN_BACK))
    controller.serve()
    assert "of a test" in page.failure


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


@pytest.mark.parametrize("delay_s", [1e9, math.inf])
def test_a_wait_without_end_is_for_the_next_unit_alone(page, delay_s):
    assert page.request(page.ask(1000, delay_s)) == (1000, MASK / 1e6)


# --- the least time between two changes -----------------------------------------------------------


@pytest.mark.parametrize("page", [{"min_dwell_s": 1.0}], indirect=True)
def test_a_change_that_comes_too_early_waits_unless_a_later_one_replaces_it(gpu, page, make):
    make()
    for now_s, frequency in ((0.0, 1000), (0.5, 1200), (0.9, 1100), (1.0, 1300), (1.5, 1400)):
        gpu.now_s = now_s
        ask(page, frequency)
        served(page)
    assert gpu.history[0] == 1000
    assert gpu.history[-1] == 1300
    gpu.now_s = 1.9
    ask(page, 1300)  # back to the clock that is set: nothing is left to change
    served(page)
    gpu.now_s = 5.0
    served(page)
    assert gpu.history[-1] == 1300
    ask(page, 1200)
    served(page)
    gpu.now_s = 5.5
    ask(page, 1000)
    served(page)
    assert gpu.history[-1] == 1200
    gpu.now_s = 6.0
    look_until(lambda: gpu.history[-1] == 1000)  # without a further request
    said = served(page)
    assert said["lock_call_s"]["count"] < said["changes"]  # what was held back has no latency


# --- what fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [GpuError("no right to set a clock"), OSError("gone")])
def test_a_driver_that_fails_is_told(gpu, page, make, caplog, error):
    make()
    ask(page, 1000)
    served(page)
    gpu.error = error
    ask(page, 1200)
    look_until(lambda: page.failure is not None)
    gpu.error = None
    ask(page, 1300)
    assert page.is_over
    assert page.failure == str(error)
    assert gpu.history == [1000]
    assert f"Clock control of fake stops: {error}" in caplog.text


@pytest.mark.parametrize("page", [{"min_dwell_s": 1.0}], indirect=True)
def test_a_time_base_that_fails_is_told(gpu, page, make, monkeypatch):
    monkeypatch.setattr(gpu, "time_s", lambda: next(iter([])))
    make()
    ask(page, 1000)
    look_until(lambda: page.failure is not None)
    assert gpu.history == []


# --- the end --------------------------------------------------------------------------------------


def test_closing_waits_for_no_unit_and_the_next_goes_on_with_what_was_due(gpu, page, make):
    controller = make()
    ask(page, 1000)
    look_until(lambda: gpu.history == [1000])
    page.ask(1100)  # of a unit that never ends
    page.ask(1200, 1.0)
    controller.close()
    assert page.set_mhz is None
    make()
    look_until(lambda: gpu.history == [1000, 1000])


def test_a_call_that_does_not_return_is_seen_on_the_page(gpu, page, make):
    make()
    assert page.last_change_s == -math.inf
    gpu.driver.clear()
    ask(page, 1000)
    assert gpu.in_driver.wait(10)
    assert page.last_change_s == math.inf
    gpu.driver.set()
    look_until(lambda: page.last_change_s < math.inf)


def test_nothing_is_set_for_a_rank_that_has_given_up(gpu, page):
    controller = PageController(gpu, page)
    number = ask(page, 1000, ended=False)
    page.end()
    page.count(DUE, number)
    controller.serve()
    assert gpu.history == []
    assert page.is_over


# --- the page -------------------------------------------------------------------------------------


def test_a_page_holds_so_many_requests(gpu, page, make, monkeypatch):
    monkeypatch.setattr(clock_page, "CAPACITY", 4)
    assert [page.ask(1000) for _ in range(5)] == [1, 2, 3, None, None]
    page.count(DUE, 3)
    make()
    look_until(lambda: gpu.history == [1000])
    served(page)
    for mhz in (1100, 1200, 1300, 1400):  # round and round
        number = ask(page, mhz)
        served(page)
    assert gpu.history == [1000, 1100, 1200, 1300, 1400]
    assert number == 11  # and 12 was a question
    assert [page.request(n) is None for n in (8, 9, 12, 13)] == [True, False, False, True]


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


@pytest.mark.parametrize(("why", "told"), [("é" * 5000, "é" * 2000), ("a \udcff", "a ?")])
def test_what_the_guard_says_fits(page, why, told):
    page.fail(why)
    assert page.failure.startswith(told)


# --- its summary ----------------------------------------------------------------------------------


def test_how_fast_a_request_was_served(gpu, page, monkeypatch):
    """Of each: known at 10 s, in the driver at 10.25 s, back at 11 s; then 0.5 and 2 s."""
    instants_s = iter([10.0, 10.25, 11.0, 20.0, 20.5, 22.5])
    monkeypatch.setattr(
        clock_controller, "time", SimpleNamespace(monotonic=lambda: next(instants_s))
    )
    controller = PageController(gpu, page)
    for mhz, call_s in ((1000, (10.25, 11.0)), (1200, (20.5, 22.5))):
        ask(page, mhz)
        controller.serve()
        assert page.last_call_s == call_s
        assert page.last_change_s == call_s[1]
    controller.close()
    assert json.loads(page.summary) == {
        "changes": 2,
        "coalesced": 0,
        "wake_to_lock_s": {"median": 0.25, "p99": 0.5, "max": 0.5, "count": 2},
        "lock_call_s": {"median": 0.75, "p99": 2.0, "max": 2.0, "count": 2},
    }


def test_median_and_the_worst_of_many():
    values_s = [float(value) for value in range(1, 202)]
    worst = {"median": 101.0, "p99": 199.0, "max": 201.0, "count": 201}
    assert spread(reversed(values_s)) == worst
    assert spread([7.0]) == {"median": 7.0, "p99": 7.0, "max": 7.0, "count": 1}
    assert spread([]) == {"count": 0}


def test_needs_no_torch():
    """Guards, small ranks of tests and tools use controller and watch too."""
    modules = "envpipe_megatron.gpu.clock.controller, envpipe_megatron.runtime.clocks.watch"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
