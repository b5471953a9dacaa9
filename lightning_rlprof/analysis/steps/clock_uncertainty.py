"""Clock uncertainty: how far times of several ranks may be off against one another.

Few numbers compare clocks: a duration comes from one rank's clock, and so does a difference of two.
A table with a number that does adds `uncertainty_note`, and reports nothing smaller than ±u.
"""

from collections.abc import Iterable

from lightning_rlprof.tables.spans import Spans

WITHIN_UNCERTAINTY = "within clock uncertainty"
"""Text of a row whose effect is smaller than the clock uncertainty."""

_FEW = 5


def uncertainty_ns(spans: Spans, ranks: Iterable[int] | None = None) -> int | None:
    """Return the ±u of numbers that compare these ranks' clocks, None if it is unknown.

    It is 0 on one host, and else the sum over the two hosts with the largest uncertainty.

    Args:
        spans: The run.
        ranks: Ranks whose times are compared; None: all.
    """
    chosen = set(spans.headers if ranks is None else ranks)
    clocks: dict[object, object] = {rank: header.host for rank, header in spans.headers.items()}
    unsure: dict[object, object] = {}
    if (table := spans.try_table("clocks", [])) is not None:
        clocks |= dict(zip(table.column("rank"), table.column("clock"), strict=True))
        unsure = dict(zip(table.column("rank"), table.column("uncertainty"), strict=True))
    if len({clocks.get(rank) for rank in chosen}) < 2:
        return 0
    worst: dict[object, int] = {}
    for rank in chosen:
        own = unsure.get(rank)
        if not isinstance(own, int):
            return None
        worst[clocks[rank]] = max(worst.get(clocks[rank], 0), own)
    return sum(sorted(worst.values())[-2:])


def is_within_uncertainty(effect_ns: int, unsure_ns: int | None) -> bool:
    """Return whether an effect is smaller than the clock uncertainty, or that is unknown.

    Example::

        >>> is_within_uncertainty(5, 0), is_within_uncertainty(-5, 8)
        (False, True)
    """
    return unsure_ns is None or abs(effect_ns) < unsure_ns


def unsynchronized_clocks(spans: Spans) -> str:
    """Return which hosts' clocks were not synchronized; "" if all were, or for one host."""
    if uncertainty_ns(spans) is not None:
        return ""
    hosts = sorted({header.host for header in spans.headers.values()})
    if "" in hosts:
        return "the hosts of some ranks are unknown and clocks were not synchronized"
    more = f" and {len(hosts) - _FEW} more" if len(hosts) > _FEW else ""
    return f"clocks of hosts {', '.join(hosts[:_FEW])}{more} were not synchronized"


def uncertainty_note(spans: Spans, what: str) -> str:
    """Return the note with the ±u of numbers that compare all ranks, "" if that is 0.

    Args:
        spans: The run.
        what: The numbers, as the sentence starts.
    """
    unsure = uncertainty_ns(spans)
    if unsure is None:
        return f"{what}: may be off by milliseconds, because {unsynchronized_clocks(spans)}."
    return f"{what}: ±{unsure / 1e6:.3f} ms." if unsure else ""
