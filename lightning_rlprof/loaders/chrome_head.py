"""What stands before the events of a Chrome trace, which are not read."""

from pathlib import Path
from typing import Any

import msgspec

from lightning_rlprof.loaders.chrome_bytes import Source
from lightning_rlprof.loaders.chrome_stream import ChromeStream

__all__ = ["read_head"]

# What stands before the events grows with the process groups: 17 kB for 300 ranks.
_SIZE, _NEAR = 1 << 16, 1 << 23


def read_head(path: Path) -> ChromeStream[Any]:
    """Read up to the first event: ``top`` has what stands there, ``events`` whether it is a trace.

    Raises:
        TraceError: See `Source`.
    """
    with Source(path) as source:
        stream = ChromeStream(source, msgspec.json.Decoder(list[Any]), _SIZE, _NEAR)
        stream.open()
    return stream
