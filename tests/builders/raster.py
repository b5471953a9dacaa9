"""The ledger the slow way: every nanosecond of every rank of a small run is labelled by itself."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from lightning_rlprof.analysis.steps.step_selection import warm_up
from lightning_rlprof.analysis.steps.time_categories import NO_CATEGORY, Category, category_of
from lightning_rlprof.records.records import Span
from lightning_rlprof.tables.spans import Spans

WHOLE = {Category.WEIGHT_SYNC, Category.REWARD, Category.EVALUATION}
UNKNOWN = {Category.COMPUTE, Category.CUSTOM, Category.UNTRACED}
LAUNCHING = {Category.ROLLOUT, Category.ROLLOUT_TAIL, Category.OFFLOAD, *WHOLE}
Key = tuple[int, int | None, Category]


class Kernel(NamedTuple):
    """A row of the table of kernels, or of copies."""

    rank: int
    name: str
    start_ns: int
    end_ns: int
    stage: str | None = None
    step: int | None = None


class Run(NamedTuple):
    """What a device ran."""

    rank: int
    start_ns: int
    end_ns: int
    label: Category


class Item(NamedTuple):
    """A collective on one rank."""

    rank: int
    number: int
    step: int
    name: str
    start_ns: int
    end_ns: int


def raster(
    spans: Spans,
    world: Sequence[int],
    kernels: Sequence[Kernel] = (),
    copies: Sequence[Kernel] = (),
) -> Counter[Key]:
    """Return nanoseconds by rank, step (None outside) and label."""
    every = list(spans)
    start = min(span.start_ns for span in every)
    end = max(span.end_ns for span in every)
    joined = began(
        [
            Item(span.rank, span.id, span.step, span.name, span.start_ns, span.end_ns)
            for span in every
            if span.kind in ("stage", "region") and category_of(span.name) == Category.COMMUNICATION
        ]
    )
    runs, found = device_of(kernels, copies), Counter[Key]()
    warm = warm_up(spans).tolist()
    for rank in world:
        own = [span for span in every if span.rank == rank]
        lived = Rank(own, joined, [run for run in runs if run.rank == rank])
        for now in range(start, end):
            step = step_at(every, own, now)
            label = Category.WARM_UP if step in warm else lived.label_at(now)
            if label == Category.UNTRACED and not lived.in_step(now):
                label = Category.OUTSIDE_STEPS
            found[rank, step, label] += 1
    return found


class Rank:
    """One rank's spans, with the label and the ancestors of each."""

    def __init__(
        self, own: list[Span], joined: dict[tuple[int, int], int], runs: list[Run]
    ) -> None:
        self.by_id = {span.id: span for span in own}
        self.steps = [span for span in own if span.kind == "step"]
        self.spans = [span for span in own if span.kind in ("stage", "region")]
        self.label = {span.id: self.category_of(span) for span in self.spans}
        self.joined, self.runs = joined, runs
        self.requests = [
            span
            for span in self.spans
            if self.label[span.id] == Category.ROLLOUT
            and not any(
                self.label[each.id] == Category.ROLLOUT and span in self.categorized_above(each)[:1]
                for each in self.spans
            )
        ]
        self.windows = windows_of(own, runs)

    def in_step(self, now: int) -> bool:
        return any(span.start_ns <= now < span.end_ns for span in self.steps)

    def above(self, span: Span) -> list[Span]:
        """Return the spans around one, the nearest first."""
        found = []
        while span.parent is not None and span.parent in self.by_id:
            span = self.by_id[span.parent]
            found.append(span)
        return found

    def categorized_above(self, span: Span) -> list[Span]:
        return [
            each for each in self.above(span) if self.label.get(each.id, NO_CATEGORY) != NO_CATEGORY
        ]

    def category_of(self, span: Span) -> int:
        chain = [span, *(each for each in self.above(span) if each.kind in ("stage", "region"))]
        names = [category_of(each.name) for each in chain]
        whole = [name for name in names[1:] if name in WHOLE]
        if whole:
            return whole[-1]
        known = [name for name in names if name != NO_CATEGORY]
        if known:
            return known[0]
        return Category.CUSTOM if span.kind == "stage" else NO_CATEGORY

    def label_at(self, now: int) -> Category:
        host = self.host_at(now)
        running = [run.label for run in self.runs if run.start_ns <= now < run.end_ns]
        if host == Category.EVALUATION:
            return host
        if running:
            host = min(running)
        elif host in UNKNOWN and any(start <= now < end for start, end in self.windows):
            return Category.UNATTRIBUTED_IDLE  # no launch is recorded
        return Category.ROLLOUT_TAIL if host == Category.ROLLOUT and self.in_tail(now) else host

    def host_at(self, now: int) -> Category:
        up = [
            span
            for span in self.spans
            if span.start_ns <= now < span.end_ns and self.label[span.id] != NO_CATEGORY
        ]
        hidden = {each.id for span in up for each in self.categorized_above(span)}
        labels = [self.collective_at(span, now) for span in up if span.id not in hidden]
        return Category(min(labels, default=Category.UNTRACED))

    def collective_at(self, span: Span, now: int) -> int:
        label = self.label[span.id]
        waits = now < self.joined.get((span.rank, span.id), 0)
        return Category.COLLECTIVE_WAIT if waits and label == Category.COMMUNICATION else label

    def active(self, now: int) -> int:
        return sum(span.start_ns <= now < span.end_ns for span in self.requests)

    def in_tail(self, now: int) -> bool:
        if not self.active(now):
            return False
        first, last = now, now
        while self.active(first - 1):
            first -= 1
        while self.active(last + 1):
            last += 1
        slots = max(map(self.active, range(first, last + 1)))
        return slots >= 4 and all(2 * self.active(later) < slots for later in range(now, last + 1))


