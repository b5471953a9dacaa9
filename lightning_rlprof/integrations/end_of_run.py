"""What a training leaves when it ends: a summary on the terminal, a report in its loggers."""

import logging
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

_LARGEST = 8 * 2**20
"""Bytes of a run that the summary reads; with more it would keep the process from ending."""


log = logging.getLogger(__name__)


def print_summary(run: Path, status: str) -> None:
    """Print the summary of a run to standard error; a failure is logged, and nothing else.

    Ranks that still write are read as far as they have come. Of a long run the last steps are
    summed up, which the first line says.

    Args:
        run: The run directory.
        status: How the training ended, as its files say: ``finished`` or a reason.
    """
    try:
        # The reading side is imported only here, as a training needs it for nothing else.
        from lightning_rlprof.loaders.live_run import last_steps
        from lightning_rlprof.loaders.load import load
        from lightning_rlprof.report.summary import summary, summary_lines

        is_long = sum(file.stat().st_size for file in run.glob("rank-*.jsonl")) > _LARGEST
        spans = last_steps(run, _LARGEST) if is_long else load(run)
        if spans is None:
            lines = [f"rlprof: recorded {run}", f"See it: rlprof report {run} --open"]
        else:
            ended = "" if status == "finished" else status
            steps = spans.step[spans.rows(kind="step")]
            since = None if spans.from_start or not len(steps) else int(steps.min())
            lines = summary_lines(summary(spans), ended=ended, since=since)
        sys.stderr.write("\n".join(["", *lines, ""]))
        sys.stderr.flush()
    except Exception as error:
        log.warning("the summary of %s failed: %s", run, error, exc_info=error)


def print_without_steps(run: Path, stages: Collection[str]) -> None:
    """Say on standard error that a run has stages and no step, and what shows its steps."""
    from lightning_rlprof.analysis.listing import listed

    sys.stderr.write(
        f"\nrlprof: no step, but {listed(sorted(stages))}, in {run}\n"
        "A table by step needs: with step(): around each turn of the loop\n"
    )


def log_report(run: Path, loggers: Sequence[Any]) -> None:
    """Write ``report.html`` into the run and log it; a failure is one warning.

    W&B gets an artifact ``rlprof-<run>`` of type ``report``, MLflow a file in ``rlprof/``. Ranks
    that still write are read as far as they have come.

    Args:
        run: The run directory.
        loggers: Of the Trainer; those of other kinds are left alone.
    """
    try:
        takers = [(take, each) for each in loggers if (take := _taker(each))]
        if not takers:
            log.warning(
                "log_report: the Trainer has no WandbLogger or MLFlowLogger; write the report with "
                "rlprof report %s",
                run,
            )
            return
        # The reading side is imported only here, as a training needs it for nothing else.
        from lightning_rlprof.loaders.load import load
        from lightning_rlprof.report.html.page import report_tables, write_report

        spans, page = load(run), run / "report.html"
        write_report(spans, report_tables(spans), page)
    except Exception as error:
        log.warning("the report of %s failed: %s", run, error, exc_info=error)
        return
    for take, each in takers:
        try:
            take(each, page)
        except Exception as error:  # The remaining loggers still get the page.
            log.warning("%s could not be logged: %s", page, error, exc_info=error)


def _taker(logger: Any) -> Any:
    # Kinds are compared by name, as importing a logger's module would import W&B or MLflow.
    kinds = {kind.__name__ for kind in type(logger).__mro__}
    return next((take for name, take in _TAKERS.items() if name in kinds), None)


def _to_wandb(logger: Any, page: Path) -> None:
    logger.experiment.log_artifact(str(page), name=f"rlprof-{page.parent.name}", type="report")


def _to_mlflow(logger: Any, page: Path) -> None:
    logger.experiment.log_artifact(logger.run_id, str(page), artifact_path="rlprof")


_TAKERS = {"WandbLogger": _to_wandb, "MLFlowLogger": _to_mlflow}
