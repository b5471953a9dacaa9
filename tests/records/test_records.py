"""The words as data."""

import numpy as np
import pytest

from lightning_rlprof.records.records import KINDS, STAGES, Span, as_number


def test_a_span_knows_its_duration():
    assert Span("a", "stage", 0, 1, 10, 25, 1, 1, None).duration_ns == 15


def test_the_known_stages_are_unique_and_hold_mindspeeds():
    assert len(set(STAGES)) == len(STAGES)
    assert {"actor_generate", "actor_update", "critic_update", "actor_image_embeds"} <= set(STAGES)
    assert KINDS == ("epoch", "step", "stage", "region", "mark")


@pytest.mark.parametrize(
    ("value", "number"),
    [(3, 3), (0.5, 0.5), (np.int64(4), 4), (np.float32(0.5), 0.5), ("3", None), ([], None)],
)
def test_numbers_of_other_libraries_are_read(value, number):
    assert as_number(value) == number
    assert type(as_number(value)) in (int, float, type(None))
