"""Bytes per second between devices, by their data sheets."""

import re
from typing import NamedTuple

from lightning_rlprof.analysis.efficiency.peak_flops import Peak

NODE = 8
"""Devices of a node, which share its host and the adapters to other nodes."""

_FAR = 50e9  # Of a device to other nodes: an adapter of 400 Gb/s.


class _Link(NamedTuple):
    """Bytes per second of a device one way, half of what a data sheet sums.

    Attributes:
        near: To all devices within reach.
        reach: Devices that are linked in this way.
        mesh: Each pair has a link of its own, so that few devices use a part of it.
    """

    near: float
    reach: int = NODE
    mesh: bool = False


_LINKS = (  # By label; the first that is found counts.
    # GeForce cards cannot reach each other: all that they send passes the host's memory.
    (r"RTX[34]090", _Link(16e9)),
    (r"RTX5090", _Link(32e9)),
    (r"RTXPRO6000|H[18]00-PCIe", _Link(64e9)),  # PCIe 5
    (r"PCIe|RTX|L4|L20|A10-|A40|A6000|T4|GB10|V100S", _Link(32e9)),  # PCIe 4
    (r"V100", _Link(150e9)),
    (r"A100|NVL", _Link(300e9)),
    (r"A800|H800", _Link(200e9)),
    (r"GB[23]00", _Link(900e9, 72)),
    (r"B[23]00", _Link(900e9)),
    (r"910B", _Link(196e9, mesh=True)),
    (r"910C", _Link(196e9, 16)),
    (r"MI3[02]", _Link(448e9, mesh=True)),
    (r"MI3", _Link(537e9, mesh=True)),
    (r"", _Link(450e9)),
)
_PATTERNS = tuple((re.compile(name, re.IGNORECASE), link) for name, link in _LINKS)


def _link(device: Peak) -> _Link:
    return next(link for pattern, link in _PATTERNS if pattern.search(device.label))


def is_near(device: Peak, group: int) -> bool:
    """Return whether the fast links of a device reach all others of a group."""
    return group <= _link(device).reach


def gathering(device: Peak, group: int) -> float:
    """Return bytes/s at which a device of a group gets what the others have, or they reduce it.

    Between nodes, each gets it once, over the adapters of all its devices.

    Example::

        >>> from lightning_rlprof.analysis.efficiency.peak_flops import device_labeled
        >>> gathering(device_labeled("H100-80G"), 8), gathering(device_labeled("H100-80G"), 64)
        (450000000000.0, 400000000000.0)
        >>> gathering(device_labeled("910B2"), 2)  # One of seven links.
        28000000000.0
    """
    near, _, mesh = _link(device)
    if not is_near(device, group):
        return min(near, _FAR * NODE)
    return near * (group - 1) / (NODE - 1) if mesh and group > 1 else near


def exchanging(device: Peak, group: int) -> float:
    """Return bytes/s at which a device sends each other one of a group something else.

    Example::

        >>> from lightning_rlprof.analysis.efficiency.peak_flops import device_labeled
        >>> exchanging(device_labeled("H100-80G"), 8), exchanging(device_labeled("H100-80G"), 64)
        (450000000000.0, 50000000000.0)
    """
    return gathering(device, group) if is_near(device, group) else min(_FAR, _link(device).near)
