"""Histograms as counters of a span: bins of a logarithmic scale, four per doubling.

`count(lengths=[...])` keeps how many values lie in each bin, so that a step takes a hundred bytes
whatever its batch.
"""

import math
import re

EXPERTS = "tokens_per_expert"
"""Counts of tokens by layer and expert: a histogram per layer, ``tokens_per_expert[3]``."""

_PER_DOUBLING = 4
_NAME = re.compile(r"(.+)\[(\d+)\]")


def bin_of(value: float) -> int:
    """Return the bin of a value: 0 below 1, and n from ``2 ** ((n - 1) / 4)`` on.

    Example::

        >>> [bin_of(value) for value in (0, 1, 2, 3, 1024)]
        [0, 1, 5, 7, 41]
    """
    return 0 if value < 1 else 1 + math.floor(_PER_DOUBLING * math.log2(value) + 1e-9)


def bin_start(number: int) -> float:
    """Return the least value of a bin.

    Example::

        >>> [round(bin_start(number), 2) for number in (0, 1, 2, 5)]
        [0.0, 1.0, 1.19, 2.0]
    """
    return 0.0 if number == 0 else float(2.0 ** ((number - 1) / _PER_DOUBLING))


def bin_name(name: str, number: int) -> str:
    """Return the counter of a bin."""
    return f"{name}[{number}]"


def bin_in_name(counter: str) -> tuple[str, int] | None:
    """Return the histogram and the bin that a counter is of, None if it is of none.

    Example::

        >>> bin_in_name("lengths[17]"), bin_in_name("tokens")
        (('lengths', 17), None)
    """
    found = _NAME.fullmatch(counter)
    return None if found is None else (found[1], int(found[2]))


def expert_name(layer: int, expert: int) -> str:
    """Return the counter of an expert's tokens.

    Example::

        >>> expert_name(3, 17), expert_in_name("tokens_per_expert[3][17]")
        ('tokens_per_expert[3][17]', (3, 17))
    """
    return bin_name(bin_name(EXPERTS, layer), expert)


def expert_in_name(counter: str) -> tuple[int, int] | None:
    """Return the layer and the expert whose tokens a counter counts, None if it does not."""
    found = bin_in_name(counter)
    layer = None if found is None else bin_in_name(found[0])
    return None if found is None or layer is None or layer[0] != EXPERTS else (layer[1], found[1])
