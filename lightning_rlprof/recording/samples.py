"""Follow one sample through a job: its phases on any process, its tokens, and its fate.

A phase is a span that carries the sample's number, a fate a mark that does. Prompt, group and
attempt stand in the file once for each process that has the sample. A request to a server carries
them in a header, or in any mapping of strings.
"""

import os
import re
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

from lightning_rlprof.recording import annotations, open_spans
from lightning_rlprof.recording.annotations import Marker, in_stage, mark
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import (
    FATES,
    FIRST_TOKEN,
    NO_KNOWN_FATE,
    SAMPLE,
    Fate,
    Number,
    as_number,
)
from lightning_rlprof.records.run_directory import SampleLine

if TYPE_CHECKING:
    from lightning_rlprof.recording.session import Session

HEADER = "rlprof-sample"
"""Name of the header that carries a sample to another process."""

_MAX_CHARACTERS = 200  # Characters of the name of a prompt or a group.
_MAX_HEADER = 8_192  # Characters of a header's value; two names of 200 characters take 4,900.
_MAX_HEADERS = 1_000  # Headers of a request that are looked at.
_NUMBER = re.compile(r"\d{1,16}", re.ASCII)
_MAX_FIELDS = 8  # Fields of a header's value.
_UNKNOWN = 0  # Number of a sample that no header told.
_NUMBERS = ("id", "attempt", "version", "replica")
_told_wrong = False


