"""What the shell completes: runs, analyses, problems, stages. The shell completes files itself."""

from pathlib import Path

from lightning_rlprof.analysis.catalog import CATALOG
from lightning_rlprof.records.problem_ids import PROBLEM_IDS, REMEDY_IDS
from lightning_rlprof.records.records import STAGES

SAVE_PATH = Path("profiler_data")
"""Where trainings write unless they are told otherwise: the newest run there is the default RUN."""


def runs_here() -> list[str]:
    """Return the names of the runs in ``profiler_data``, newest first."""
    return sorted({file.parent.name for file in SAVE_PATH.glob("*/rank-*.jsonl")}, reverse=True)


def complete_run(incomplete: str) -> list[str]:
    """Return the runs here whose names begin like that."""
    return [name for name in runs_here() if name.startswith(incomplete)]


def complete_analysis(incomplete: str) -> list[str]:
    """Return the analyses whose names begin like that."""
    return [each.name for each in CATALOG if each.name.startswith(incomplete)]


def complete_run_or_analysis(incomplete: str) -> list[str]:
    """Return what the first argument of ``rlprof show`` may be."""
    return complete_run(incomplete) + complete_analysis(incomplete)


def complete_problem(incomplete: str) -> list[str]:
    """Return the ids of problems and remedies that begin like that."""
    return [name for name in (*PROBLEM_IDS, *REMEDY_IDS) if name.startswith(incomplete)]


def complete_stage(incomplete: str) -> list[str]:
    """Return the stages with known names that begin like that."""
    return [name for name in STAGES if name.startswith(incomplete)]
