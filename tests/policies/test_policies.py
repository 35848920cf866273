"""Frequencies by rule: baseline, uniform, envelope."""

import pytest
from core_cases import B, F, profile_of, uniform_profile

from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import max_frequencies
from envpipe_megatron.core.profile_rows import ProfileError
from envpipe_megatron.policies.frequencies import envelope, uniform

#: 1500 MHz is the highest and 1400 the fastest; the valley's bottom is 1000.
CURVE = {1500: (1.02, 20.0), 1400: (1.0, 18.0), 1000: (1.4, 10.0), 900: (2.0, 12.0)}


def test_baseline_is_the_highest_listed_even_where_it_is_not_the_fastest():
    frequency = max_frequencies(builders.one_f_one_b(3, 4), uniform_profile(3, CURVE))
    assert set(frequency.ravel()) == {1500}


def test_each_stage_and_kind_has_its_own_highest_and_optimum():
    profile = profile_of(
        {
            (0, F): {1500: (1, 9), 1000: (2, 5)},
            (0, B): {1400: (1, 9), 1000: (2, 5)},
            (1, F): {1300: (1, 9), 800: (2, 5)},
            (1, B): {1300: (1, 9), 1200: (1, 5), 800: (2, 9)},
        }
    )
    schedule = builders.one_f_one_b(2, 2)
    assert max_frequencies(schedule, profile).tolist() == [[1500, 1500, 1400, 1400], [1300] * 4]
    assert uniform(schedule, profile).tolist() == [[1000] * 4, [800] * 4]
    # (1 V) stage 1: 9 + 9 at 1300 MHz, 5 + 9 at 800.
    assert envelope(schedule, profile).tolist() == [[1500, 1000, 1000, 1400], [1300] * 4]


def test_envelope_of_4_by_4_by_hand():
    frequency = envelope(builders.one_f_one_b(4, 4), uniform_profile(4, CURVE))
    inside = [1500, *[1000] * 6, 1500]
    assert frequency.tolist() == [inside, inside, inside, [1500] * 8]


@pytest.mark.parametrize("policy", [uniform, envelope])
def test_without_a_valley_there_is_no_optimum(policy):
    profile = profile_of({(0, F): {900: (1, 1)}, (0, B): {1000: (1, 1)}})
    with pytest.raises(ProfileError, match="stage 0"):
        policy(builders.one_f_one_b(1, 1), profile)
