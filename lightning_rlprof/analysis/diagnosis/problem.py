"""What a problem is: a quantity of a run beyond its limit, what it costs, and its remedies."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from lightning_rlprof.analysis.diagnosis.evidence import Evidence

MET, NOT_MET, UNDECIDED = "met", "not met", "undecided"
"""What a condition is: its whole interval is beyond the limit, on the other side, or neither."""

HIGH, MEDIUM = "high", "medium"
"""Confidence of a finding."""

DOCS = "docs"
"""Where the documentation is: a folder of the repository, until it has a public address."""

GUIDE = f"{DOCS}/guides/tuning.md"
"""Page with a section for each remedy, whose anchor is that of its symptom."""

_SECTIONS = {
    "smaller-micro-batch": "out-of-memory",
    "own-threads": "cpu-contention",
    "fewer-workers": "cpu-contention",
    "other-programs": "cpu-contention",
    "cpu-quota-limit": "cpu-limit",
    "swap-ranks": "thermal-throttling",
    "cut-tail": "rollout-tail",
    "longer-responses": "clipped-responses",
    "discard-less": "discarded-samples",
    "less-staleness": "stale-samples",
    "prefetch": "data-workers",
    "sync-less-often": "weight-sync-overlap",
    "weight-sync-backend": "weight-sync-overlap",
    "no-synchronization": "host-bound-update",
    "more-host-memory": "memory-pressure",
    "fewer-workers-for-memory": "memory-pressure",
    "faster-disk": "disk-wait",
    "collect-together": "garbage-collection",
}  # of the guide, for remedies that are explained with a symptom of another name

_OF_SETTING = ("framework", "key", "change", "default")  # in JSON
_SETTING = re.compile(r"([\w-]+): (.+?) ([=↑↓])(?: (?!\(default )(.+?))?(?: \(default (.+)\))?")
_TURNS = {"↑": ("up", "raise it"), "↓": ("down", "lower it")}
_KNOBS = {
    "GRPOConfig.per_device_train_batch_size": "micro-batch",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "micro-batch",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "micro-batch",
    "DataLoader(num_workers=)": "loader workers",
    "GRPOConfig.dataloader_num_workers": "loader workers",
    "data.dataloader_num_workers": "loader workers",
    "megatron_training.num_workers": "loader workers",
    "AsyncGRPOConfig.max_staleness": "staleness",
    "async_training.staleness_threshold": "staleness",
}  # keys of several frameworks, or of one, that turn the same

PROBLEM_PAGE = f"{DOCS}/reference/problems.md"
"""Generated page with a section for each problem, whose anchor is the problem's id."""

Kind = Literal["ended", "distorts", "problem", "idea"]
"""What a problem does: it ended the run, it makes other times untrue, it costs time or quality, or
it is an idea of what might be saved."""

Unit = Literal["share", "ratio", "count", "number", "bytes", "yes/no", "ms", "text"]
"""How a value is written."""


def shown(value: float, unit: Unit) -> str:
    """Return a value as text.

    Example::

        >>> shown(0.613, "share"), shown(0.004, "share"), shown(1.52, "ratio")
        ('61%', '0.4%', '1.52x')
    """
    if unit == "yes/no":
        return "yes" if value > 0.5 else "no"
    if unit == "share":
        return f"{value:.0%}" if abs(value) >= 0.0995 or not value else f"{value:.1%}"
    if unit == "bytes":
        return f"{value / 2**20:,.4g} MiB"
    if unit == "ratio":
        return f"{value:.2f}x"
    if unit == "ms":
        return f"{value:,.3g} ms"
    return (
        f"{value:,.0f}" if unit == "count" and (value >= 10 or not value % 1) else f"{value:,.3g}"
    )


class Fact(NamedTuple):
    """One thing that was measured, by name; ``low`` and ``high`` are its interval, if it has one.

    Example::

        >>> Fact("rank", 3).text, Fact("growth per step", 2**20, "bytes").text
        ('rank 3', 'growth per step 1 MiB')
    """

    name: str
    value: str | int | float
    unit: Unit = "count"
    low: float | None = None
    high: float | None = None

    @property
    def amount(self) -> str:
        """The value as text."""
        return self.value if isinstance(self.value, str) else shown(self.value, self.unit)

    @property
    def text(self) -> str:
        """The fact in words."""
        interval = ""
        if self.low is not None and self.high is not None:
            interval = f" (95% CI {shown(self.low, self.unit)}–{shown(self.high, self.unit)})"
        if self.name.startswith("of ") and self.unit == "share":
            return f"{self.amount} {self.name}{interval}"
        return f"{self.name} {self.amount}{interval}"


