"""Dumps of slime's rollouts: samples, each with a trace of what was done for it.

slime writes them with ``--save-debug-rollout-data``, as pickles, which can run code. The page of
slime converts them to the JSON that is read here.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.frameworks.log_lines import (
    as_object,
    fate_mark,
    in_steps,
    is_name,
    is_number,
    line,
    objects,
    rank_trace,
    read_each,
    rollout_stages,
    sample_number,
    step_spans,
    text,
    wall_clock,
    whole,
)
from lightning_rlprof.records.records import SAMPLE, Number
from lightning_rlprof.records.run_directory import RankTrace, SampleLine, SpanLine
from lightning_rlprof.records.stage_aliases import standard_stage
from lightning_rlprof.system.files import open_file

_EVALUATION = re.compile(r"eval_\d+$")
_GENERATE, _WHOLE, _GROUP = "actor_generate", "generate_and_rm", "generate_and_rm_group"
_FATES = {"truncated": "truncated", "aborted": "aborted", "failed": "aborted"}
_NO_TRACE = "its samples have no trace, which newer versions of slime record"
_TORN = "{} events are left out: they are damaged, or of a span that didn't end"


class _Dump(NamedTuple):
    """Samples of one rollout.

    Attributes:
        number: ``rollout_id``, from 0.
        evaluates: Whether they are of an evaluation.
        samples: What slime says of each.
    """

    number: int
    evaluates: bool
    samples: list[Mapping[str, Any]]


class _Span(NamedTuple):
    """A span of a sample's trace, with what its start and its end say of it."""

    id: str
    parent: object
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]


class _Trace(NamedTuple):
    """Spans of a sample in the order of their starts, moments, and the number of lost events."""

    spans: list[_Span]
    moments: list[tuple[str, int]]
    torn: int


def read_slime(paths: Sequence[Path]) -> list[RankTrace]:
    """Read dumps of rollouts, in JSON or lines of it, as one rank.

    A step is a rollout, up to the next one; a phase is in the step in which it began. ``completed``
    isn't a fate, because the dump is written before the update.

    Raises:
        TraceError: None of the files can be read, or no sample has a trace.
    """
    read, broken = read_each(paths, _read)
    spans, names = list[SpanLine](), list[SampleLine]()
    lives, parts = list[tuple[_Dump, int, int]](), list[tuple[bool, int, int]]()
    seen, torn = set[str](), 0
    for dump in (each for dumps, _ in read for each in dumps):
        before, ends = len(spans), list[tuple[Mapping[str, Any], int, int | None]]()
        for sample in dump.samples:
            number, trace = _number(dump, sample), _trace_of(sample, seen)
            names.append(_name(number, dump, sample))
            own = _phases(number, sample, trace, len(spans))
            ends.append((sample, number, max((each.end_ns for each in own), default=None)))
            spans += own
            torn += trace.torn
        if len(spans) == before:
            continue
        parts.append((dump.evaluates, before, len(spans)))
        first = min(each.start_ns for each in spans[before:])
        last = max(each.end_ns for each in spans[before:])
        lives.append((dump, first, last))
        for sample, number, end in ends:
            spans.append(_fate(number, dump, sample, last if end is None else end))
    if not spans:
        raise TraceError(f"{paths[0]}: {_NO_TRACE}")
    zero, starts = min(first for _, first, _ in lives), _starts(lives, spans)
    spans = in_steps(spans, starts)
    for evaluates, stage in ((False, _GENERATE), (True, "evaluation")):
        own = [each for what, *ends in parts if what == evaluates for each in spans[slice(*ends)]]
        spans += rollout_stages(own, stage)
    spans += step_spans(starts, max(last for *_, last in lives))
    notes = [("warning", each) for each in broken]
    notes += [("warning", _TORN.format(torn))] * (torn > 0)
    lost = sum(count for _, count in read)
    return [
        rank_trace(
            paths[0], spans, role="rollout", zero_ns=zero, samples=names, notes=notes, lost=lost
        )
    ]


def _starts(lives: Sequence[tuple[_Dump, int, int]], spans: Sequence[SpanLine]) -> dict[int, int]:
    """Return the start of each step: of its rollout's first phase after the rollout before.

    Samples that a rollout continues began in an earlier one.
    """
    trains = [each for each in lives if not each[0].evaluates] or [*lives]
    begins = np.sort([each.start_ns for each in spans if each.kind != "mark"])
    found, ended = dict[int, int](), 0
    for dump, first, last in sorted(trains, key=lambda each: each[2]):
        later = np.searchsorted(begins, ended)
        start = first if first >= ended or later == len(begins) else int(begins[later])
        found.setdefault(dump.number + 1, start)
        ended = last
    return found


def _trace_of(sample: Mapping[str, Any], seen: set[str]) -> _Trace:
    """Read the events of a sample; spans that another sample has as well are left to that one."""
    trace = sample.get("trace")
    events = trace.get("events") if isinstance(trace, dict) else sample.get("events")
    begun: dict[str, tuple[str, int, object, Mapping[str, Any]]] = {}
    ended: dict[str, _Span] = {}
    moments, torn = list[tuple[str, int]](), 0
    for event in events if isinstance(events, list) else ():
        told = event if isinstance(event, dict) else {}
        what, name, key = told.get("type"), told.get("name"), told.get("span_id")
        at, attributes = wall_clock(told.get("ts")), told.get("attrs")
        attributes = attributes if isinstance(attributes, dict) else {}
        if at is None or not isinstance(name, str):
            torn += 1
        elif what == "event":
            moments.append((text(name), at))
        elif what == "span_start" and isinstance(key, str):
            begun[key] = (name, at, told.get("parent_span_id"), attributes)
        elif what == "span_end" and isinstance(key, str) and key in begun:
            begin = begun[key]
            both = {**begin[3], **attributes}
            ended[key] = _Span(key, begin[2], begin[0], begin[1], max(at, begin[1]), both)
        else:
            torn += 1
    spans = [ended[key] for key in begun if key in ended and key not in seen]
    torn += sum(key not in ended for key in begun)
    seen.update(begun)
    return _Trace(spans, moments, torn)


