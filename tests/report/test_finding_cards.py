"""A card says in words what a row of findings says in numbers, with commands for a shell."""

import shlex
from typing import Any

import pytest

from lightning_rlprof.report.finding_cards import cards
from lightning_rlprof.tables.table import Column, Table

ROW: dict[str, Any] = {
    "finding": "GPUs wait",
    "share": 0.25,
    "cost": 4_000_000_000,
    "CI low": 3_000_000_000,
    "CI high": 5_000_000_000,
    "confidence": "high",
    "kind": "problem",
    "try": "prefetch",
    "ruled out if": "it stays",
    "evidence": "3 spans",
    "reproduce": "rlprof show 'my run' ledger",
    "query": "select * from spans where name = 'a'",
    "rank": 3,
    "step": 7,
    "from": 1_500_000_000,
    "to": 2_000_000_001,
}


def table(**changes: Any) -> Table:
    row = {**ROW, **changes}
    return Table("findings", tuple(Column(name, "text") for name in row), [tuple(row.values())])


def test_price_place_and_commands_are_said() -> None:
    (card,) = cards(table(), "'my run'", shown=[7])
    assert card.cost == (
        "4.00 s of GPU time (95% CI 3.00 s–5.00 s), 25.0% of the job, high confidence"
    )
    assert card.price == "lost 25.0% · 4.00 s"
    assert cards(table(kind="idea"), "RUN")[0].price == "takes 25.0% · 4.00 s"
    assert card.where == "rank 3, step 7, 1.500000 s to 2.000000 s"
    assert card.step == 7
    assert card.commands == (
        "rlprof show 'my run' ledger",
        "rlprof sql 'my run' \"select * from spans where name = 'a'\"",
    )


def test_what_is_not_known_is_not_said() -> None:
    blank = {"cost": None, "share": None, "CI low": None, "CI high": None}
    (card,) = cards(table(**blank, rank=None, step=None, to=None), "RUN", shown=[7])
    assert (card.cost, card.price) == ("no time cost, high confidence", "")
    assert (card.where, card.step) == ("", None)
    assert cards(table(**{"CI low": None}), "RUN")[0].cost.startswith("4.00 s of GPU time, 25.0%")
    assert cards(table(step=None), "RUN")[0].where == "rank 3, 1.500000 s to 2.000000 s"
    assert cards(table(), "RUN")[0].step is None, "no timeline shows it"


@pytest.mark.parametrize("name", ["a", "it''s", '$HOME "x" `id` \\ !', "a\nb"])
def test_a_shell_reads_the_query_as_it_is(name: str) -> None:
    query = f"select * from spans where name = '{name}'"
    (card,) = cards(table(query=query), "RUN")
    assert shlex.split(card.commands[1]) == ["rlprof", "sql", "RUN", query]
