"""The log of verl's file logger: per step the seconds of each timer, whose order is assumed."""

from collections.abc import Sequence
from pathlib import Path

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.frameworks.log_lines import (
    S,
    line,
    nanoseconds,
    objects,
    rank_trace,
    whole,
)
from lightning_rlprof.records.run_directory import RankTrace
from lightning_rlprof.records.stage_aliases import standard_stage

_LONGEST_NS = 2**55  # a year: what is longer is an error, which would move all later steps
_TIMING = "timing_s/"
# verl's timers in the order in which its trainer runs them; others follow in that of the log.
_ORDER = (
    *("gen", "generate_sequences", "reward", "old_log_prob", "ref", "values", "adv"),
    *("update_critic", "update_actor", "update_weights", "save_checkpoint", "testing"),
)
_PARTS_OF_OTHERS = ("generate_sequences", "tool_calls", "compute_score")  # of the agent loop
_ASSUMED = (
    "the log has only the seconds of each timer: their order in a step is assumed, and the time "
    "between them is behind them"
)


def read_verl(paths: Sequence[Path]) -> list[RankTrace]:
    """Read logs of verl's file logger (``trainer.logger=file``).

    Raises:
        TraceError: A file cannot be read, or has no timings of a step.
    """
    return [_read(path) for path in paths]


def _read(path: Path) -> RankTrace:
    spans, lost, now = [], 0, 0
    for row in objects(path):
        data = None if row is None else row.get("data")
        step = None if row is None else whole(row.get("step"))
        if not isinstance(data, dict) or step is None:
            lost += row is None
            continue
        lengths = {
            name.removeprefix(_TIMING): ns
            for name, value in data.items()
            if name.startswith(_TIMING)
            and (ns := nanoseconds(value, S)) is not None
            and 0 <= ns < _LONGEST_NS
        }
        whole_ns = lengths.pop("step", sum(lengths.values()))
        begin, at = now, now
        for name in sorted(lengths, key=_place):
            if name not in _PARTS_OF_OTHERS:
                end = at + lengths[name]
                spans.append(line(standard_stage(name), "stage", at, end, step))
                at = end
        now = max(at, begin + whole_ns)
        if lengths:
            spans.append(line("step", "step", begin, now, step))
    if not spans:
        raise TraceError(f"{path}: has no timings of a step")
    return rank_trace(path, spans, notes=[("info", _ASSUMED)], lost=lost)


def _place(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)
