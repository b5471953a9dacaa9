"""The command about speed: tokens per second of each stage, and how much of the device that is."""

from typing import Annotated

import typer

from lightning_rlprof.cli.opened import Json, Run, count_doubts, facts, opened
from lightning_rlprof.cli.output import next_command, put_json, say, show
from lightning_rlprof.errors import RlprofError

__all__ = ["throughput"]

Parameters = Annotated[
    float | None,
    typer.Option(help="Of the model, such as 7.6e9: FLOPs are then those of its matrices"),
]
Peak = Annotated[
    float | None,
    typer.Option(help="Of each device, dense, in TFLOP/s; unset, what its data sheet says"),
]


def throughput(
    run: Run, as_json: Json = False, parameters: Parameters = None, peak_tflops: Peak = None
) -> None:
    """Show tokens and samples per second of each stage, and MFU where FLOPs are stated."""
    _check("--parameters", parameters, "7.6e9")
    _check("--peak-tflops", peak_tflops, "989")
    from lightning_rlprof import analysis
    from lightning_rlprof.report.text import render

    spans = opened(run)
    table = analysis.throughput(spans, parameters=parameters, peak_tflops=peak_tflops)
    if as_json:
        put_json(facts(spans) | {"tables": [table.to_dict()]})
        return
    say(f"{spans.path}: tokens per second, and MFU", "bold")
    show("", render(table), "")
    count_doubts(spans)
    next_command("rlprof", "report", run)


def _check(option: str, value: float | None, instance: str) -> None:
    if value is not None and not 0 < value < 1e18:
        text = f"{option} {value}: takes a number above 0 and below 1e18, for instance {instance}"
        raise RlprofError(text)
