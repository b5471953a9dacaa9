"""What a rule of advice is: conditions on a run, settings to change, and what these may cost."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_rlprof.analysis.advice.evidence import Evidence

GIVEN, NOT_GIVEN, UNDECIDED = "given", "not given", "undecided"
"""Verdicts: all conditions are met, one is contradicted, or data lack."""

GUIDE = "docs/guides/tuning.md"
"""Page with a section for each rule, whose anchor is the rule's id."""

Kind = Literal["share", "ratio", "count", "number", "bytes", "yes/no"]
"""What a quantity is, for the texts of its value and limit."""

Framework = Literal[
    "verl", "MindSpeed-RL", "TRL", "vLLM", "Lightning", "PyTorch", "environment", "rlprof"
]
"""What a setting belongs to; ``environment`` are variables of the process."""


class Measured(NamedTuple):
    """A quantity of a run with its interval; an exact one has equal bounds.

    ``interval`` is what the bounds are: a confidence interval, or the range over steps.
    """

    value: float
    low: float
    high: float
    interval: str = "95% CI"


class NoData(NamedTuple):
    """Why a run does not show a quantity, and how to record it; both begin a sentence."""

    why: str
    how: str


Measurement = Measured | NoData


@dataclass(frozen=True)
class Quantity:
    """Something that a run shows as a number.

    Attributes:
        text: What it is, as in ``rollout, of the step time``.
        kind: How its values are written.
        measure: Returns it, or why the run does not show it.
        covers: Tells whether a span's name is part of it; None if it is not a time of spans.
    """

    text: str
    kind: Kind
    measure: Callable[[Evidence], Measurement]
    covers: Callable[[str], bool] | None = None

    def shown(self, value: float) -> str:
        """Return a value as text.

        Example::

            >>> from lightning_rlprof.analysis.advice.time_shares import ROLLOUT
            >>> ROLLOUT.shown(0.613), ROLLOUT.shown(0.004)
            ('61%', '0.4%')
        """
        if self.kind == "yes/no":
            return "yes" if value > 0.5 else "no"
        if self.kind == "share":
            return f"{value:.0%}" if value >= 0.0995 or not value else f"{value:.1%}"
        if self.kind == "bytes":
            return f"{value / 2**20:,.4g} MiB"
        if self.kind == "ratio":
            return f"{value:.2f}x"
        return f"{value:,.0f}" if self.kind == "count" and value >= 10 else f"{value:,.3g}"


@dataclass(frozen=True)
class Condition:
    """A quantity and its limit; met if the whole interval is above it, or below it."""

    quantity: Quantity
    limit: float
    below: bool = False

    def verdict(self, found: Measured) -> str:
        """Return whether the condition is met, contradicted or undecided, as a verdict.

        Example::

            >>> from lightning_rlprof.analysis.advice.time_shares import ROLLOUT
            >>> above = Condition(ROLLOUT, 0.5)
            >>> [above.verdict(Measured(0.5, low, high)) for low, high in
            ...  ((0.6, 0.7), (0.4, 0.6), (0.3, 0.5))]
            ['given', 'undecided', 'not given']
        """
        met, contradicted = found.low > self.limit, found.high <= self.limit
        if self.below:
            met, contradicted = found.high < self.limit, found.low >= self.limit
        return GIVEN if met else NOT_GIVEN if contradicted else UNDECIDED

    def measured(self, found: Measured) -> str:
        """Return the evidence in words: value, interval and limit."""
        quantity = self.quantity
        value, low, high = (quantity.shown(each) for each in found[:3])
        if quantity.kind == "yes/no":
            return f"{quantity.text}: {value}"
        interval = "" if low == high else f" ({found.interval} {low}–{high})"
        return f"{quantity.text}: {value}{interval}, limit {self.bound}"

    @property
    def bound(self) -> str:
        """The limit in words, as in ``above 50%``."""
        if self.quantity.kind == "yes/no":
            return "no" if self.below else "yes"
        return f"{'below' if self.below else 'above'} {self.quantity.shown(self.limit)}"


@dataclass(frozen=True)
class Setting:
    """What to change.

    Attributes:
        framework: Whose setting it is.
        knob: Its real name, such as ``GRPOConfig.vllm_gpu_memory_utilization``.
        change: The new value, or in which direction to change it.
        default: What it is unless it is set; empty if that is not known.
    """

    framework: Framework
    knob: str
    change: str
    default: str = ""

    @property
    def text(self) -> str:
        """The setting in one line."""
        default = f" (default {self.default})" if self.default else ""
        return f"{self.framework}: {self.knob}{default}: {self.change}"


Saving = Literal["tail", "balance", "overlap", "removed", "share", "none"]
"""How the saving of a rule is estimated, see `effects`."""


@dataclass(frozen=True)
class Rule:
    """One rule of advice.

    Attributes:
        id: Its name, of words with hyphens.
        title: What to do, in one line.
        conditions: All must be met. The first one is what the advice is about.
        settings: What to change, by framework.
        effect: What the change is expected to do.
        risk: What it may cost, or when not to do it.
        saving: How to estimate what it saves.
    """

    id: str
    title: str
    conditions: tuple[Condition, ...]
    settings: tuple[Setting, ...]
    effect: str
    risk: str
    saving: Saving = "none"

    @property
    def guide(self) -> str:
        """Where the guide explains it."""
        return f"{GUIDE}#{self.id}"


def above(quantity: Quantity, limit: float) -> Condition:
    """Return the condition that a quantity is above a limit."""
    return Condition(quantity, limit)


def below(quantity: Quantity, limit: float) -> Condition:
    """Return the condition that a quantity is below a limit."""
    return Condition(quantity, limit, below=True)


def holds(quantity: Quantity) -> Condition:
    """Return the condition that the answer to a yes/no quantity is yes."""
    return Condition(quantity, 0.5)


def fails(quantity: Quantity) -> Condition:
    """Return the condition that the answer to a yes/no quantity is no."""
    return Condition(quantity, 0.5, below=True)
