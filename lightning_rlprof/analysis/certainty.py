"""How far times of several ranks may be off against one another, by what their clocks told."""

from collections.abc import Iterable

from lightning_rlprof.analysis.cells import read
from lightning_rlprof.spans import Spans

__all__ = ["uncertainty_ns"]


def uncertainty_ns(spans: Spans, ranks: Iterable[int] | None = None) -> int | None:
    """Return the ±u of numbers that cross these ranks, None where it is not known.

    It is 0 on one host; on several the sum of the two hosts' that are least sure. An effect that
    is smaller says nothing.

    Args:
        spans: The run.
        ranks: Whose times are compared; unset, all ranks'.
    """
    chosen = set(spans.headers if ranks is None else ranks)
    hosts = {rank: spans.headers[rank].host for rank in chosen}
    if len(set(hosts.values())) < 2:
        return 0
    if "clocks" not in spans.tables or (table := read(spans, "clocks", [])) is None:
        return None
    columns = (table.column("rank"), table.column("uncertainty"))
    told = dict(zip(*columns, strict=True))
    worst: dict[str, int] = {}
    for rank, host in hosts.items():
        unsure = told.get(rank)
        if not isinstance(unsure, int):
            return None
        worst[host] = max(worst.get(host, 0), unsure)
    return sum(sorted(worst.values())[-2:])
