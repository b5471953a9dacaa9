"""Double of verl 0.9: what its workers call around their methods."""

from contextlib import nullcontext


class RLInsightLogger:
    @classmethod
    def trace_state(cls, state_name, *, state_lane_id=None, **labels):
        return nullcontext()
