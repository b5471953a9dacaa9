"""A card says in words what a finding says in facts, with commands for a shell."""

import shlex
from dataclasses import replace

import pytest

from lightning_rlprof.analysis.diagnosis.diagnosis import PROBLEMS
from lightning_rlprof.analysis.diagnosis.problem import Fact, Finding, Offer, Place, Price
from lightning_rlprof.report.finding_cards import cards

PROBLEM = PROBLEMS["logging"]
SAVES = Price("saves", 0.1, 1, 0.05, 0.2)
FOUND = Finding(
    PROBLEM,
    (Fact("spans", 3),),
    Price("lost", 0.25, 4_000_000_000),
    "high",
    "log less",
    "rlprof show 'my run' regions",
    "select * from spans where name = 'a'",
    Place(3, 7, 1_500_000_000, 2_000_000_001),
    4e9,
    (Offer(PROBLEM.remedies[0], PROBLEM.remedies[0].settings[:1], SAVES),),
)


def test_price_remedy_place_and_commands_are_said() -> None:
    (card,) = cards([FOUND], "'my run'", shown=[7])
    assert card.cost == "lost 25% of the job, 4.00 s of GPU time; high confidence"
    assert card.price == "lost 25% of the job · 4.00 s"
    assert card.where == "rank 3, step 7, 1.500000 s to 2.000000 s"
    assert card.step == 7
    (remedy,) = card.remedies
    assert remedy.saves == "saves 10% of the job (95% CI 5.0%–20%), by a replay"
    assert len(remedy.settings) == 1
    assert card.commands == (
        "rlprof show 'my run' regions",
        "rlprof sql 'my run' \"select * from spans where name = 'a'\"",
    )


def test_what_is_not_known_is_not_said() -> None:
    (card,) = cards([replace(FOUND, price=None, place=None, query="")], "RUN", shown=[7])
    assert (card.cost, card.price) == ("high confidence", "")
    assert (card.where, card.step, len(card.commands)) == ("", None, 1)
    assert cards([FOUND], "RUN")[0].step is None, "no timeline shows it"


@pytest.mark.parametrize("name", ["a", "it''s", '$HOME "x" `id` \\ !', "a\nb"])
def test_a_shell_reads_the_query_as_it_is(name: str) -> None:
    query = f"select * from spans where name = '{name}'"
    (card,) = cards([replace(FOUND, query=query)], "RUN")
    assert shlex.split(card.commands[1]) == ["rlprof", "sql", "RUN", query]
