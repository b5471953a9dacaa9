"""What a finding costs, where it is and its commands, in words."""

import shlex
from dataclasses import replace

import pytest

from lightning_rlprof.analysis.diagnosis.diagnosis import PROBLEMS
from lightning_rlprof.analysis.diagnosis.evidence import Fact, Place
from lightning_rlprof.analysis.diagnosis.problem import Finding, Offer, Price
from lightning_rlprof.report.summary import finding_commands, finding_cost, finding_place

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
    assert finding_cost(FOUND, "GPU") == (
        "lost 25.0% of the job, 4.00 s of GPU time; high confidence"
    )
    assert finding_place(FOUND) == "rank 3, step 7, 1.500000 s to 2.000000 s"
    assert FOUND.remedies[0].gain == "saves 10.0% of the job (95% CI 5.0%–20.0%), by a replay"
    assert finding_commands(FOUND, "'my run'") == [
        "rlprof show 'my run' regions",
        "rlprof sql 'my run' \"select * from spans where name = 'a'\"",
    ]


def test_what_is_not_known_is_not_said() -> None:
    found = replace(FOUND, price=None, place=None, query="")
    assert finding_cost(found, "GPU") == "high confidence"
    assert finding_place(found) == ""
    assert finding_commands(found, "RUN") == [FOUND.look]


@pytest.mark.parametrize("name", ["a", "it''s", '$HOME "x" `id` \\ !', "a\nb"])
def test_a_shell_reads_the_query_as_it_is(name: str) -> None:
    query = f"select * from spans where name = '{name}'"
    command = finding_commands(replace(FOUND, query=query), "RUN")[1]
    assert shlex.split(command) == ["rlprof", "sql", "RUN", query]
