"""What is wrong with a run: its problems by price with their remedies, ideas, and what is unknown.

`diagnose` answers once per run. The terminal, the end of a training, the report, notebooks and JSON
ask it, so what comes first, second and third is the same everywhere.
"""

import json
import shlex
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from lightning_rlprof.analysis.device.losses import DeviceLoss, loss_texts
from lightning_rlprof.analysis.diagnosis.data_quality import Quality, check_quality
from lightning_rlprof.analysis.diagnosis.evidence import (
    MET,
    NOT_MET,
    Condition,
    Evidence,
    Fact,
    Measured,
    NoData,
    shown,
)
from lightning_rlprof.analysis.diagnosis.problem import (
    Finding,
    Offer,
    Price,
    Problem,
    Remedy,
    Setting,
    Undecided,
)
from lightning_rlprof.analysis.diagnosis.run_problems import (
    DISTORTING,
    ENDED,
    MACHINES,
    RANKS_AND_CHANGES,
)
from lightning_rlprof.analysis.diagnosis.stage_problems import DEVICES, ROLLOUTS, WAITS
from lightning_rlprof.analysis.sizing.speed import Speed, speeds
from lightning_rlprof.analysis.whatif.whatif import BALANCED, whatif
from lightning_rlprof.errors import TraceError
from lightning_rlprof.tables.spans import Spans, answer
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of, rows_of

PROBLEM_GROUPS = {
    "What ended the run": ENDED,
    "What makes other times untrue": DISTORTING,
    "Ranks and changes": RANKS_AND_CHANGES,
    "Rollout and samples": ROLLOUTS,
    "Waiting and stages": WAITS,
    "Devices": DEVICES,
    "Machines": MACHINES,
}
"""The registry of problems, by what they are about."""

PROBLEMS = {each.id: each for each in chain.from_iterable(PROBLEM_GROUPS.values())}
"""The registry by id."""

REMEDIES = {each.id: each for problem in PROBLEMS.values() for each in problem.remedies}
"""Remedies by id; one that helps against several problems is there once."""

FRAMEWORKS = ("verl", "MindSpeed-RL", "TRL", "vLLM", "Lightning")
"""What ``--framework`` takes. Settings of PyTorch, the environment and rlprof are always shown."""

_PACKAGES = {
    "verl": ("verl", "vLLM"),
    "mindspeed-rl": ("MindSpeed-RL", "vLLM"),
    "trl": ("TRL", "vLLM"),
    "vllm": ("vLLM",),
}
_LIGHTNING = ("lightning", "pytorch-lightning")
_ORDER = ("ended", "distorts", "problem", "idea")
_STOP_AT = 0.9  # The replay of a shorter tail stops a rollout there.
_COLUMNS = (
    *columns_of("text", "id", "finding", "kind", "price"),
    *columns_of("share", "share", "CI low", "CI high"),
    Column("cost", "duration", "ns"),
    *columns_of("text", "confidence", "try", "remedies", "ruled out if", "evidence"),
    *columns_of("text", "reproduce", "query"),
    *columns_of("count", "rank", "step"),
    Column("from", "duration", "ns"),
    Column("to", "duration", "ns"),
)


