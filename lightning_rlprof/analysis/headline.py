"""One honest sentence about a run: which stage is most of the step, and where to look."""

from lightning_rlprof.analysis.counted import FEWEST, counted
from lightning_rlprof.analysis.stages import stages
from lightning_rlprof.spans import Spans

__all__ = ["headline"]

_DOMINANT = 0.4
_ADVICE = {
    "actor_generate": "look at the rollout first: KV cache, batching, the rollout engine",
    "actor_update": "look at the update first: micro-batch size, precision, recomputation",
    "critic_update": "look at the critic's update first: micro-batch size, precision",
    "actor_compute_log_prob": "look at the log-prob pass first: micro-batch size",
    "reference_compute_log_prob": "look at the reference pass first: micro-batch size",
    "compute_reward": "look at the reward first: does it run one sample at a time?",
    "weight_sync": "look at the weight transfer first: bucket size, copies through the host",
}


def headline(spans: Spans) -> str:
    """Say which stage dominates the step, with its share, and how much is untraced.

    Advice is a place to look, given only where one stage has 40 % or more of the time. With fewer
    than three steps the sentence says that they are too few.
    """
    rows = spans.rows(kind="step")
    steps = counted(spans, rows).steps
    if steps < FEWEST:
        return f"Too few complete steps to say where the time goes: {steps}, of {FEWEST} needed."
    table = stages(spans)
    shares = dict(zip(table.column("stage"), table.column("share"), strict=True))
    untraced = float(shares.pop("untraced") or 0.0)
    if not shares:
        return f"No stage was marked in {steps} steps; mark them with stage(...) or wrap:."
    name = str(next(iter(shares)))
    share = float(shares[name] or 0.0)
    rest = f"{untraced:.0%} is in no stage" if untraced >= 0.005 else "almost all is in a stage"
    if untraced > share:
        most = "Most of the step is unknown" if untraced > 0.5 else "The largest part is unknown"
        return f"{most}: {rest}; the largest stage is {name}, {share:.0%}."
    if share < _DOMINANT:
        return f"No stage dominates: the largest is {name}, {share:.0%} of the step; {rest}."
    advice = _ADVICE.get(name, f"look at {name} first")
    return f"{name} is {share:.0%} of the step; {advice}. {rest.capitalize()}."
