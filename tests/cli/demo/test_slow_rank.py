"""A rank that is made slow is found, in a real training on two ranks; a healthy one is not."""

from pathlib import Path

import pytest

from lightning_rlprof.analysis.stragglers.stragglers import stragglers
from lightning_rlprof.analysis.stragglers.verdicts import IMBALANCE, INCONCLUSIVE
from lightning_rlprof.cli.demo.options import DemoOptions
from lightning_rlprof.cli.demo.run import run_demo
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.loaders.load import load

SHORT = {"steps": 16, "warmup_steps": 3, "ranks": 2}


def accused(**options: object) -> set[object]:
    result = run_demo(DemoOptions(**{**SHORT, **options}))  # type: ignore[arg-type]
    assert result.run is not None
    table = stragglers(load(result.run))
    pairs = zip(table.column("rank"), table.column("verdict"), strict=True)
    innocent = (INCONCLUSIVE, IMBALANCE)
    return {rank for rank, verdict in pairs if rank is not None and verdict not in innocent}


# Twice as slow, as a test must hold on machines that are busy otherwise; 15 % takes a quiet one. On
# a very busy one none may be accused, which is right, and the next training is looked at. Another
# process on a rank's CPU makes that rank slow, which is right, too: it is not the same rank of all.
@pytest.mark.deep
def test_the_slow_rank_is_found_and_without_one_nobody_is(tmp_path: Path) -> None:
    trainings = (
        accused(save_path=tmp_path / f"slow-{number}", slow_rank=1, slow_by=1.0)
        for number in range(3)
    )
    assert next(filter(None, trainings), set()) == {1}
    always = {0, 1}
    for number in range(4):
        always &= accused(save_path=tmp_path / f"healthy-{number}")
        if not always:
            break
    assert always == set()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"slow_rank": 2, "ranks": 2}, "slow_rank=2 is not trained here; ranks are 0 to 1"),
        ({"slow_rank": -1}, "slow_rank=-1 is not trained here; ranks are 0 to 0"),
    ],
)
def test_what_cannot_be_slowed_is_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        DemoOptions(**options)  # type: ignore[arg-type]
