"""Bins of a logarithmic scale: every value has one, and its start is not above it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.records.records import bin_in_name, bin_name, bin_of, bin_start


@given(st.floats(0, 2**40, allow_nan=False))
def test_a_value_lies_in_its_bin(value: float) -> None:
    number = bin_of(value)
    assert bin_start(number) * (1 - 1e-9) <= value < bin_start(number + 1) * (1 + 1e-9)


def test_a_doubling_has_four_bins() -> None:
    assert [bin_of(2**power) for power in range(6)] == [1, 5, 9, 13, 17, 21]
    assert bin_start(bin_of(1024)) == pytest.approx(1024)
    assert math.log2(bin_start(6) / bin_start(5)) == pytest.approx(0.25)


def test_the_name_of_a_bin_says_which() -> None:
    assert bin_in_name(bin_name("lengths", 17)) == ("lengths", 17)
    assert bin_in_name("tokens") is None
    assert bin_in_name("[3]") is None
