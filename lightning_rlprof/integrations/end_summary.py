"""What a training prints when it ends: its step time, where it goes, and what to fix first."""

import logging
import sys
from pathlib import Path

log = logging.getLogger(__name__)

_LARGEST = 32 * 2**20
"""Bytes of a run above which the summary would keep the process from ending: two seconds."""


def print_summary(run: Path, status: str) -> None:
    """Print the summary of a run to standard error; a failure is logged, and nothing else.

    Ranks that still write are read as far as they have come.

    Args:
        run: The run directory.
        status: How the training ended, as its files say: ``finished`` or a reason.
    """
    try:
        files = [*run.glob("rank-*.jsonl")]
        if sum(file.stat().st_size for file in files) > _LARGEST:
            lines = [f"rlprof: recorded {run}", f"See it: rlprof report {run} --open"]
        else:
            lines = _lines(run, "" if status == "finished" else status)
        sys.stderr.write("\n".join(["", *lines, ""]))
        sys.stderr.flush()
    except Exception as error:
        log.warning("the summary of %s failed: %s", run, error, exc_info=error)


def _lines(run: Path, ended: str) -> list[str]:
    # The reading side, which a training needs only here.
    from lightning_rlprof.loaders.load import load
    from lightning_rlprof.report.summary import summary, summary_lines

    return summary_lines(summary(load(run)), ended=ended)
