"""What the diagnosis says of one problem of a run."""

from lightning_rlprof.analysis.diagnosis.diagnosis import PROBLEMS, check_problem
from lightning_rlprof.analysis.diagnosis.evidence import Evidence
from lightning_rlprof.analysis.diagnosis.problem import Finding, Undecided
from lightning_rlprof.tables.spans import Spans


def judged(run: Spans | Evidence, *ids: str) -> list[Finding | Undecided]:
    """Return what is found of some problems, and which are undecided."""
    own = run if isinstance(run, Evidence) else Evidence(run)
    undecided: list[Undecided] = []
    found = [each for name in ids for each in check_problem(own, PROBLEMS[name], undecided)]
    return [*found, *undecided]


def found(run: Spans | Evidence, *ids: str) -> list[Finding]:
    """Return what is found of some problems."""
    return [each for each in judged(run, *ids) if isinstance(each, Finding)]


def only(run: Spans | Evidence, *ids: str) -> Finding:
    """Return the only finding; nothing is undecided."""
    [finding] = judged(run, *ids)
    assert isinstance(finding, Finding), finding
    return finding


def why(run: Spans | Evidence, *ids: str) -> str:
    """Return why the only problem is undecided; nothing is found."""
    [undecided] = judged(run, *ids)
    assert isinstance(undecided, Undecided), undecided
    return undecided.why
