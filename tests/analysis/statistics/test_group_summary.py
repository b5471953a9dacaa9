import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.analysis.statistics.group_summary import (
    Summary,
    Totals,
    mean,
    summarize,
    summarize_runs,
    totals,
)

PAIRS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2**61)), max_size=40)


@given(PAIRS, st.integers(1, 2**61), st.booleans(), st.sampled_from([1, 32]))
def test_summaries_are_those_of_each_group_alone(
    pairs: list[tuple[int, int]], small: int, ordered: bool, members: int
) -> None:
    pairs = [(group, value % small) for group, value in pairs]  # both ways of sorting
    pairs = sorted(pairs, key=lambda pair: pair[0]) if ordered else pairs
    groups = np.array([group for group, _ in pairs], dtype=np.int64)
    values = np.array([value for _, value in pairs], dtype=np.int64)
    before = values.copy()
    wanted = [sorted(v for g, v in pairs if g == group) for group in sorted(set(groups.tolist()))]
    if any(sum(own) * 2 >= 2**62 for own in wanted):
        return

    with pytest.MonkeyPatch.context() as patch:  # few large groups are not sorted, all others are
        patch.setattr("lightning_rlprof.analysis.statistics.group_summary._MEMBERS", members)
        found = summarize(groups, values)

    assert values.tolist() == before.tolist()
    assert found.group.tolist() == sorted(set(groups.tolist()))
    assert found.count.tolist() == [len(own) for own in wanted]
    assert found.total.tolist() == [sum(own) for own in wanted]
    assert found.p50.tolist() == [own[math.ceil(len(own) * 0.5) - 1] for own in wanted]
    assert found.p95.tolist() == [own[-(-len(own) * 95 // 100) - 1] for own in wanted]
    assert found.max.tolist() == [own[-1] for own in wanted]


def test_large_groups_are_summarized_as_small_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    groups, values = random.integers(0, 9, 5_000), random.integers(0, 10**9, 5_000)
    found = [vars(summarize(groups, values))]
    monkeypatch.setattr("lightning_rlprof.analysis.statistics.group_summary._SHORT", 0)
    found.append(vars(summarize(groups, values)))
    for name in Summary.__annotations__:
        assert found[0][name].tolist() == found[1][name].tolist()


@pytest.mark.parametrize("size", [7, 500])
def test_groups_in_a_row_are_summarized_as_others_are(size: int) -> None:
    random = np.random.default_rng(0)
    group, count = np.array([3, 4, 70_000]), np.array([size, 1, 2 * size])
    groups, values = np.repeat(group, count), random.integers(0, 10**9, 3 * size + 1)
    expected = vars(summarize(groups, values))
    found = vars(summarize_runs(group, count, values.copy()))
    for name in Summary.__annotations__:
        assert found[name].tolist() == expected[name].tolist()


@given(PAIRS, st.integers(1, 2**70), st.integers(1, 2**61))
def test_totals_are_summaries_without_quantiles(
    pairs: list[tuple[int, int]], wide: int, small: int
) -> None:
    """Also where names of groups are far apart."""
    groups = np.array([group * wide % 2**40 for group, _ in pairs], dtype=np.int64)
    values = np.array([value % small // 64 for _, value in pairs], dtype=np.int64)
    found, expected = totals(groups, values), summarize(groups, values)
    for name in Totals.__annotations__:
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()


def test_means_are_rounded_to_the_nearest_integer() -> None:
    assert mean(np.array([7, 8, 2**60 + 1]), np.array([2, 3, 1])).tolist() == [4, 3, 2**60 + 1]


def test_groups_and_values_that_do_not_fit_into_one_number_are_sorted_as_pairs() -> None:
    groups, values = np.array([40, 0, 40, 0]), np.array([2**58, 7, 3, 2**58 + 1])
    found = summarize(groups, values)
    assert found.group.tolist() == [0, 40]
    assert found.p50.tolist() == [7, 3]
    assert found.max.tolist() == [2**58 + 1, 2**58]
    assert found.total.tolist() == [2**58 + 8, 2**58 + 3]
