"""Who is right: seeded windows with a known culprit, asked of every formula and of ours."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from lightning_rlprof.analysis.stragglers.stragglers import stragglers
from lightning_rlprof.analysis.stragglers.verdicts import IMBALANCE, INCONCLUSIVE
from tests.builders.scripted import Script, Scripted, play
from tests.peers.formulas import FORMULAS

OURS = "lightning_rlprof"

_CLOCKS = {2: 5.0, 5: -5.0}
_TENSOR = Script(parallel={"tp": 2}, uneven=0.3, listed=True)
_PIPELINE = Script(parallel={"pp": 2}, layers=(1.0, 1.3), uneven=0.3, listed=True)
_EXPERTS = Script(parallel={"ep": 2}, experts=(1.4, 1.0), uneven=0.3, listed=True)
CASES: Mapping[str, Script] = {
    "healthy, even work": Script(),
    "healthy, uneven work": Script(uneven=0.6),
    "one 10 % slow": Script(slow={1: 0.1}, steps=16),
    "one 10 % slow, uneven work": Script(slow={1: 0.1}, uneven=0.6),
    "two 10 % slow": Script(slow={1: 0.1, 4: 0.1}, uneven=0.3),
    "10 % slow for 8 of 24 steps": Script(slow={1: 0.1}, when=(7, 14), uneven=0.3),
    "healthy, clocks off by 5 ms": Script(uneven=0.3, offsets_ms=_CLOCKS),
    "one 10 % slow, clocks off by 5 ms": Script(slow={1: 0.1}, uneven=0.3, offsets_ms=_CLOCKS),
    "TP 2 x DP 4, healthy": _TENSOR,
    "TP 2 x DP 4, one 10 % slow": replace(_TENSOR, slow={3: 0.1}),
    "PP 2 x DP 4, uneven layers, healthy": _PIPELINE,
    "PP 2 x DP 4, uneven layers, one 10 % slow": replace(_PIPELINE, slow={5: 0.1}),
    "EP 2 x DP 4, uneven experts, healthy": _EXPERTS,
    "EP 2 x DP 4, uneven experts, one 10 % slow": replace(_EXPERTS, slow={3: 0.1}),
}
"""The matrix, with 8 ranks."""

TOO_SHORT = Script(steps=8, slow={1: 0.1}, uneven=0.3)
"""8 ranks and 8 steps, of which nothing can be told."""


@dataclass
class Score:
    """How often a formula was right over so many windows.

    Attributes:
        windows: How many were asked.
        right: All slow ranks were accused and nobody else.
        found: All slow ranks were accused.
        false: A healthy rank was accused.
    """

    windows: int = 0
    right: int = 0
    found: int = 0
    false: int = 0

    def count(self, accused: set[int], slow: set[int]) -> None:
        """Add one window."""
        self.windows += 1
        self.right += accused == slow
        self.found += slow <= accused
        self.false += bool(accused - slow)


def accused(run: Scripted) -> set[int]:
    """Return the ranks that we call slow, for whatever reason and however long."""
    table = stragglers(run.spans)
    pairs = zip(table.column("rank"), table.column("verdict"), strict=True)
    innocent = {INCONCLUSIVE, IMBALANCE}
    return {int(rank) for rank, verdict in pairs if rank is not None and verdict not in innocent}


def scores(script: Script, seeds: Iterable[int]) -> dict[str, Score]:
    """Play a script with each seed and ask all formulas."""
    asked: dict[str, Callable[[Scripted], set[int]]] = {OURS: accused, **FORMULAS}
    found = {name: Score() for name in asked}
    for seed in seeds:
        run = play(script, seed)
        for name, ask in asked.items():
            found[name].count(ask(run), set(script.slow))
    return found
