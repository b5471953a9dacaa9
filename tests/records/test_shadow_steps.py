"""One step of each pair is its shadow step: the same on every rank, the first as often as not."""

from lightning_rlprof.records.records import is_shadow, pair_of


def test_one_step_of_each_pair_is_its_shadow_step():
    shadows = [step for step in range(1, 20_001) if is_shadow(step)]
    assert [pair_of(step) for step in shadows] == [*range(1, 10_001)]


def test_which_of_the_two_it_is_has_no_period():
    second = [is_shadow(2 * pair) for pair in range(1, 10_001)]
    assert abs(sum(second) - 5_000) < 150  # three standard deviations of a fair coin
    for period in range(1, 65):
        same = sum(one == other for one, other in zip(second, second[period:], strict=False))
        assert abs(same - (10_000 - period) / 2) < 200, period


def test_it_does_not_depend_on_the_process():
    assert [step for step in range(1, 13) if is_shadow(step)] == [1, 4, 5, 8, 9, 12]