class Place(NamedTuple):
    """Where in the run to look: rank, step, and times on the run's timeline.

    ``step`` is None outside steps. ``from_ns`` and ``to_ns`` are None if no times are known.
    """

    rank: int
    step: int | None
    from_ns: int | None
    to_ns: int | None


@dataclass(frozen=True)
class Measured:
    """A quantity of a run with its interval; an exact one has equal bounds.

    Attributes:
        value: The quantity.
        low: Lower bound.
        high: Upper bound.
        lost_ns: Time of the job that it is, ranks summed; None if it is not a time.
        bounds_ns: The same at the bounds, if it was taken from captured steps.
        facts: What else is known of it.
        query: The SELECT that returns the events measured.
        place: Where the first of them is.
        confidence: Of a finding, if the interval does not decide it.
    """

    value: float
    low: float
    high: float
    lost_ns: float | None = None
    bounds_ns: tuple[float, float] | None = None
    facts: tuple[Fact, ...] = ()
    query: str = ""
    place: Place | None = None
    confidence: str = ""


class NoData(Exception):  # noqa: N818 -- it is an answer
    """Why a run does not show a quantity, and how to record it; both begin a sentence."""

    def __init__(self, why: str, how: str = "") -> None:
        super().__init__(why)
        self.why, self.how = why, how

    @classmethod
    def unless(cls, found: int, fewest: int, what: str, how: str = "Record more steps") -> None:
        """Raise it if there is too little of something.

        Example::

            >>> NoData.unless(3, 5, "complete steps")
            Traceback (most recent call last):
            lightning_rlprof.analysis.diagnosis.problem.NoData: 3 complete steps; 5 are needed
        """
        if found < fewest:
            raise cls(f"{found} {what}; {fewest} are needed", how)


Measurement = Measured | tuple[Measured, ...]
"""What a quantity is; several of it if it may be beyond the limit at several places."""


@dataclass(frozen=True)
class Quantity:
    """Something that a run shows as a number; compared with a limit, it is a `Condition`.

    Attributes:
        text: What it is, as in ``rollout, of the job``.
        unit: How its values are written.
        measure: Returns it; raises `NoData` if the run does not show it.

    Example::

        >>> share = Quantity("rollout", "share", lambda run: exact(0.6))
        >>> (share > 0.5).bound, (share < 0.5).bound
        ('above 50%', 'below 50%')
    """

    text: str
    unit: Unit
    measure: Callable[["Evidence"], Measurement]

    def __gt__(self, limit: float) -> "Condition":
        """Return the condition that it is above a limit."""
        return Condition(self, limit)

    def __lt__(self, limit: float) -> "Condition":
        """Return the condition that it is below a limit."""
        return Condition(self, limit, below=True)

    @property
    def yes(self) -> "Condition":
        """The condition that the answer to a yes/no quantity is yes."""
        return self > 0.5

    @property
    def no(self) -> "Condition":
        """The condition that it is no."""
        return self < 0.5


def exact(value: float, **more: Any) -> Measured:
    """Return a quantity that has no interval; ``more`` are further fields of `Measured`."""
    return Measured(value, value, value, **more)


@dataclass(frozen=True)
class Condition:
    """A quantity and its limit; met if the whole interval is above it, or below it."""

    quantity: Quantity
    limit: float
    below: bool = False

    def state(self, found: Measured) -> str:
        """Return whether the condition is met, contradicted or undecided.

        Example::

            >>> limit = Quantity("", "share", exact) > 0.5
            >>> [limit.state(Measured(0.5, low, high)) for low, high in
            ...  ((0.6, 0.7), (0.4, 0.6), (0.3, 0.5))]
            ['met', 'undecided', 'not met']
        """
        met, contradicted = found.low > self.limit, found.high <= self.limit
        if self.below:
            met, contradicted = found.high < self.limit, found.low >= self.limit
        return MET if met else NOT_MET if contradicted else UNDECIDED

    def confidence(self, found: Measured) -> str:
        """Return how sure a met condition is: high if the interval is far beyond the limit."""
        if found.confidence or self.quantity.unit != "share":
            return found.confidence or HIGH
        limit = self.limit
        clearly = (
            found.high < limit / 2 if self.below else found.low > min(2 * limit, (1 + limit) / 2)
        )
        return HIGH if clearly else MEDIUM

    @property
    def bound(self) -> str:
        """The limit in words, as in ``above 50%``."""
        if self.quantity.unit == "yes/no":
            return "no" if self.below else "yes"
        return f"{'below' if self.below else 'above'} {shown(self.limit, self.quantity.unit)}"


