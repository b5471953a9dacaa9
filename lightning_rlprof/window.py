"""Decide when a capture opens and closes: a pure function of configuration, rank, step and stage.

A capture covers a window. Either whole steps (consecutive wanted steps may share one window), or,
when stages were chosen or ``discrete`` is on, one window per wanted stage and step.
"""

from typing import Literal

from lightning_rlprof.config.profiler import ProfilerConfig

__all__ = ["after_step", "arms_stages", "at_stage", "at_step", "window_name"]

Action = Literal["open", "close", "keep"]


def at_step(config: ProfilerConfig, rank: int, step: int, *, is_open: bool) -> Action:
    """Tell what the beginning of a step does to the capture of whole steps."""
    wanted = _wants(config, rank, step) and not config.per_stage
    if is_open == wanted:
        return "keep"
    return "open" if wanted else "close"


def after_step(config: ProfilerConfig, rank: int, step: int, *, is_open: bool) -> Action:
    """Tell what the end of a step does: windows end with their last wanted step."""
    goes_on = config.joins_steps and not config.per_stage and _wants(config, rank, step + 1)
    return "close" if is_open and not goes_on else "keep"


def arms_stages(config: ProfilerConfig, rank: int, step: int) -> bool:
    """Tell whether a stage that begins in this step may open a capture."""
    return config.per_stage and _wants(config, rank, step)


def at_stage(config: ProfilerConfig, rank: int, step: int, stage: str, *, is_open: bool) -> Action:
    """Tell whether a stage's beginning opens a capture; inside an open one it never does."""
    wanted = arms_stages(config, rank, step) and config.wants_stage(stage) and not is_open
    return "open" if wanted else "keep"


def window_name(step: int, stage: str | None, number: int) -> str:
    """Return the name of a window's folder; the second window of one stage and step ends in ``-2``.

    Example::

        >>> window_name(3, "actor_update", 1), window_name(3, None, 2)
        ('step-000003-actor_update', 'step-000003-2')
    """
    safe = "".join(c if c.isalnum() or c in "._+=" else "_" for c in stage or "")
    parts = [f"step-{step:06d}", safe, str(number) if number > 1 else ""]
    return "-".join(part for part in parts if part)


def _wants(config: ProfilerConfig, rank: int, step: int) -> bool:
    return config.captures and config.wants_rank(rank) and config.wants_step(step)