def step_at(every: list[Span], own: list[Span], now: int) -> int | None:
    """Return the step of a rank: of its own the last to begin, else one that it lacks."""
    steps = [span for span in own if span.kind == "step"]
    here = [span for span in steps if span.start_ns <= now < span.end_ns]
    if here:
        return max(here, key=lambda span: (span.start_ns, span.id)).step
    lacks = {span.step for span in every if span.kind == "step"} - {span.step for span in steps}
    found = []
    for number in lacks:
        days = [span for span in every if span.kind == "step" and span.step == number]
        day = min(days, key=lambda span: (span.rank, span.start_ns, span.id))
        found += [number] if day.start_ns <= now < day.end_ns else []
    return max(found, default=None)


def began(items: Sequence[Item]) -> dict[tuple[int, int], int]:
    """Return when the transfer began, by rank and number, of collectives with counterparts."""
    groups: dict[tuple[int, str], dict[int, list[Item]]] = defaultdict(lambda: defaultdict(list))
    for item in sorted(items, key=lambda item: item.start_ns):
        groups[item.step, item.name][item.rank].append(item)
    found = {}
    for ranks in groups.values():
        if len(ranks) < 2 or len({len(each) for each in ranks.values()}) > 1:
            continue
        for members in zip(*ranks.values(), strict=True):
            if max(each.start_ns for each in members) <= min(each.end_ns for each in members):
                shortest = min(each.end_ns - each.start_ns for each in members)
                found |= {(each.rank, each.number): each.end_ns - shortest for each in members}
    return found


def device_of(kernels: Sequence[Kernel], copies: Sequence[Kernel]) -> list[Run]:
    """Return what devices ran, collectives with counterparts in two parts."""
    labels = [label_of_kernel(kernel) for kernel in kernels]
    split = began(
        [
            Item(kernel.rank, at, kernel.step or 0, kernel.name, kernel.start_ns, kernel.end_ns)
            for at, kernel in enumerate(kernels)
            if kernel.name.startswith("nccl") and "SendRecv" not in kernel.name
        ]
    )
    found = []
    for at, kernel in enumerate(kernels):
        start = kernel.start_ns
        if labels[at] == Category.COMMUNICATION:
            start = split.get((kernel.rank, at), start)
        found += [Run(kernel.rank, kernel.start_ns, start, Category.COLLECTIVE_WAIT)]
        found += [Run(kernel.rank, start, kernel.end_ns, labels[at])]
    return found + [
        Run(copy.rank, copy.start_ns, copy.end_ns, launched_in(copy) or Category.MEMCPY)
        for copy in copies
    ]


def launched_in(kernel: Kernel) -> Category | None:
    label = category_of(kernel.stage or "")
    return Category(label) if label in LAUNCHING else None


def label_of_kernel(kernel: Kernel) -> Category:
    if (label := launched_in(kernel)) is not None:
        return label
    return Category.COMMUNICATION if kernel.name.startswith("nccl") else Category.COMPUTE


def windows_of(own: list[Span], runs: list[Run]) -> list[tuple[int, int]]:
    """Return when the device was looked at: in captures with kernels, else between kernels."""
    runs = [run for run in runs if run.end_ns > run.start_ns]
    opened = sorted(span.end_ns for span in own if span.name == "rlprof open capture")
    closed = sorted(span.start_ns for span in own if span.name == "rlprof close capture")
    if not opened and runs:
        return [(min(run.start_ns for run in runs), max(run.end_ns for run in runs))]
    found = []
    for end in closed:
        start = max((each for each in opened if each <= end), default=end)
        if any(start <= run.start_ns < end for run in runs):
            found.append((start, end))
    return found