@dataclass(frozen=True)
class Setting:
    """What to change.

    Attributes:
        framework: Whose setting it is; ``environment`` are variables of the process and its
            machine.
        key: Its real name, such as ``GRPOConfig.vllm_gpu_memory_utilization``.
        change: The new value, or in which direction to change it.
        turn: ``up``, ``down``, or the value: two settings of one knob contradict if it differs.
        default: What it is unless it is set; empty if that is not known.
    """

    framework: str
    key: str
    change: str
    turn: str
    default: str = ""

    @classmethod
    def parse(cls, line: str) -> "Setting":
        """Return a setting that is written as one line: what to raise, lower, or set to a value.

        Example::

            >>> Setting.parse("verl: trainer.save_freq ↑ (default -1)").text
            'verl: trainer.save_freq (default -1): raise it'
            >>> Setting.parse("TRL: GRPOConfig.bf16 = True").turn
            'True'
        """
        match = _SETTING.fullmatch(line)
        if match is None:
            raise ValueError(f"not a setting: {line!r}")
        framework, key, sign, change, default = match.groups(default="")
        turn, unless_said = _TURNS.get(sign, (change, ""))
        return cls(framework, key, change or unless_said, turn, default)

    @property
    def turns(self) -> str:
        """What it turns: several keys may turn the same."""
        return _KNOBS.get(self.key) or f"{self.framework} {self.key}"

    @property
    def text(self) -> str:
        """The setting in one line."""
        default = f" (default {self.default})" if self.default else ""
        return f"{self.framework}: {self.key}{default}: {self.change}"


Saving = Literal["none", "tail", "balance", "straggler", "overlap", "removed"]
"""The replay on the same devices that predicts what a remedy saves."""


@dataclass(frozen=True)
class Remedy:
    """What to change about a problem.

    Attributes:
        id: Its name, which is an anchor of the guide.
        title: What to do, in one line.
        settings: What to change, by framework.
        risk: What it may cost, or when not to do it.
        when: Further conditions; all must be met.
        saving: The replay that predicts what it saves.
    """

    id: str
    title: str
    settings: tuple[Setting, ...]
    risk: str
    when: tuple[Condition, ...] = ()
    saving: Saving = "none"

    @property
    def guide(self) -> str:
        """The address of the section that explains it."""
        return f"{GUIDE}#{_SECTIONS.get(self.id, self.id)}"


@dataclass(frozen=True)
class Problem:
    """One entry of the registry.

    Attributes:
        id: Its name, of words with hyphens.
        kind: What it does to the run.
        title: What is wrong; values of a run are facts beside it.
        when: All must be met. The first one is what the problem is about.
        act: What to do first, in a sentence or two.
        ruled_out_if: Observation that disproves it.
        look: The command that shows more; RUN stands for the run.
        lead: Names of the facts that a heading shows behind the title.
        remedies: What to change.
    """

    id: str
    kind: Kind
    title: str
    when: tuple[Condition, ...]
    act: str
    ruled_out_if: str
    look: str
    lead: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = ()

    @property
    def guide(self) -> str:
        """The address of the page that explains it."""
        return f"{PROBLEM_PAGE}#{self.id}"


def remedy(
    name: str, risk: str, *settings: str, when: tuple[Condition, ...] = (), saving: Saving = "none"
) -> Remedy:
    """Return a remedy as the registry writes it.

    Args:
        name: Its id and title: ``cut-tail: Do not wait for the last responses``.
        risk: What it may cost, or when not to do it.
        settings: What to change, each as `Setting.parse` reads it.
        when: Further conditions.
        saving: The replay that predicts what it saves.
    """
    own, title = name.split(": ", 1)
    return Remedy(own, title, tuple(map(Setting.parse, settings)), risk, when, saving)


