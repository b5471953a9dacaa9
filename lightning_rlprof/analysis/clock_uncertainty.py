"""How far times of several ranks may be off against one another, by what their clocks told.

Few numbers compare clocks: a duration is of one rank's clock, and so is the difference of two. What
does says its ±u with `remark`; where it is smaller than that, it says nothing.
"""

from collections.abc import Iterable

from lightning_rlprof.tables.spans import Spans

BELOW = "within clock uncertainty"
"""What a row says of an effect that is smaller than the clocks are sure."""

_FEW = 5


def uncertainty_ns(spans: Spans, ranks: Iterable[int] | None = None) -> int | None:
    """Return the ±u of numbers that cross these ranks, None where it is not known.

    It is 0 on one host; on several the sum of the two hosts' that are least sure. An effect that
    is smaller says nothing.

    Args:
        spans: The run.
        ranks: Whose times are compared; unset, all ranks'.
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


def says_nothing(effect_ns: int, unsure_ns: int | None) -> bool:
    """Tell whether an effect is smaller than the clocks are sure, or these were never compared.

    Example::

        >>> says_nothing(5, 0), says_nothing(-5, 8), says_nothing(5, None)
        (False, True, True)
    """
    return unsure_ns is None or abs(effect_ns) < unsure_ns


def never_compared(spans: Spans, ranks: Iterable[int] | None = None) -> str:
    """Say whose clocks were never compared, nothing where all were, or where there is one.

    Example::

        >>> from lightning_rlprof.loaders.load import load
        >>> never_compared(load("run"))  # doctest: +SKIP
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


def remark(
    spans: Spans, what: str, effect_ns: int | None = None, ranks: Iterable[int] | None = None
) -> str:
    """Return the sentence with which a table tells the ±u of a number, "" where that is 0.

    Args:
        spans: The run.
        what: The number, as the sentence begins.
        effect_ns: Its size; a smaller one than ±u is said to be none.
        ranks: As for `uncertainty_ns`.
    """
    unsure = uncertainty_ns(spans, ranks)
    if unsure == 0:
        return ""
    if unsure is None:
        return f"{what}: may be off by milliseconds, because {never_compared(spans, ranks)}."
    below = effect_ns is not None and says_nothing(effect_ns, unsure)
    return f"{what}: ±{unsure / 1e6:.3f} ms{', larger than the value itself' if below else ''}."


def _clocks(spans: Spans) -> tuple[dict[object, object], dict[object, object]]:
    """Return by rank which clock it reads, and its uncertainty where that is told."""
    clocks: dict[object, object] = {rank: own.host for rank, own in spans.headers.items()}
    if "clocks" not in spans.tables or (table := spans.try_table("clocks", [])) is None:
        return clocks, {}
    columns = {column.name for column in table.columns}
    ranks = table.column("rank")
    if "clock" in columns:
        clocks |= dict(zip(ranks, table.column("clock"), strict=True))
    return clocks, dict(zip(ranks, table.column("uncertainty"), strict=True))
