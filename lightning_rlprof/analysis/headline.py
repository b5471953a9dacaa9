"""What to see of a run first: one sentence and a few tables, of its stages or else its devices."""

import numpy as np

from lightning_rlprof.analysis.device.kernels import kernels
from lightning_rlprof.analysis.device.timeline import device_timeline
from lightning_rlprof.analysis.device.utilization import breakdown, device_headline, idle
from lightning_rlprof.analysis.device.work import device_work
from lightning_rlprof.analysis.efficiency.throughput import efficiency
from lightning_rlprof.analysis.stages.overviews import roles
from lightning_rlprof.analysis.stages.stage_times import stages, stages_headline
from lightning_rlprof.analysis.steps.step_selection import FEWEST
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table

_KERNELS = 10


def headline(spans: Spans) -> str:
    """Return which stage takes most of the step, what to check, and how much is untraced.

    Without any stage it is what the devices did, if that was recorded.
    """
    if len(spans.rows(kind="stage")):
        return stages_headline(spans)
    devices = device_headline(device_timeline(spans))
    steps = np.unique(spans.step[spans.rows(kind="step")])
    if devices and len(steps) < FEWEST:
        return devices
    return f"{devices} {stages_headline(spans)}".strip()


STAGE_TABLES = frozenset({"stages", "steps", "gaps", "slowest_ranks"})
"""Tables that say nothing of a run without stages."""


def is_device_trace(spans: Spans) -> bool:
    """Return whether a run is a profiler's trace without rlprof: device work and no stage."""
    ours = any(header.config for header in spans.headers.values())
    return not ours and not len(spans.rows(kind="stage")) and bool(device_work(spans).tables)


def lead_tables(spans: Spans) -> list[Table]:
    """Return the table of stages, that of roles if there are several, and that of efficiency.

    The last is `throughput` of the whole job, if MFU or the bandwidth of decoding is known. Of a
    device trace it is breakdown, largest kernels, and idle time.
    """
    if is_device_trace(spans):
        return [breakdown(spans), kernels(spans, top=_KERNELS), idle(spans)]
    several, rates = roles(spans), efficiency(spans)
    tables = [stages(spans)] if several.abstained is not None else [stages(spans), several]
    return tables if rates is None else [*tables, rates]
