"""The command about the critical path: what a step's length hangs on, and what it does not."""

from typing import Annotated

import typer

from lightning_rlprof.cli.opened import Json, Run, opened, tell

__all__ = ["path"]

PerRank = Annotated[bool, typer.Option("--per-rank", help="A row per rank")]


def path(run: Run, as_json: Json = False, per_rank: PerRank = False) -> None:
    """Show the critical path of a step by stage, role and rank, and what has slack."""
    from lightning_rlprof.analysis.path import path as analysis

    spans = opened(run)
    table = analysis(spans, per_rank=per_rank)
    tell(spans, table, "what a step's length hangs on", as_json=as_json, follow=("whatif", run))
