"""docs/migrate: of two YAML blocks in a row, the second says in our keys what the first says."""

import re

import pytest
import yaml

from lightning_rlprof.config.profiler_config import ProfilerConfig
from tests.places import ROOT

FOLDER = ROOT / "docs" / "migrate"
BLOCK = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
PAIRS = [
    pytest.param(*blocks[at : at + 2], id=f"{name}-{at // 2 + 1}")
    for name in ("verl", "mindspeed-rl")
    for blocks in [BLOCK.findall((FOLDER / f"{name}.md").read_text(encoding="utf-8"))]
    for at in range(0, len(blocks), 2)
]


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_both_sides_of_a_pair_mean_the_same(theirs: str, ours: str) -> None:
    first, second = yaml.safe_load(theirs), yaml.safe_load(ours)
    assert set(first) & {"global_profiler", "profiler_config"}
    assert not set(second) & {"global_profiler", "profiler_config"}
    assert ProfilerConfig.build(first).dump() == ProfilerConfig.build(second).dump()