@dataclass(frozen=True)
class Diagnosis:
    """The answer of `diagnose`.

    Attributes:
        run: Where the run is.
        quality: Whether the recording is complete.
        losses: What is known to be missing of the devices' work.
        problems: What ended the run, what makes other times untrue, then problems by price.
        ideas: What might be saved by another design or other hardware.
        undecided: Problems and remedies that could not be decided.
        explained: Problems that are not listed, as another one explains half of their time.
        ignored: Ids that the configuration leaves out.
        unknown: Ids that it leaves out and that no problem or remedy has.
        frameworks: Whose settings are shown.
        speed: How fast stages are, of what is attainable.
        abstained: Why nothing could be judged; None if it could.
    """

    run: Path
    quality: Quality
    losses: tuple[DeviceLoss, ...] = ()
    problems: tuple[Finding, ...] = ()
    ideas: tuple[Finding, ...] = ()
    undecided: tuple[Undecided, ...] = ()
    explained: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    frameworks: tuple[str, ...] = ()
    speed: tuple[Speed, ...] = ()
    abstained: str | None = None

    @property
    def found(self) -> tuple[Finding, ...]:
        """Problems and ideas, in their order."""
        return (*self.problems, *self.ideas)

    @property
    def nothing(self) -> str:
        """What to say of a run without a problem."""
        if self.abstained is not None:
            return f"No data: {self.abstained}"
        return no_problem(len(self.undecided), self.losses)

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain data for JSON."""
        return {
            "recording": {
                "complete": not self.quality.doubts,
                "checks": [each._asdict() for each in self.quality.checks],
                "losses": [each.to_dict() for each in self.losses],
            },
            "problems": [each.to_dict() for each in self.problems],
            "ideas": [each.to_dict() for each in self.ideas],
            "undecided": [each._asdict() for each in self.undecided],
            "explained": list(self.explained),
            "ignored": list(self.ignored),
            "frameworks": list(self.frameworks),
            "speed": [each.to_dict() for each in self.speed],
            "abstained": self.abstained,
        }


def no_problem(undecided: int, losses: Iterable[DeviceLoss]) -> str:
    """Return that no problem was found, how much could not be decided, and what is missing."""
    text = "No problem found in what was recorded"
    if undecided:
        text += f"; {undecided} check{' needs' if undecided == 1 else 's need'} more data"
    return ". ".join([text, *loss_texts(each for each in losses if each.hides_time)]) + "."


# `Spans.once` would share it with a copy, whose other notes or tables have other problems.
_LAST: "WeakKeyDictionary[Spans, dict[str | None, Diagnosis]]" = WeakKeyDictionary()


def diagnose(spans: Spans, framework: str | None = None) -> Diagnosis:
    """Return the problems of a run with their remedies; the answer is kept as long as the run is.

    Args:
        spans: The run.
        framework: Show the settings of this one of `FRAMEWORKS`, not of those that the run names.

    Raises:
        TraceError: The framework is unknown.
    """
    if framework is not None and framework not in FRAMEWORKS:
        hint = f"frameworks: {', '.join(FRAMEWORKS)}"
        raise TraceError(f"unknown framework {framework!r}", hint=hint, code="unknown_framework")

    def make(run: Spans) -> Diagnosis:
        return _diagnose(run, framework) if run is spans else diagnose(run, framework)

    kept = _LAST.setdefault(spans, {})
    if framework not in kept:
        name = "diagnosis" if framework is None else f"diagnosis-{framework}"
        found = answer(spans, name, Diagnosis, make)
        if found.run != spans.path:
            problems, ideas = (restored(own, spans.path) for own in (found.problems, found.ideas))
            found = replace(found, run=spans.path, problems=problems, ideas=ideas)
        kept[framework] = found
    return kept[framework]


def _diagnose(spans: Spans, framework: str | None) -> Diagnosis:
    run = Evidence(spans)
    losses = tuple(run.devices.losses)
    quality = check_quality(spans)
    named = (framework,) if framework is not None else tuple(_named_frameworks(spans))
    if not run.has_steps and not run.devices.lanes:
        abstained = "; ".join(["no complete step was recorded", *loss_texts(losses)])
        return Diagnosis(spans.path, quality, losses, frameworks=named, abstained=abstained)
    ignored = _ignored(spans)
    undecided: list[Undecided] = []
    found: list[Finding] = []
    # Slow ranks come first: they need most memory, and what comes later keeps what it read.
    for problem in sorted(PROBLEMS.values(), key=lambda each: each.id != "straggler"):
        if problem.id not in ignored:
            found += check_problem(run, problem, undecided)
    kept = _without_effects(found)
    kept.sort(key=lambda each: (_ORDER.index(each.kind), -each.weight))
    shown_knobs: dict[str, str] = {}
    kept = [
        replace(each, remedies=_offers(run, each, named, ignored, shown_knobs, undecided))
        for each in kept
    ]
    known = PROBLEMS.keys() | REMEDIES.keys()
    return Diagnosis(
        spans.path,
        quality,
        losses,
        tuple(each for each in kept if each.kind != "idea"),
        tuple(each for each in kept if each.kind == "idea"),
        tuple(dict.fromkeys(undecided)),
        tuple(dict.fromkeys(each.id for each in found if each.id not in {own.id for own in kept})),
        tuple(sorted(ignored & known)),
        tuple(sorted(ignored - known)),
        named,
        judged_speeds(spans),
    )


def judged_speeds(spans: Spans) -> tuple[Speed, ...]:
    """Return how fast stages are if any could be judged; computed once per run."""
    found: tuple[Speed, ...] = spans.once("speeds", speeds, ("clocks",))
    return found if any(each.low is not None for each in found) else ()


def _named_frameworks(spans: Spans) -> Iterator[str]:
    """Yield the frameworks that the headers name: those of a door, else Lightning."""
    packages = {name for head in spans.headers.values() for name in head.versions}
    own = dict.fromkeys(
        each for package, named in _PACKAGES.items() if package in packages for each in named
    )
    yield from own
    if not own and packages & {*_LIGHTNING}:
        yield "Lightning"


def _ignored(spans: Spans) -> set[str]:
    """Return the ids that the configuration of any rank leaves out."""
    found: set[str] = set()
    for head in spans.headers.values():
        own = head.config.get("ignore_findings")
        found |= {*map(str, own)} if isinstance(own, list | tuple) else set()
    return found


# ---- problems


def check_problem(run: Evidence, problem: Problem, undecided: list[Undecided]) -> list[Finding]:
    """Return the findings of a problem: one for each place where its quantity is beyond the limit.

    A contradicted condition decides, whatever lacks data.
    """
    subject, *further = problem.when
    states = [(each, *_state(run, each)) for each in further]
    if any(state == NOT_MET for _, state, _ in states):
        return []
    measured = run.measure(subject.quantity)
    several = measured if isinstance(measured, tuple) else (measured,)
    cases = [each for each in several if not isinstance(each, NoData)]
    met = [each for each in cases if subject.state(each) == MET]
    open_cases = [each for each in cases if subject.state(each) not in (MET, NOT_MET)]
    lacking = [lacks for _, state, lacks in states if state != MET and lacks is not None]
    if isinstance(measured, NoData):
        lacking.insert(0, measured)
    elif not met:
        lacking = [*(_includes(subject) for _ in open_cases[:1]), *lacking] if open_cases else []
    if lacking:
        undecided.append(_undecided(problem, lacking))
        return []
    known = (found for each in further if (found := run.value(each.quantity)) is not None)
    more = tuple(chain.from_iterable(found.facts for found in known))
    return [_finding(run, problem, each, more) for each in met]


def _undecided(what: Problem | Remedy, lacking: list[NoData]) -> Undecided:
    why, how = (dict.fromkeys(own) for own in zip(*((e.why, e.how) for e in lacking), strict=True))
    return Undecided(what.id, what.title, "; ".join(why), "; ".join(filter(None, how)))


def _state(run: Evidence, condition: Condition) -> tuple[str, NoData | None]:
    """Return the state of a condition, and what is missing to decide it."""
    found = run.measure(condition.quantity)
    if isinstance(found, tuple):
        found = max(found, key=lambda each: each.value) if found else Measured(0.0, 0.0, 0.0)
    if isinstance(found, NoData):
        return "", found
    state = condition.state(found)
    return state, None if state in (MET, NOT_MET) else _includes(condition)


def _includes(condition: Condition) -> NoData:
    quantity = condition.quantity
    limit = shown(condition.limit, quantity.unit)
    return NoData(f"The interval of {quantity.text} includes {limit}", "Record or capture more")


def _finding(run: Evidence, problem: Problem, own: Measured, more: tuple[Fact, ...]) -> Finding:
    total, path = max(run.accounts.total_ns, 1), shlex.quote(str(run.spans.path))
    price = None
    if own.lost_ns is not None and problem.kind != "idea":
        bounds = (None, None) if own.bounds_ns is None else [each / total for each in own.bounds_ns]
        price = Price("lost", own.lost_ns / total, round(own.lost_ns), *bounds)
    return Finding(
        problem,
        _with_quantity(problem.when[0], own) + own.facts + more,
        price,
        problem.when[0].confidence(own),
        problem.act.replace("RUN", path),
        problem.look.replace("RUN", path),
        own.query,
        own.place,
        float(own.lost_ns or 0.0),
    )


def _with_quantity(condition: Condition, own: Measured) -> tuple[Fact, ...]:
    """Return the quantity itself as a fact, if no fact has its value already."""
    quantity = condition.quantity
    is_shown = quantity.unit == "yes/no" or any(each.value == own.value for each in own.facts)
    if is_shown or (own.lost_ns is not None and own.bounds_ns is None):
        return ()
    bounds = () if own.low == own.high else (own.low, own.high)
    return (Fact(f"{quantity.text}:", own.value, quantity.unit, *bounds),)


def _without_effects(found: list[Finding]) -> list[Finding]:
    """Leave out that ranks wait if slow ranks, which are findings too, explain half of it."""
    lost = sum(each.weight for each in found if each.id == "straggler")
    return [each for each in found if each.id != "collective-wait" or 2 * lost < each.weight]


# ---- remedies


def _offers(
    run: Evidence,
    found: Finding,
    named: Collection[str],
    ignored: Collection[str],
    turned: dict[str, str],
    undecided: list[Undecided],
) -> tuple[Offer, ...]:
    """Return the remedies whose conditions are met, most saving first.

    Args:
        run: The run.
        found: The problem.
        named: The frameworks to show.
        ignored: Ids to leave out.
        turned: How the remedies of more expensive problems turn each knob. No other direction of
            these is offered, and what is offered is added.
        undecided: Takes the remedies that lack data.
    """
    offers = []
    for remedy in found.problem.remedies:
        settings = tuple(
            each
            for each in remedy.settings
            if (each.framework not in FRAMEWORKS or each.framework in named)
            and turned.get(each.turns, each.turn) == each.turn
            and not _is_set(run.spans, each)
        )
        if remedy.id in ignored or not settings:
            continue
        states = [_state(run, each) for each in remedy.when]
        lacking = [lacks for state, lacks in states if state != MET and lacks is not None]
        if any(state == NOT_MET for state, _ in states):
            continue
        if lacking:
            undecided.append(_undecided(remedy, lacking))
            continue
        turned.update({each.turns: each.turn for each in settings})
        offers.append(Offer(remedy, settings, _saves(run, found, remedy)))
    return tuple(sorted(offers, key=lambda each: -(each.saves.share if each.saves else 0.0)))


def _is_set(spans: Spans, setting: Setting) -> bool:
    """Return whether each rank's own configuration of rlprof has the value of a setting already."""
    if setting.framework != "rlprof":
        return False
    values = [header.config.get(setting.key) for header in spans.headers.values()]
    return {*map(json.dumps, values)} == {setting.turn}


