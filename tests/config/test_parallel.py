"""How a copy of the model is spread: what is allowed, and what a training of so many ranks has."""

from typing import Any

import pytest

from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.errors import ConfigError


def build(sizes: Any) -> ProfilerConfig:
    return ProfilerConfig.build({"parallel": sizes})


def test_without_it_every_rank_is_a_copy_and_nothing_is_captured() -> None:
    config = ProfilerConfig.build()
    assert config.dump()["parallel"] == {"tp": 1, "cp": 1, "ep": 1, "pp": 1}
    config.check_world(7)
    assert not build({"tp": 2}).captures


def test_sizes_are_dumped_and_read_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPROF__PARALLEL__PP", "2")
    assert build({"tp": 2}).dump()["parallel"] == {"tp": 2, "cp": 1, "ep": 1, "pp": 2}


@pytest.mark.parametrize("world", [4, 8, 1])
def test_copies_that_fill_the_training_are_fine(world: int) -> None:
    build({"tp": 2, "pp": 2}).check_world(world)


@pytest.mark.parametrize("world", [2, 6, 9])
def test_sizes_whose_product_does_not_divide_the_ranks_are_refused(world: int) -> None:
    with pytest.raises(ConfigError) as caught:
        build({"tp": 2, "pp": 2}).check_world(world)
    allowed = {2: "1, 2", 6: "1, 2, 3, 6", 9: "1, 3, 9"}[world]
    assert str(caught.value) == (
        "parallel={tp: 2, pp: 2} takes 4 ranks for each copy of the model, but this training has "
        f"{world} (allowed products: {allowed})"
    )


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tp": 0}, "parallel.tp=0"),
        ({"tp": "2"}, "parallel.tp='2'"),
        ({"pp": True}, "parallel.pp=True"),
        ({"dp": 4}, "parallel.dp is not a key here"),
    ],
)
def test_what_is_no_size_is_refused(sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(sizes)
    assert str(caught.value).startswith(said)
