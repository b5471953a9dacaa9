"""Codes of texts stay in bounded memory, whatever the texts."""

import pytest

from lightning_rlprof.loaders import chrome_codes
from lightning_rlprof.loaders.chrome_codes import Codes


def test_texts_beyond_the_number_are_taken_as_one_and_counted() -> None:
    codes = Codes("others", most=3)

    found = [codes[text] for text in "abcdeaf"]

    assert (found, codes.merged) == ([0, 1, 2, 3, 3, 0, 3], 3)
    assert list(codes) == ["a", "b", "c", "others"]


def test_texts_beyond_the_memory_are_taken_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome_codes, "MOST_BYTES", 3_000)
    codes = Codes("others")

    found = [codes[text] for text in ("a" * 1_000, "雪" * 1_000, "b" * 1_000, "a" * 1_000)]

    assert (found, codes.merged) == ([0, 1, 2, 0], 1)
    assert list(codes)[1] == "others"


def test_a_text_that_is_called_like_the_others_is_one_of_them() -> None:
    codes = Codes("others", most=2)

    assert [codes[text] for text in ("others", "a", "b", "c")] == [0, 1, 0, 0]


def test_threads_count_by_the_length_of_both_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome_codes, "MOST_BYTES", 3_000)
    codes = Codes((None, "others"))

    found = [codes[pair] for pair in ((1, 2), ("x" * 2_000, 1), (1, "y" * 2_000), (3, 4))]

    assert (found, codes.merged) == ([0, 1, 2, 3], 1)
    assert list(codes)[2] == (None, "others")
