"""Shadow steps: steps of which only the length is recorded, to measure what recording costs."""

SHADOW = "shadow"
"""Counter that marks such a step."""

STEP_END = "step_end_ns"
"""Counter of a step: how much of its start rlprof spent on the end of the step before it."""

_MASK = (1 << 64) - 1


def pair_of(step: int) -> int:
    """Return the pair of a step: steps 1 and 2 are pair 1, steps 3 and 4 pair 2."""
    return (step + 1) // 2


def is_shadow(step: int) -> bool:
    """Return whether a step is the shadow step of its pair, on every rank alike.

    Which of the two it is follows from a hash of the pair, the last part of SplitMix64. So nothing
    periodic in the training falls on one kind of step.

    Example::

        >>> [step for step in range(1, 13) if is_shadow(step)]
        [1, 4, 5, 8, 9, 12]
    """
    mixed = pair_of(step) * 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return (mixed ^ mixed >> 31) & 1 == step & 1