class Sample:
    """One response to a prompt, from its generation to what became of it; made by `sample`.

    It can be pickled, also into another process or a later run, where it stays the same sample.
    As ``with``, an exception ends it as ``aborted``.

    Attributes:
        id: Number that no other sample has, 52 bits; 0 if `extract` found none.
        prompt: Name of its prompt.
        group: Name of its group: the samples whose rewards are compared.
        attempt: How many attempts at this sample came before.
        version: Version of the weights, counted with every phase; set it when it changes.
        replica: Number of the inference server, counted with every phase.
        fate: What became of it as far as this process knows, or None.
    """

    __slots__ = ("_written_by", "attempt", "fate", "group", "id", "prompt", "replica", "version")

    def __init__(
        self,
        prompt: str,
        group: str,
        attempt: int = 0,
        version: Number | None = None,
        replica: int | None = None,
    ) -> None:
        # It is exact in JavaScript, too.
        self.id = int.from_bytes(os.urandom(7), "big") >> 4 or 1
        self.prompt, self.group, self.attempt = prompt, group, attempt
        self.version, self.replica = version, replica
        self.fate: Fate | None = None
        self._written_by: Session | None = None
        self._write_name()

    def __repr__(self) -> str:
        return f"<sample {self.id} of {self.prompt}>"

    def __enter__(self) -> "Sample":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End a sample that an exception or a cancellation leaves; others continue elsewhere."""
        if kind is not None and self.fate is None:
            self.end("aborted")

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "_written_by"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._written_by = None
        for name, value in state.items():
            setattr(self, name, value)

    def phase(self, name: str, /, **counters: Any) -> Marker:
        """Mark a phase, in a ``with`` statement: ``actor_generate``, ``compute_reward``, a tool.

        Within a stage it is a region, elsewhere a stage. `count` in it adds tokens. A response
        that is continued with other weights has a phase for each of its versions.

        Args:
            name: As in `stage`.
            **counters: Numbers to store with it.
        """
        self._write_name()
        own = {**self._numbers(), **open_spans.counters_of(counters)}
        return Marker(name, "region" if in_stage() else "stage", own)

    def record(self, name: str, start_ns: int, end_ns: int, /, **counters: Any) -> None:
        """Record a phase whose two ends are known, as an engine tells them of its requests.

        Args:
            name: As in `stage`.
            start_ns: Start by ``time.perf_counter_ns()``.
            end_ns: End by the same clock.
            **counters: Numbers to store with it.
        """
        sink = annotations.listener()
        if sink is not None:
            marker, start = self.phase(name, **counters), int(start_ns)
            step, end = sink.step_at(start), max(start, int(end_ns))
            sink.append(open_spans.new_span(marker, step, start, end, marker.counters))

    def first_token(self) -> None:
        """Record that the first token is there."""
        self._write_name()
        if self.id != _UNKNOWN:
            mark(FIRST_TOKEN, sample=self.id)

    def end(self, fate: Fate, /, **counters: Any) -> None:
        """Record what became of the sample.

        If several fates are recorded, the first of them in the order of `FATES` counts.

        Args:
            fate: One of `FATES`; another word is said once, and counts as unknown.
            **counters: Numbers to store with it, such as ``tokens``, ``reward``, ``advantage``, and
                ``trainer_version``, that of the weights which it updates.
        """
        sink = annotations.listener()
        if fate not in FATES and sink is not None:
            _say_once(sink, fate)
        self.fate = fate
        self._write_name()
        known = fate if fate in FATES else NO_KNOWN_FATE
        if self.id != _UNKNOWN:
            mark(f"{SAMPLE} {known}", sample=self.id, **counters)

    def inject(self, headers: MutableMapping[str, str] | None = None) -> MutableMapping[str, str]:
        """Put the sample into the headers of a request, or into a mapping that is sent as JSON.

        `extract` reads it on the other side. Version and replica are those of now.

        Args:
            headers: Gets the header ``rlprof-sample``; unset, a new dictionary does.

        Returns:
            The same headers.

        Example::

            >>> call = sample("gsm8k/17", version=3)
            >>> headers = call.inject({"Content-Type": "application/json"})
            >>> Sample.extract(headers).id == call.id
            True
        """
        numbers = {name: as_number(getattr(self, name)) for name in _NUMBERS}
        told = {name: number for name, number in numbers.items() if number is not None}
        names = {"prompt": self.prompt, "group": self.group}
        headers = {} if headers is None else headers
        headers[HEADER] = urlencode({**told, **names}, errors="replace")
        return headers

    @classmethod
    def extract(cls, headers: Mapping[str, Any]) -> "Sample":
        """Return the sample that `inject` put into the headers of a request; it never raises.

        Without a valid header, its phases are plain stages: the request is of no known sample.

        Args:
            headers: A mapping; whether names have capitals does not matter.

        Example::

            >>> with Sample.extract({"Host": "tools"}).phase("env_step"):
            ...     pass
        """
        received = cls.__new__(cls)
        received.__setstate__(
            {"id": _UNKNOWN, "prompt": "", "group": "", "attempt": 0, "fate": None}
            | {"version": None, "replica": None}
        )
        with suppress(Exception):  # A client may send anything.
            received.__setstate__(_received(headers))
        return received

    def retry(self) -> "Sample":
        """End this attempt as ``retried``, and return the next one."""
        self.end("retried")
        if self.id == _UNKNOWN:
            return self
        return Sample(self.prompt, self.group, self.attempt + 1, self.version, self.replica)

    def _numbers(self) -> dict[str, Number]:
        found: dict[str, Number] = {} if self.id == _UNKNOWN else {"sample": self.id}
        if self.version is not None:
            found["version"] = self.version
        if self.replica is not None:
            found["replica"] = self.replica
        return found

    def _write_name(self) -> None:
        sink = annotations.listener()
        if sink is not None and sink is not self._written_by and self.id != _UNKNOWN:
            self._written_by = sink
            sink.add(SampleLine(self.id, self.prompt, self.group, self.attempt))


def sample(
    prompt_id: object,
    /,
    *,
    group: object = None,
    version: Number | None = None,
    replica: int | None = None,
) -> Sample:
    """Begin a sample: one response to a prompt, which is followed through all processes.

    Not recording, a phase costs 2 µs.

    Args:
        prompt_id: Names the prompt; cut after 200 characters. Give a number rather than its text.
        group: Names the group whose rewards are compared; unset, the prompt.
        version: Version of the weights that generate it.
        replica: Number of the inference server.

    Example::

        >>> with sample("gsm8k/17", group="gsm8k/17", version=3) as response:
        ...     with response.phase("actor_generate"):
        ...         annotations.count(tokens=120)
        ...     with response.phase("compute_reward"):
        ...         pass
        >>> response.end("trained", reward=1.0, trainer_version=4)
    """
    prompt = _short(prompt_id)
    return Sample(prompt, prompt if group is None else _short(group), 0, version, replica)


def _received(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the header says of a sample; raises if it says none."""
    some = islice(headers.items(), _MAX_HEADERS)
    text = next(value for name, value in some if str(name).lower() == HEADER)
    if len(text) > _MAX_HEADER:
        raise ValueError(f"a header of {len(text)} characters")
    told = dict(parse_qsl(text, max_num_fields=_MAX_FIELDS, errors="replace"))
    found: dict[str, Any] = {
        name: int(told[name]) for name in _NUMBERS if _NUMBER.fullmatch(told.get(name, ""))
    }
    if not 0 < found["id"] < 1 << 52:
        raise ValueError("a number that no sample has")
    for name in ("prompt", "group"):
        found[name] = _short("".join(filter(str.isprintable, told.get(name, ""))))
    return found


def _short(name: object) -> str:
    text = str(name)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"


def _say_once(sink: "Session", fate: str) -> None:
    global _told_wrong
    if not _told_wrong:
        _told_wrong = True
        text = f"unknown fate {fate!r} of a sample (allowed: {', '.join(FATES)})"
        sink.note(Code.UNKNOWN_FATE, text, fate=str(fate))