def _phases(number: int, sample: Mapping[str, Any], trace: _Trace, before: int) -> list[SpanLine]:
    """Return a sample's phases and moments: innermost generations, and what isn't around them."""
    length = whole(sample.get("response_length"))
    outer = [each for each in trace.spans if each.name == _WHOLE]
    made = [
        each
        for each in trace.spans
        if standard_stage(each.name) == _GENERATE and each.name != _WHOLE
    ] or (outer if length else [])
    by_id = {each.id: each for each in trace.spans}
    around = {each.id for each in trace.spans if each.name == _GROUP}
    around |= {each.id for each in outer if each not in made}
    for each in made:
        above = each.parent
        while isinstance(above, str) and above in by_id and above not in around:
            around.add(above)
            above = by_id[above].parent
    told = dict(zip((each.id for each in made), _counters(sample, made, length), strict=True))
    place, found = dict[object, int](), list[SpanLine]()
    for each in trace.spans:
        if each.id in around:
            continue
        counters = {SAMPLE: number, **told.get(each.id, {})}
        parent = place.get(each.parent)
        name = text(standard_stage(each.name))
        found.append(
            line(name, "region", each.start_ns, each.end_ns, parent=parent, counters=counters)
        )
        place[each.id] = before + len(found)
    for name, at in trace.moments:
        found.append(line(name, "mark", at, at, counters={SAMPLE: number}))
    return found


def _counters(
    sample: Mapping[str, Any], made: Sequence[_Span], length: int | None
) -> list[dict[str, Number]]:
    """Return tokens and versions of the weights of each generation of a sample.

    slime lists a version per generation. If there are more or fewer, the first one is that in which
    the first generation began, and the last one that in which the last one ended.
    """
    tokens = [whole(each.attributes.get("completion_tokens")) for each in made]
    if None in tokens:
        tokens = [*[None] * (len(made) - 1), length]
    told = sample.get("weight_versions")
    versions = [_version(each) for each in told] if isinstance(told, list) else []
    last = None
    if not versions or None in versions:
        versions = [None] * len(made)
    elif len(versions) != len(made):
        last = versions[-1]
        versions = [versions[0], *[None] * (len(made) - 1)][: len(made)]
    found: list[dict[str, Number]] = []
    for count, version in zip(tokens, versions, strict=True):
        known = {"tokens": count, "version": version}
        found.append({name: value for name, value in known.items() if value is not None})
    if found and last is not None:
        found[-1]["version_end"] = last
    return found


def _version(value: object) -> int | None:
    if isinstance(value, str) and value.isdecimal() and len(value) < 16:
        return int(value)
    return whole(value)


def _fate(number: int, dump: _Dump, sample: Mapping[str, Any], at_ns: int) -> SpanLine:
    status = text(sample.get("status") or "complete")
    fate = _FATES.get(status, status)
    if sample.get("remove_sample") is True:
        fate = "filtered"
    if dump.evaluates:
        fate = "evaluation"
    reward = sample.get("reward")
    return fate_mark(
        fate,
        number,
        at_ns,
        tokens=whole(sample.get("response_length")),
        reward=reward if is_number(reward) else None,
    )


def _number(dump: _Dump, sample: Mapping[str, Any]) -> int:
    trace = sample.get("trace")
    told = trace if isinstance(trace, dict) else sample
    if isinstance(told.get("trace_id"), str) and told["trace_id"]:
        return sample_number(told["trace_id"])
    index = sample.get("index")
    return sample_number(dump.evaluates, dump.number, index if is_name(index) else None)


def _name(number: int, dump: _Dump, sample: Mapping[str, Any]) -> SampleLine:
    trace = sample.get("trace")
    told = trace if isinstance(trace, dict) else sample
    index, group = (
        next((each for each in both if is_name(each)), None)
        for both in (
            (sample.get("index"), told.get("sample_id")),
            (sample.get("group_index"), told.get("group_id")),
        )
    )
    name = f"sample {text(index)}" if group is None else text(group)
    if dump.evaluates:
        name = f"evaluation {dump.number}, {name}"
    return SampleLine(number, name, name, whole(told.get("attempt")) or 0)


def _read(path: Path) -> tuple[list[_Dump], int]:
    """Return the rollouts of a file, and the number of samples or lines that cannot be read."""
    stem = re.search(r"\d+$", path.stem)
    number = int(stem[0][-9:]) if stem else 0
    evaluates = _EVALUATION.search(path.stem) is not None
    found, lost = dict[int, list[Mapping[str, Any]]](), 0
    for each in objects(path) if path.suffix == ".jsonl" else [_whole_object(path)]:
        told = each or {}
        samples = told.get("samples", [told])
        own = whole(told.get("rollout_id"))
        for sample in samples if isinstance(samples, list) else [None]:
            if isinstance(sample, dict) and sample:
                found.setdefault(number if own is None else own, []).append(sample)
            else:
                lost += 1
    if not found:
        raise TraceError(f"{path}: has no samples")
    return [_Dump(each, evaluates, samples) for each, samples in found.items()], lost


def _whole_object(path: Path) -> Mapping[str, Any] | None:
    try:
        with open_file(path) as file:
            return as_object(file.read())
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error
