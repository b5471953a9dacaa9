"""Memory that was freed: kept for what comes next, or given back to the machine."""

import ctypes

# Of glibc's malloc.h, and the largest that one of them takes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST, _NEVER = 1 << 25, (1 << 31) - 1


def give_back() -> None:
    """Give freed memory back to the machine, which takes a millisecond; nothing without glibc.

    glibc keeps what was freed between blocks that are still in use, and does not do so unasked.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def keep_freed() -> None:
    """Keep freed memory for what comes next, in a process of our own; nothing without glibc.

    Arrays of some megabytes otherwise come from the machine one by one, page after page: half of
    the page faults of an analysis of a large trace. `give_back` still does what it says.
    """
    if option := getattr(ctypes.CDLL(None), "mallopt", None):
        option(_MMAP_THRESHOLD, _LARGEST)
        option(_TRIM_THRESHOLD, _NEVER)
