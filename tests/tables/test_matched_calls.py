from collections import Counter, defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.tables.arrays import group_sizes, match_occurrences, number_occurrences

_CALLS = st.lists(
    st.tuples(st.integers(-1, 2), st.integers(0, 2), st.integers(0, 3), st.integers(0, 9)),
    max_size=25,
)


@given(_CALLS)
def test_rows_of_a_key_are_numbered_in_their_order(calls: list[tuple[int, ...]]) -> None:
    key, step, *_ = np.array(calls, dtype=np.int64).reshape(-1, 4).T
    number, count = number_occurrences(key, step)

    seen: Counter[tuple[int, int]] = Counter()
    for at, pair in enumerate(zip(key.tolist(), step.tolist(), strict=True)):
        assert number[at] == seen[pair]
        seen[pair] += 1
    assert count.tolist() == [seen[pair] for pair in zip(key.tolist(), step.tolist(), strict=True)]


@given(_CALLS)
def test_the_nth_call_of_a_key_is_the_same_on_all_ranks(calls: list[tuple[int, ...]]) -> None:
    key, step, rank, start = np.array(calls, dtype=np.int64).reshape(-1, 4).T
    rows, starts = match_occurrences((key, step), rank, start)

    by_key: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for at in np.argsort(start, kind="stable").tolist():
        by_key[int(key[at]), int(step[at])][int(rank[at])].append(at)
    expected = [
        [by_rank[one][number] for one in sorted(by_rank)]
        for _, by_rank in sorted(by_key.items())
        if len(by_rank) > 1 and len({len(each) for each in by_rank.values()}) == 1
        for number in range(len(next(iter(by_rank.values()))))
    ]
    found = np.split(rows, starts[1:]) if len(starts) else []
    assert [each.tolist() for each in found] == expected
    assert group_sizes(starts, len(rows)).sum() == len(rows)
