"""Advice on a run: which rules are given, on what evidence, and what following them would save."""

from collections.abc import Collection
from difflib import get_close_matches
from typing import NamedTuple

from lightning_rlprof.analysis.advice.counters import frameworks
from lightning_rlprof.analysis.advice.effects import Effect, effects
from lightning_rlprof.analysis.advice.evidence import Evidence
from lightning_rlprof.analysis.advice.rule import (
    GIVEN,
    NOT_GIVEN,
    UNDECIDED,
    Condition,
    Measurement,
    NoData,
    Quantity,
    Rule,
)
from lightning_rlprof.analysis.advice.rules import RULES
from lightning_rlprof.errors import TraceError
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Table, columns_of

_COLUMNS = (
    *columns_of("text", "advice", "verdict", "title"),
    *columns_of("share", "saved", "CI low", "CI high"),
    *columns_of("text", "saving", "evidence", "missing", "record", "settings"),
    *columns_of("text", "effect", "risk", "guide"),
)
_VERDICTS = (GIVEN, UNDECIDED, NOT_GIVEN)
_MORE_STEPS, _MORE_CAPTURES = "Record more steps", "Capture more steps"
_CAPTURED = ("captured time", "kernels")  # in the text of what captures show


class _Judged(NamedTuple):
    """A rule with its verdict, the evidence in words, what is missing, and how to record it."""

    rule: Rule
    verdict: str
    evidence: str
    missing: str
    record: str


def advice(spans: Spans, *, ignore: Collection[str] = ()) -> Table:
    """List what to change, by what it saves; then what could not be decided, and what is not given.

    A rule is ``given`` if the whole interval of each of its quantities is beyond its limit, and
    ``not given`` if one of them contradicts it. Else it is ``undecided``: ``missing`` is why, and
    ``record`` how to get the data. ``saved`` is a share of the step: of a replay of the recorded
    steps, or at most the time that the advice is about. It is empty for memory or quality.

    ``settings`` are those of the frameworks whose versions the run has, of all if it has none.
    Rules of the configuration key ``ignore_advice`` are left out.

    Abstains if the run has neither a step nor device activity.

    Args:
        spans: The run.
        ignore: Ids of more rules to leave out.

    Raises:
        TraceError: An id is unknown.
    """
    for unknown in [each for each in ignore if each not in RULES]:
        raise _unknown(unknown)
    run = Evidence(spans)
    if not len(spans.rows(kind="step")) and not run.devices.lanes:
        return Table("advice", _COLUMNS, abstained="no complete step was recorded")
    left_out = {*ignore, *ignored(spans)}
    rules = [rule for rule in RULES.values() if rule.id not in left_out]
    measured = measure(run, rules)
    judged = [_judged(rule, measured) for rule in rules]
    given = [each.rule for each in judged if each.verdict == GIVEN]
    savings = effects(run, given, measured)
    own = [*frameworks(run)]
    order = sorted(judged, key=lambda each: _order(each, savings))
    rows = [_row(each, savings.get(each.rule.id), own) for each in order]
    count = {verdict: sum(each.verdict == verdict for each in judged) for verdict in _VERDICTS}
    notes = [f"{', '.join(f'{number} {verdict}' for verdict, number in count.items())}."]
    if left_out:
        notes.append(f"Ignored: {', '.join(sorted(left_out & RULES.keys()))}.")
    return Table("advice", _COLUMNS, rows, " ".join(notes))


def ignored(spans: Spans) -> set[str]:
    """Return the ids that the configuration of any rank ignores."""
    found: set[str] = set()
    for head in spans.headers.values():
        own = head.config.get("ignore_advice")
        found |= {*map(str, own)} if isinstance(own, list | tuple) else set()
    return found


def measure(run: Evidence, rules: Collection[Rule]) -> dict[Quantity, Measurement]:
    """Return every quantity of some rules, each measured once."""
    quantities = dict.fromkeys(each.quantity for rule in rules for each in rule.conditions)
    return {quantity: quantity.measure(run) for quantity in quantities}


def verdict_of(rule: Rule, measured: dict[Quantity, Measurement]) -> str:
    """Return the verdict on a rule: one contradicted condition decides, whatever lacks data."""
    states = [_state(each, measured[each.quantity]) for each in rule.conditions]
    if NOT_GIVEN in states:
        return NOT_GIVEN
    return UNDECIDED if UNDECIDED in states else GIVEN


def _state(condition: Condition, found: Measurement) -> str:
    return UNDECIDED if isinstance(found, NoData) else condition.verdict(found)


def _judged(rule: Rule, measured: dict[Quantity, Measurement]) -> _Judged:
    verdict = verdict_of(rule, measured)
    evidence: list[str] = []
    missing: list[str] = []
    record: list[str] = []
    for each in rule.conditions:
        found = measured[each.quantity]
        if not isinstance(found, NoData):
            evidence.append(each.measured(found))
        if verdict == UNDECIDED and _state(each, found) == UNDECIDED:
            lacks = found if isinstance(found, NoData) else _includes(each)
            missing.append(lacks.why)
            record.append(lacks.how)
    texts = ("; ".join(dict.fromkeys(each)) for each in (evidence, missing, record))
    return _Judged(rule, verdict, *texts)


def _includes(condition: Condition) -> NoData:
    quantity = condition.quantity
    limit = quantity.shown(condition.limit)
    how = _MORE_CAPTURES if any(each in quantity.text for each in _CAPTURED) else _MORE_STEPS
    return NoData(f"The interval of {quantity.text} includes the limit of {limit}", how)


def _order(each: _Judged, savings: dict[str, Effect]) -> tuple[int, float]:
    saving = savings.get(each.rule.id)
    return _VERDICTS.index(each.verdict), -(saving.share if saving is not None else -1.0)


def _row(each: _Judged, saving: Effect | None, own: list[str]) -> tuple[Cell, ...]:
    rule = each.rule
    numbers = (None,) * 3 if saving is None else (saving.share, saving.low, saving.high)
    return (
        *(rule.id, each.verdict, rule.title, *numbers),
        None if saving is None else saving.source,
        *(each.evidence, each.missing, each.record, settings_text(rule, own)),
        *(rule.effect, rule.risk, rule.guide),
    )


def settings_text(rule: Rule, own: Collection[str]) -> str:
    """Return the settings of a rule in one line, of these frameworks if it has any.

    Settings of PyTorch, Lightning, the environment and rlprof apply to all frameworks.
    """
    others = {"verl", "MindSpeed-RL", "TRL", "vLLM"} - {*own}
    kept = [each for each in rule.settings if not own or each.framework not in others]
    return "; ".join(each.text for each in kept or rule.settings)


def rule_of(name: str) -> Rule:
    """Return the rule with an id.

    Raises:
        TraceError: No rule has it.
    """
    if name not in RULES:
        raise _unknown(name)
    return RULES[name]


def _unknown(name: str) -> TraceError:
    close = get_close_matches(name, RULES, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return TraceError(
        f"unknown advice {name!r}", hint=f"{hint}List all: rlprof explain", code="unknown_advice"
    )
