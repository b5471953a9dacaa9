"""The command about slow ranks: who makes the others wait, and how sure that is."""

from lightning_rlprof.cli.opened import Json, Run, opened, tell

__all__ = ["stragglers"]


def stragglers(run: Run, as_json: Json = False) -> None:
    """Name the ranks that make the others wait, or say why nobody can be named."""
    from lightning_rlprof import analysis

    spans = opened(run)
    table = analysis.stragglers(spans)
    tell(spans, table, "who makes the others wait", as_json=as_json, follow=("report", run))
