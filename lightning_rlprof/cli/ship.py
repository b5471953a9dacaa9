"""The command that copies a finished run to where runs are kept."""

from pathlib import Path
from typing import Annotated

import typer

from lightning_rlprof.address import here, place
from lightning_rlprof.cli.output import next_command, say

__all__ = ["Crashed", "Rank", "Run", "To", "ship"]


Run = Annotated[
    Path,
    typer.Argument(
        envvar="RLPROF_RUN",
        parser=here,
        metavar="RUN",
        help="A run directory; on_finish tells it",
    ),
]
"""What is shipped."""

To = Annotated[
    str, typer.Option("--to", metavar="URL", help="Where runs are kept, as s3://bucket/runs")
]
"""Where to."""

Rank = Annotated[
    int | None,
    typer.Option(min=0, envvar="RLPROF_RANK", help="Only this rank's files; on_finish tells it"),
]
"""Whose files; None for all."""

Crashed = Annotated[
    bool, typer.Option("--crashed", help="Also ranks that never said that they had ended")
]
"""Whether files without an end are shipped, too."""


def ship(run: Run, to: To, rank: Rank = None, crashed: Crashed = False) -> None:
    """Copy a finished run to S3, GCS, HDFS or whatever fsspec knows; go on where it was cut off.

    Example: rlprof ship profiler_data/my-run --to s3://bucket/runs
    """
    from lightning_rlprof.remote import size_text
    from lightning_rlprof.shipping import ship as ship_run

    shipped = ship_run(run, to, rank, crashed=crashed)
    target = f"{str(place(to)).rstrip('/')}/{run.resolve().name}"
    there = f" ({shipped.there:,} were there)" if shipped.there else ""
    say(f"{target}: {shipped.files:,} files copied, {size_text(shipped.size)}{there}")
    if shipped.left:
        say(
            f"! left here, for they may still grow: {', '.join(shipped.left)}; after a crash "
            "--crashed copies them, too",
            "yellow",
        )
    next_command("rlprof", "summary", target)