def _saves(run: Evidence, found: Finding, remedy: Remedy) -> Price | None:
    """Return what a replay on the same devices predicts; None without one, or if it is unsure."""
    changes: dict[str, tuple[str, dict[str, Any]]] = {
        "balance": (BALANCED, {}),
        "straggler": ("no straggler", {}),
        "tail": (f"rollout stopped at {_STOP_AT:.0%}", {"stop_rollout_at": _STOP_AT}),
    }
    if len(names := _stages_of(run, found)) == 1:
        changes["overlap"] = f"{names[0]} overlapped", {"overlap": names}
        changes["removed"] = f"{names[0]} removed", {"remove": names}
    if remedy.saving not in changes:
        return None
    change, asked = changes[remedy.saving]
    try:
        rows = rows_of(whatif(run.spans, **asked))
    except TraceError:  # A stage is not on the path of steps, or requests have no spans.
        return None
    total = max(run.accounts.total_ns, 1)
    in_steps = float(run.category_ns.sum()) / total
    for row in rows:
        now: Any = row["baseline"]
        if row["change"] == change and now:
            share, low, high = (
                in_steps * each / now
                for each in (row["saved"], now - row["CI high"], now - row["CI low"])
            )
            return Price("saves", share, round(share * total), low, high) if low > 0 else None
    return None


