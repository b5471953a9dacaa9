"""What a problem is: conditions that a run meets, what it costs, and its remedies."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from lightning_rlprof.analysis.diagnosis.evidence import Condition, Fact, Place

DOCS = "docs"
"""Where the documentation is: a folder of the repository, until it has a public address."""

GUIDE = f"{DOCS}/guides/tuning.md"
"""Page with an anchor for each remedy."""

_OF_SETTING = ("framework", "key", "change", "default")
_SETTING = re.compile(r"([\w-]+): (.+?) ([=↑↓])(?: (?!\(default )(.+?))?(?: \(default (.+)\))?")
_TURNS = {"↑": ("up", "raise it"), "↓": ("down", "lower it")}
# Several keys, of one framework or of different ones, can change the same setting.
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
}

PROBLEM_PAGE = f"{DOCS}/reference/problems.md"
"""Generated page with a section for each problem, whose anchor is the problem's id."""

Kind = Literal["ended", "distorts", "problem", "idea"]
"""What a problem does: it ended the run, it makes other times untrue, it costs time or quality, or
it is an idea of what might be saved."""
Saving = Literal["none", "tail", "balance", "straggler", "overlap", "removed"]
"""The replay on the same devices that predicts what a remedy saves."""


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
        return f"{GUIDE}#{self.id}"


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


def priced(share: float) -> str:
    """Return a price as text, with the decimal that shares have in tables.

    Example::

        >>> priced(0.10499), priced(0.004)
        ('10.5%', '0.4%')
    """
    return f"{share:.1%}"


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
    def percent(self) -> str:
        """The share as every screen rounds it."""
        return priced(self.share)

    @property
    def amount(self) -> str:
        """The price in words, without its interval."""
        return f"{self.kind} {self.percent} of the job"

    @property
    def text(self) -> str:
        """The price in words."""
        if self.low is None or self.high is None:
            return self.amount
        return f"{self.amount} (95% CI {priced(self.low)}–{priced(self.high)})"


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
