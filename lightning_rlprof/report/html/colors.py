"""A colour per stage: the same in every report, and one that colour-blind readers can tell."""

import zlib
from collections.abc import Iterable
from typing import NamedTuple

from lightning_rlprof.analysis.stages import UNTRACED_PART
from lightning_rlprof.report.html.step_charts import StepCharts
from lightning_rlprof.tables.spans import Spans


class Paint(NamedTuple):
    """A fill and the ink, black or white, that is readable on it."""

    fill: str
    ink: str


# Okabe and Ito's palette (jfly.uni-koeln.de/color): eight colours that stay apart under every
# common colour blindness. There are ten stages: kin share a hue and differ in lightness.
_KNOWN = {
    "actor_generate": "#56b4e9",
    "actor_compute_log_prob": "#009e73",
    "reference_compute_log_prob": "#7ed3b2",
    "actor_update": "#d55e00",
    "critic_compute_values": "#8f4a78",
    "critic_update": "#cc79a7",
    "compute_reward": "#f0e442",
    "compute_advantage": "#e69f00",
    "weight_sync": "#0072b2",
    "actor_image_embeds": "#a9d8f5",
}
# Paul Tol's "muted" scheme (personal.sron.nl/~pault), for stages of the user's own.
_OWN = ("#882255", "#44aa99", "#ddcc77", "#332288", "#999933", "#aa4499", "#88ccee", "#661100")


def paints(names: Iterable[str]) -> dict[str, Paint]:
    """Return a paint for every stage; unknown names get one by their spelling, not by their order.

    Example::

        >>> paints(["actor_update", "my_filter"])["actor_update"]
        Paint(fill='#d55e00', ink='#000000')
    """
    chosen: dict[str, Paint] = {}
    taken: set[str] = set()
    for name in sorted(names):
        fill = _KNOWN.get(name) or _own(name, taken)
        taken.add(fill)
        chosen[name] = Paint(fill, _ink(fill))
    return chosen


def stage_paints(spans: Spans, charts: StepCharts) -> dict[str, Paint]:
    """Return the paint of every stage of a run, and of its parts of a step; untraced has none."""
    names = {spans.names[code] for code in spans.name[spans.rows(kind="stage")].tolist()}
    return paints((names | {part.stage for part in charts.drawn}) - {UNTRACED_PART})


def _own(name: str, taken: set[str]) -> str:
    # crc32, since hash() differs from process to process.
    first = zlib.crc32(name.encode("utf-8", "replace"))
    turns = (_OWN[(first + turn) % len(_OWN)] for turn in range(len(_OWN)))
    return next((fill for fill in turns if fill not in taken), _OWN[first % len(_OWN)])


def _ink(fill: str) -> str:
    """Return black or white, whichever has the higher WCAG contrast on a fill."""
    channels = (int(fill[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.179 else "#ffffff"
