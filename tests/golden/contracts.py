"""All contracts, by the name of their golden file."""

from functools import partial
from typing import Any

from lightning_rlprof.analysis.catalog import CATALOG
from tests.golden.golden import FEW, MANY, Contract, answer
from tests.golden.inputs import RUNS

_QUERY = "select name, kind, count(*) as spans, sum(end_ns - start_ns) as total_ns from spans"
_QUERY += " group by all order by all"
# How each verb with --json is called; {run} is the input, {other} one to compare it with.
VERBS = {
    "advise": ("advise {run}",),
    "compare": ("compare {run} {other}", "compare {run} {other} --fail-if-slower 3%"),
    "critical-path": ("critical-path {run} --by rank", "critical-path {run} --level device"),
    "findings": ("findings {run}",),
    "hang": ("hang {run}",),
    "ingest": ("ingest {run} -j 1",),
    "ledger": ("ledger {run}",),
    "peek": ("peek {run}",),
    "show": ("show {run}", *(f"show {{run}} {each.name}" for each in CATALOG)),
    "stragglers": ("stragglers {run}",),
    "summary": ("summary {run}", "summary {run} --by rank"),
    "whatif": ("whatif {run} --save --speedup actor_update=2", "whatif check {run} {other}"),
}
_OTHER = {"demo": "slow", "slow": "demo", "async": "demo"}


_SHORT = {"advise", "show", "summary"}


def _verb(verb: str, run: str) -> Any:
    """Return the answers of a verb; what repeats the first answer is left out of the others."""
    found, other = {}, _OTHER.get(run, "kineto")
    for line in VERBS[verb]:
        rows = FEW if verb in _SHORT else MANY
        found[line.format(run="RUN", other=other)] = answer(line.format(run=run, other=other), rows)
    first, *others = found.values()
    for each in others:
        for key in [key for key in each if key != "tables" and each[key] == first.get(key)]:
            del each[key]
        if "tables" in each:
            each["tables"] = [one for one in each["tables"] if one not in first.get("tables", ())]
    return found


CONTRACTS: dict[str, Contract] = {
    f"{run}/{verb}.json": partial(_verb, verb, run) for run in RUNS for verb in VERBS
}
