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
    clocks, told = _clocks(spans)
    worst: dict[object, int] = {}
    if len({clocks.get(rank) for rank in chosen}) < 2:
        return 0
    for rank in chosen:
        unsure = told.get(rank)
        if not isinstance(unsure, int):
            return None
        worst[clocks[rank]] = max(worst.get(clocks[rank], 0), unsure)
    return sum(sorted(worst.values())[-2:])


def is_within_uncertainty(effect_ns: int, unsure_ns: int | None) -> bool:
    """Return whether an effect is smaller than the clock uncertainty, or that is unknown.

    Example::

        >>> is_within_uncertainty(5, 0), is_within_uncertainty(-5, 8)
        (False, True)
    """
    return unsure_ns is None or abs(effect_ns) < unsure_ns


def unsynchronized_clocks(spans: Spans, ranks: Iterable[int] | None = None) -> str:
    """Return which hosts' clocks were not synchronized; "" if all were, or for one host.

    Example::

        >>> from lightning_rlprof.loaders.load import load
        >>> unsynchronized_clocks(load("run"))  # doctest: +SKIP
        'clocks of hosts a, b were not synchronized'
    """
    if uncertainty_ns(spans, ranks) is not None:
        return ""
    chosen = set(spans.headers if ranks is None else ranks)
    hosts = sorted({spans.headers[rank].host for rank in chosen})
    if "" in hosts:
        return "the hosts of some ranks are unknown and clocks were not synchronized"
    more = f" and {len(hosts) - _FEW} more" if len(hosts) > _FEW else ""
    return f"clocks of hosts {', '.join(hosts[:_FEW])}{more} were not synchronized"


def uncertainty_note(
    spans: Spans, what: str, effect_ns: int | None = None, ranks: Iterable[int] | None = None
) -> str:
    """Return the note with the ±u of a number, "" if that is 0.

    Args:
        spans: The run.
        what: The number, as the sentence starts.
        effect_ns: Its size, to note that it is smaller than ±u.
        ranks: As for `uncertainty_ns`.
    """
    unsure = uncertainty_ns(spans, ranks)
    if unsure == 0:
        return ""
    if unsure is None:
        return f"{what}: may be off by milliseconds, because {unsynchronized_clocks(spans, ranks)}."
    below = effect_ns is not None and is_within_uncertainty(effect_ns, unsure)
    return f"{what}: ±{unsure / 1e6:.3f} ms{', larger than the value itself' if below else ''}."


def _clocks(spans: Spans) -> tuple[dict[object, object], dict[object, object]]:
    """Return each rank's clock, and its uncertainty if that is known."""
    clocks: dict[object, object] = {rank: own.host for rank, own in spans.headers.items()}
    if "clocks" not in spans.tables or (table := spans.try_table("clocks", [])) is None:
        return clocks, {}
    columns = {column.name for column in table.columns}
    ranks = table.column("rank")
    if "clock" in columns:
        clocks |= dict(zip(ranks, table.column("clock"), strict=True))
    return clocks, dict(zip(ranks, table.column("uncertainty"), strict=True))
