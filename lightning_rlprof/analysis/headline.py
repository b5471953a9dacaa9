"""One sentence on where the time goes: of stages if some are marked, else of devices."""

import numpy as np

from lightning_rlprof.analysis.device.timeline import device_timeline
from lightning_rlprof.analysis.device.utilization import device_headline
from lightning_rlprof.analysis.stages.stage_times import stages_headline
from lightning_rlprof.analysis.step_selection import FEWEST
from lightning_rlprof.tables.spans import Spans


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