def problem(
    name: str,
    when: tuple[Condition, ...],
    act: str,
    ruled_out_if: str,
    look: str,
    *remedies: Remedy,
    lead: tuple[str, ...] = (),
    kind: Kind = "problem",
) -> Problem:
    """Return a problem as the registry writes it; ``name`` is its id and title."""
    own, title = name.split(": ", 1)
    return Problem(own, kind, title, when, act, ruled_out_if, look, lead, remedies)


ended, distorts, idea = (partial(problem, kind=kind) for kind in ("ended", "distorts", "idea"))
"""As `problem`, of another kind."""


@dataclass(frozen=True)
class Price:
    """What a problem costs, or what a remedy would save; always of the job's time.

    Attributes:
        kind: ``lost``, time that the job spent on it; ``saves``, what a replay of recorded steps
            predicts.
        share: Of the job's time.
        ns: The same in nanoseconds, ranks summed.
        low: Lower bound of the share, of what is predicted or taken from captured steps.
        high: Upper bound of the share.
    """

    kind: Literal["lost", "saves"]
    share: float
    ns: int
    low: float | None = None
    high: float | None = None

    @property
    def text(self) -> str:
        """The price in words."""
        interval = ""
        if self.low is not None and self.high is not None:
            interval = f" (95% CI {shown(self.low, 'share')}–{shown(self.high, 'share')})"
        return f"{self.kind} {shown(self.share, 'share')} of the job{interval}"


@dataclass(frozen=True)
class Offer:
    """A remedy for a run: the settings of its framework, and what they save."""

    remedy: Remedy
    settings: tuple[Setting, ...]
    saves: Price | None = None

    @property
    def gain(self) -> str:
        """What it saves, in words; empty if that is not known."""
        return "" if self.saves is None else f"{self.saves.text}, by a replay"


@dataclass(frozen=True)
class Finding:
    """A problem or an idea that a run shows.

    Attributes:
        problem: The entry of the registry.
        facts: What was measured.
        price: What it costs; None for ideas, and if it costs none.
        confidence: `HIGH` or `MEDIUM`.
        act: What to do first.
        look: The command that shows more.
        query: The SELECT that returns the events behind it; empty without any.
        place: Where the first of them is.
        weight: Time of the job that it is about, for the order.
        remedies: What to change, by what it saves.
    """

    problem: Problem
    facts: tuple[Fact, ...]
    price: Price | None
    confidence: str
    act: str
    look: str
    query: str
    place: Place | None
    weight: float
    remedies: tuple[Offer, ...] = ()

    @property
    def id(self) -> str:
        """Of the problem."""
        return self.problem.id

    @property
    def title(self) -> str:
        """What is wrong, without values."""
        return self.problem.title

    @property
    def kind(self) -> Kind:
        """What the problem does to the run."""
        return self.problem.kind

    @property
    def heading(self) -> str:
        """The title with the values of this run, for one line."""
        known = self.by_name
        own = [known[name] for name in self.problem.lead if name in known]
        texts = [each.amount if each.unit in ("text", "ratio") else each.text for each in own]
        return f"{self.title} ({', '.join(texts)})" if texts else self.title

    @property
    def by_name(self) -> Mapping[str, Fact]:
        """The facts by name."""
        return {each.name: each for each in self.facts}

    @property
    def evidence(self) -> str:
        """What was measured, in words."""
        return "; ".join(each.text for each in self.facts)

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain data for JSON."""
        return {
            "id": self.id,
            "kind": self.kind,
            "title": self.title,
            "price": None if self.price is None else vars(self.price),
            "confidence": self.confidence,
            "facts": [each._asdict() for each in self.facts],
            "act": self.act,
            "ruled_out_if": self.problem.ruled_out_if,
            "look": self.look,
            "query": self.query,
            "place": None if self.place is None else self.place._asdict(),
            "remedies": [
                {
                    "id": each.remedy.id,
                    "title": each.remedy.title,
                    "settings": [
                        {name: getattr(setting, name) for name in _OF_SETTING}
                        for setting in each.settings
                    ],
                    "saves": None if each.saves is None else vars(each.saves),
                    "risk": each.remedy.risk,
                    "guide": each.remedy.guide,
                }
                for each in self.remedies
            ],
        }


class Undecided(NamedTuple):
    """A problem or remedy that could not be decided, why, and what to record."""

    id: str
    title: str
    why: str
    how: str