def _stages_of(run: Evidence, found: Finding) -> list[str]:
    """Return the stages of the longest spans of a finding."""
    if found.place is None:
        return []
    spans, place = run.spans, found.place
    rows = spans.rows(kind="stage", rank=place.rank)
    own = rows[(spans.start_ns[rows] == place.from_ns) & (spans.end_ns[rows] == place.to_ns)]
    names = {spans.names[code] for code in spans.name[own].tolist()}
    return [name for name in names if name in run.stages]


def restored(found: Iterable[Finding], run: Path) -> tuple[Finding, ...]:
    """Return findings that a cache kept, with the entries of the registry and the run's path."""
    return tuple(_restored(each, shlex.quote(str(run))) for each in found)


def _restored(found: Finding, run: str) -> Finding:
    offers = tuple(replace(each, remedy=REMEDIES[each.remedy.id]) for each in found.remedies)
    act, look = (text.replace("RUN", run) for text in (found.act, found.look))
    return replace(found, problem=PROBLEMS[found.problem.id], remedies=offers, act=act, look=look)


def known_id(name: str) -> Problem | Remedy:
    """Return the problem or remedy with an id.

    Raises:
        TraceError: None has it.
    """
    found = PROBLEMS.get(name) or REMEDIES.get(name)
    if found is None:
        close = get_close_matches(name, [*PROBLEMS, *REMEDIES], n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        hint += "List all: rlprof findings --explain all"
        raise TraceError(f"unknown problem {name!r}", hint=hint, code="unknown_problem")
    return found


def explained(what: Problem | Remedy) -> dict[str, Any]:
    """Return what a problem or remedy is, as the texts of `rlprof findings --explain`."""
    facts: dict[str, Any] = {"id": what.id, "title": what.title}
    facts["when"] = [f"{each.quantity.text}: {each.bound}" for each in what.when]
    if isinstance(what, Problem):
        facts |= {"act": what.act, "ruled_out_if": what.ruled_out_if, "look": what.look}
    own = what.remedies if isinstance(what, Problem) else (what,)
    facts["remedies"] = [
        {
            "id": each.id,
            "title": each.title,
            "when": [f"{own.quantity.text}: {own.bound}" for own in each.when],
            "settings": [setting.text for setting in each.settings],
            "risk": each.risk,
        }
        for each in own
    ]
    return facts | {"guide": what.guide}


# ---- as a table


def findings(spans: Spans) -> Table:
    """List the problems of a run by what they cost, with their remedies, then ideas.

    What ended the run comes first: a rank that ran out of memory, or a hang. Then comes what makes
    all other times untrue: waiting for a CPU, and lost data. Ranks that wait are not listed if a
    slow rank explains half of it.

    ``price`` is ``lost``, time that the job spent on it. ``cost`` is that time, ranks summed,
    and ``share`` its part of the job. What steps did cost is exact; ``CI low`` and ``CI high`` are
    the 95% confidence interval of what was taken from captured steps. Ideas have no price.

    ``kind`` is ``ended``, ``distorts``, ``problem`` or ``idea``. ``query`` is the SELECT that
    returns the evidence. ``rank``, ``step``, ``from`` and ``to`` are the place of its first event,
    in the report's timeline and in an exported trace. The note lists what was not decided.

    Has no data if the run has no complete step and no device activity.
    """
    found = diagnose(spans)
    rows = [_row(each) for each in found.found]
    return Table("findings", _COLUMNS, rows, _note(found), found.abstained)


def _row(found: Finding) -> tuple[Cell, ...]:
    price = found.price
    numbers = (
        (None,) * 5 if price is None else (price.kind, price.share, price.low, price.high, price.ns)
    )
    remedies = "; ".join(setting.text for offer in found.remedies for setting in offer.settings)
    return (
        *(found.id, found.heading, found.kind, *numbers),
        *(found.confidence, found.act, remedies, found.problem.ruled_out_if, found.evidence),
        *(found.look, found.query, *(found.place or (None,) * 4)),
    )


def _note(found: Diagnosis) -> str:
    reasons: dict[str, list[str]] = {}
    for each in found.undecided:
        reasons.setdefault(each.why, []).append(each.id)
    count = len({each.id for each in found.undecided})
    were = "check was" if count == 1 else "checks were"
    listed = "; ".join(f"{', '.join(ids)} ({why})" for why, ids in reasons.items())
    notes = [f"{count} {were} not decided: {listed}."] * bool(count)
    notes += [f"Explained by another: {', '.join(found.explained)}."] * bool(found.explained)
    notes += [f"{text}." for text in loss_texts(found.losses)]
    return " ".join(notes)
