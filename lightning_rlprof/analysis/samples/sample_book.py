"""The samples of a run as columns: fate, tokens, versions, and their spans in order of time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.steps.time_categories import Category, categories_of
from lightning_rlprof.records.records import FATES, KINDS, NO_KNOWN_FATE, SAMPLE
from lightning_rlprof.tables.arrays import Int64s, Mask, group_starts
from lightning_rlprof.tables.rank_tables import SAMPLE_NAMES
from lightning_rlprof.tables.spans import Spans

UNKNOWN = -1
"""Stands for a number that was not recorded."""

NO_FATE = len(FATES)
"""Stands for the fate of a sample of which none was recorded, or an unknown one."""

USED = ("trained", "zero_advantage", "truncated")
"""Fates of the samples that an update takes, whether or not they change the weights."""

NO_SAMPLES = (
    "No samples were recorded. Wrap each response in sample(prompt_id, group=...) and tell its "
    "fate with end(); TRL's trainers need no change"
)
_MARK = KINDS.index("mark")
_FATE_CODES = {f"{SAMPLE} {fate}": code for code, fate in enumerate((*FATES, NO_KNOWN_FATE))}


@dataclass(frozen=True, eq=False)
class SampleBook:
    """One entry per sample, ascending by number.

    Attributes:
        id: Number of each sample.
        prompt: Its prompt as an index into `prompts`, or `UNKNOWN`.
        prompts: Names of prompts.
        attempt: Attempts before it, or `UNKNOWN`.
        fate: Index into `FATES`, or `NO_FATE`.
        fate_row: Row of the mark that tells the fate, or `UNKNOWN`.
        tokens: Tokens of its rollout phases, else those told with its fate, else `UNKNOWN`.
        version: Version of the weights at its start, or `UNKNOWN`.
        version_end: The same at its end.
        reward: Reward, or NaN.
        rows: Rows of its spans and marks, by sample and start, fates left out.
        first: Index of each sample's first row; the last entry is the number of rows.
        owner: The sample of each of them.
        spans: How many spans the run has.
    """

    id: Int64s
    prompt: Int64s
    prompts: Sequence[str]
    attempt: Int64s
    fate: Int64s
    fate_row: Int64s
    tokens: Int64s
    version: Int64s
    version_end: Int64s
    reward: npt.NDArray[np.float64]
    rows: Int64s
    first: Int64s
    owner: Int64s
    spans: int

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.id)

    def spans_of(self, at: int) -> Int64s:
        """Return the rows of one sample."""
        return self.rows[self.first[at] : self.first[at + 1]]

    @cached_property
    def of_row(self) -> Int64s:
        """Sample of each row of the run, or `UNKNOWN`; fates have none."""
        found = np.full(self.spans, UNKNOWN)
        found[self.rows] = self.owner
        return found

    def fates(self, *names: str) -> Mask:
        """Return which samples have one of some fates."""
        return np.isin(self.fate, [FATES.index(name) for name in names])


def sample_book(spans: Spans) -> SampleBook:
    """Return the samples of a run; they are read once."""
    return spans.once("samples", _read, (SAMPLE_NAMES,))


def _read(spans: Spans) -> SampleBook:
    rows, number = spans.amounts("sample", np.int64)
    codes = np.array([*(_FATE_CODES.get(name, UNKNOWN) for name in spans.names), UNKNOWN])
    is_fate = (spans.kind[rows] == _MARK) & (codes[spans.name[rows]] >= 0)
    if SAMPLE_NAMES not in spans.tables and not is_fate.any():
        # Without names or fates, `sample` is just a number that the user counted.
        rows, number, is_fate = rows[:0], number[:0], is_fate[:0]
    ids, prompt, prompts, attempt = _names(spans, number)
    owner = np.searchsorted(ids, number)
    told, of = rows[is_fate], owner[is_fate]
    order = np.lexsort((spans.start_ns[told], codes[spans.name[told]], of))
    told, of = told[order], of[order]
    first = group_starts(of)
    fate, fate_row = np.full(len(ids), NO_FATE), np.full(len(ids), UNKNOWN)
    fate[of[first]] = codes[spans.name[told[first]]]
    fate_row[of[first]] = told[first]
    rows, owner = rows[~is_fate], owner[~is_fate]
    order = np.lexsort((spans.end_ns[rows], spans.start_ns[rows], owner))
    rows, owner = rows[order], owner[order]
    starts = np.searchsorted(owner, np.arange(len(ids) + 1))
    versions = _versions(spans, rows, owner, len(ids))
    reward = spans.amounts("reward").at(fate_row, np.nan)
    tokens = _tokens(spans, rows, owner, fate_row)
    told_of = ids, prompt, prompts, attempt, fate, fate_row, tokens, *versions, reward
    return SampleBook(*told_of, rows, starts, owner, len(spans))


def _names(spans: Spans, number: Int64s) -> tuple[Int64s, Int64s, Sequence[str], Int64s]:
    """Return all numbers of samples, their prompts as codes and texts, and their attempts.

    Of several ranks that name a sample, the first one counts.
    """
    table = spans.try_table(SAMPLE_NAMES, [])
    if table is None:
        ids = np.unique(number)
        return ids, np.full(len(ids), UNKNOWN), (), np.full(len(ids), UNKNOWN)
    named, row = np.unique(table.numbers("sample", UNKNOWN), return_index=True)
    ids = np.union1d(number, named)
    row_of = np.full(len(ids), UNKNOWN)
    row_of[np.searchsorted(ids, named)] = row
    codes, texts = table.texts("prompt")
    attempts = table.numbers("attempt", UNKNOWN)
    prompt, attempt = (np.append(own, UNKNOWN)[row_of] for own in (codes, attempts))
    return ids, prompt, texts, attempt


def _versions(spans: Spans, rows: Int64s, owner: Int64s, samples: int) -> tuple[Int64s, Int64s]:
    """Return the first and the last version of each sample's spans."""
    version, last = (spans.per_row(name, UNKNOWN, rows) for name in ("version", "version_end"))
    last = np.where(last == UNKNOWN, version, last)
    known = version >= 0
    version, last, owner = version[known], last[known], owner[known]
    begin, end = np.full((2, samples), UNKNOWN)
    first = group_starts(owner)
    begin[owner[first]] = version[first]
    np.maximum.at(end, owner, last)
    return begin, end


def _tokens(spans: Spans, rows: Int64s, owner: Int64s, fate_row: Int64s) -> Int64s:
    """Return the tokens of each sample's rollout phases, else those told with its fate."""
    counted = spans.per_row("tokens", UNKNOWN, rows)
    found = spans.per_row("tokens", UNKNOWN, fate_row)
    generates = (categories_of(spans.names) == Category.ROLLOUT)[spans.name[rows]]
    keep = generates & (counted >= 0)
    sums = np.zeros(len(found), np.int64)
    np.add.at(sums, owner[keep], counted[keep])
    some = np.unique(owner[keep])
    found[some] = sums[some]
    return found


def rollout_rows(spans: Spans, book: SampleBook) -> Int64s:
    """Return the phases in which samples were generated, by sample and start."""
    generates = (categories_of(spans.names) == Category.ROLLOUT)[spans.name[book.rows]]
    found: Int64s = book.rows[generates & (spans.kind[book.rows] != _MARK)]
    return found
