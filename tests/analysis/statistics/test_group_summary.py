import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.analysis.statistics.group_summary import mean, summarize

PAIRS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2**61)), max_size=40)


@given(PAIRS, st.integers(1, 2**61), st.booleans())
def test_summaries_are_those_of_each_group_alone(
    pairs: list[tuple[int, int]], small: int, ordered: bool
) -> None:
    pairs = [(group, value % small) for group, value in pairs]  # both ways of sorting
    pairs = sorted(pairs, key=lambda pair: pair[0]) if ordered else pairs
    groups = np.array([group for group, _ in pairs], dtype=np.int64)
    values = np.array([value for _, value in pairs], dtype=np.int64)
    before = values.copy()
    wanted = [sorted(v for g, v in pairs if g == group) for group in sorted(set(groups.tolist()))]
    if any(sum(own) * 2 >= 2**62 for own in wanted):
        return

    found = summarize(groups, values)

    assert values.tolist() == before.tolist()
    assert found.group.tolist() == sorted(set(groups.tolist()))
    assert found.count.tolist() == [len(own) for own in wanted]
    assert found.total.tolist() == [sum(own) for own in wanted]
    assert found.p50.tolist() == [own[math.ceil(len(own) * 0.5) - 1] for own in wanted]
    assert found.p95.tolist() == [own[-(-len(own) * 95 // 100) - 1] for own in wanted]
    assert found.max.tolist() == [own[-1] for own in wanted]


def test_means_are_rounded_to_the_nearest_integer() -> None:
    assert mean(np.array([7, 8, 2**60 + 1]), np.array([2, 3, 1])).tolist() == [4, 3, 2**60 + 1]


def test_groups_and_values_that_do_not_fit_into_one_number_are_sorted_as_pairs() -> None:
    groups, values = np.array([40, 0, 40, 0]), np.array([2**58, 7, 3, 2**58 + 1])
    found = summarize(groups, values)
    assert found.group.tolist() == [0, 40]
    assert found.p50.tolist() == [7, 3]
    assert found.max.tolist() == [2**58 + 1, 2**58]
    assert found.total.tolist() == [2**58 + 8, 2**58 + 3]
