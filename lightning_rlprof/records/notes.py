"""What a note of a run can say: its code, its level, and one line on what the code means.

A note carries a code and facts for programs, and a text for people. Programs decide by the code
and read the facts; they never search the text. A recorder of a user's own may note a text at a
level without a code.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Literal, NamedTuple, Protocol

Level = Literal["info", "warning", "error"]
"""How much a note matters: ``info`` explains, ``warning`` and ``error`` say what is missing."""

Fact = str | int | float
"""What a note carries beside its text."""

NO_FACTS: Mapping[str, Fact] = {}
"""The facts of a note that has none."""


class Code(str, Enum):
    """What a note says. Each code has one level and one meaning, and is written as its value.

    Example::

        >>> Code("no-progress").level, Code.CAPTURE_TAKEN == "capture-taken"
        ('warning', True)
    """

    level: Level
    meaning: str

    def __new__(cls, value: str, level: Level, meaning: str) -> "Code":
        """Return a member that is its own code, with its level and meaning."""
        member = str.__new__(cls, value)
        member._value_, member.level, member.meaning = value, level, meaning
        return member

    # These notes are about captures.
    CAPTURE_TAKEN = "capture-taken", "info", "A capture was taken: capture, step, stage."
    CAPTURE_EMPTY = "capture-empty", "info", "A capture opened for a step that never came: capture."
    CAPTURE_REQUESTED = "capture-requested", "info", "A capture is asked for: first_step, why."
    CAPTURE_BEGINS = "capture-begins", "info", "A requested capture begins: first_step, why."
    CAPTURE_REFUSED = "capture-refused", "warning", "No requested capture: first_step, why."
    CAPTURE_NOT_REACHED = "capture-not-reached", "warning", "It ended before: first_step."
    ANOMALY_NOT_CAPTURED = "anomaly-not-captured", "info", "Unusual, uncaptured: found_step."
    NOTHING_CAPTURED = "nothing-captured", "warning", "No configured capture was taken."
    STEPS_NOT_REACHED = "steps-not-reached", "warning", "Steps to capture never came: first_step."
    CAPTURES_OFF = "captures-off", "info", "This process captures nothing, by its configuration."
    CAPTURE_UNSUPPORTED = "capture-unsupported", "info", "This device has no recorder: device."
    CAPTURE_CUT_SHORT = "capture-cut-short", "warning", "A capture was too large: capture."
    CAPTURE_WITHOUT_KERNELS = "capture-without-kernels", "warning", "Kernels are missing: trace."
    CAPTURE_WITHOUT_TRACE = "capture-without-trace", "warning", "Its schedule never began: capture."
    CAPTURE_WITHOUT_DEVICE = "capture-without-device", "warning", "No data of the device: captures."
    TRACE_LOST = "trace-lost", "error", "A trace could not be written: trace."
    ASCEND_PARSING = "ascend-parsing", "info", "Captures of torch_npu are being parsed: captures."
    ASCEND_NOT_PARSED = "ascend-not-parsed", "warning", "Captures of torch_npu could not be parsed."

    # These notes are about recorders.
    RECORDER_FAILED = "recorder-failed", "error", "A recorder was disabled: recorder."
    INJECTION_REPLACED = "injection-replaced", "info", "An inherited NVTX tool was set aside."
    NSYS_ABSENT = "nsys-absent", "warning", "Nsight Systems is not attached to this process."
    NSYS_RANGE = "nsys-range", "info", "A range of Nsight Systems is a capture: number, capture."
    NSYS_REPORTS_ELSEWHERE = "nsys-reports-elsewhere", "info", "nsys reports are not in the run."
    NSYS_REPORT_MISSING = "nsys-report-missing", "warning", "An nsys report is missing or stuck."
    NVTX_NOT_RECORDED = "nvtx-not-recorded", "warning", "NVTX ranges do not reach the profiler."
    MSTX_NOT_RECORDED = "mstx-not-recorded", "warning", "MSTX ranges do not reach the profiler."
    OUT_OF_MEMORY = "out-of-memory", "warning", "An allocation failed: device, step, free_bytes."
    SNAPSHOTS_UNSUPPORTED = "snapshots-unsupported", "info", "No allocations recorded: device."
    SNAPSHOTS_UNWATCHED = "snapshots-unwatched", "warning", "No snapshot when memory runs out."
    MEMORY_TIMELINE_CUT = "memory-timeline-cut", "warning", "The timeline of memory ended early."
    METRICS_MISSING = "metrics-missing", "warning", "Background metrics have gaps."
    METRICS_UNSUPPORTED = "metrics-unsupported", "info", "Metrics cannot be read here: metrics."

    # These notes are about marks.
    STAGE_NEVER_MARKED = "stage-never-marked", "warning", "A stage to capture has no mark: stage."
    STAGE_MISSPELLED = "stage-misspelled", "warning", "A name is nearly a known one: stage, known."
    SPAN_LEFT_OPEN = "span-left-open", "warning", "A span outlived the one around it: span."
    WRAP_WITHOUT_CALL = "wrap-without-call", "warning", "A rule of wrap marked no call: target."
    COMPILED_CODE = "compiled-code", "warning", "Marks inside torch.compile were not recorded."
    CHILD_PROCESS = "child-process", "warning", "Marks in child processes were not recorded."
    MARKED_BY_NAME = "marked-by-name", "info", "Methods are marked by their names."
    MARKED_BY_CODE = "marked-by-code", "info", "The code marks stages, so names no longer count."
    UNKNOWN_FATE = "unknown-fate", "warning", "A fate of a sample is not one of the known: fate."
    EXPERTS_UNREADABLE = "experts-unreadable", "warning", "Tokens per expert cannot be read."
    NUMBERS_LOST = "numbers-lost", "error", "Numbers that were due later could not be read."

    # These notes are about the run.
    RECORDING_FAILED = "recording-failed", "error", "rlprof failed at a mark; training continued."
    DOOR_NOT_RECORDED = "door-not-recorded", "warning", "A framework lacks a part: framework."
    THREAD_NOT_RECORDED = "thread-not-recorded", "warning", "Another thread trains too: thread."
    WITHOUT_EFFECT = "without-effect", "warning", "Options for another device: device."
    MODEL_UNREADABLE = "model-unreadable", "warning", "The model's config.json cannot be read."
    RUN_RENAMED = "run-renamed", "warning", "The run has another name: its rank was taken."
    RUN_NOT_SHARED = "run-not-shared", "warning", "Ranks of a job did not agree on one run."
    OVER_BUDGET = "over-budget", "warning", "Lines are left out from here on: step."
    BUDGET_SUMMARY = "budget-summary", "warning", "How much was not written: lines, steps."
    FILE_DAMAGED = "file-damaged", "error", "The rank file was truncated, moved or deleted."
    LINES_LOST = "lines-lost", "error", "Lines could not be written: lines."
    DISK_REFUSED = "disk-refused", "warning", "The disk took nothing for a while: seconds."
    CLOCK_NOT_SYNCED = "clock-not-synced", "warning", "Clocks are no longer compared: rank."
    NO_PROGRESS = "no-progress", "warning", "No span began or ended for long: quiet_s, step, span."
    PROGRESS_AGAIN = "progress-again", "info", "The rank makes progress again: quiet_s."
    HANGS_NOT_WATCHED = "hangs-not-watched", "warning", "Hangs are not watched for."
    STACKS_NOT_SAMPLED = "stacks-not-sampled", "warning", "Stacks of threads are not sampled."

    # Readers add these notes.
    ROWS_LEFT_OUT = "rows-left-out", "warning", "Some rows of a file cannot be read or be true."
    FILE_CUT = "file-cut", "warning", "A file was not read to its end: what follows is missing."
    EVENTS_DAMAGED = "events-damaged", "warning", "Events cannot be parsed: events, bytes."
    TIMES_IMPOSSIBLE = "times-impossible", "warning", "Times cannot be true: untimed, bounded."
    RANK_UNREADABLE = "rank-unreadable", "warning", "A file of a rank cannot be read."
    RANK_LEFT_OUT = "rank-left-out", "warning", "A file has the rank of another one."
    RANKS_MISSING = "ranks-missing", "warning", "Ranks of the run have no file."
    RUNS_MIXED = "runs-mixed", "warning", "Files are of several runs or jobs."
    RANK_OPEN = "rank-open", "warning", "The file has no end: the rank was killed or still runs."
    ENDED_EARLY = "ended-early", "warning", "The training of the rank ended before it finished."
    IDS_SHARED = "ids-shared", "warning", "Spans share an id."
    PARENTS_LOST = "parents-lost", "warning", "Spans are in a span that never ended."
    HEADER_IMPOSSIBLE = "header-impossible", "warning", "A number in a header cannot be true."
    CLOCKS_DOUBTFUL = "clocks-doubtful", "warning", "Times of ranks or hosts may not be comparable."
    RANKS_GUESSED = "ranks-guessed", "warning", "The file does not say the ranks of processes."
    RANKS_JOINED = "ranks-joined", "warning", "Several processes count as one rank."
    TIME_UNKNOWN = "time-unknown", "warning", "It is unknown when a trace was recorded."
    TRACE_DOUBTFUL = "trace-doubtful", "warning", "What a profiler recorded is doubtful or partial."
    OUTSIDE_RUN = "outside-run", "warning", "A link leads out of the run and was not read."
    CAPTURE_DOUBTFUL = "capture-doubtful", "warning", "A capture is doubtful, a copy or skipped."
    CAPTURE_SETTINGS = "capture-settings", "info", "With which settings a capture was taken."
    RANK_OF_PROCESS = "rank-of-process", "info", "Which rank a process is: pid."
    NO_KERNELS = "no-kernels", "warning", "A profiler recorded no kernels."
    NO_RANGES = "no-ranges", "warning", "A profiler recorded no ranges."
    NEWEST_OF_SEVERAL = "newest-of-several", "info", "Of several runs the newest was read: runs."
    RUN_COPIED = "run-copied", "info", "A remote or packed run was copied to read it."
    CYCLES_JOINED = "cycles-joined", "info", "Traces of one process are one rank: traces."
    OF_LOG = "of-log", "info", "What a log of a framework does not say."
    NO_STAGES = "no-stages", "info", "No stage is marked, so phases of the loop are the stages."
    STEPS_JOINED = "steps-joined", "info", "A step is an iteration with several steps: steps."


CAPTURE_FAILURES = (
    Code.CAPTURE_REFUSED,
    Code.CAPTURE_EMPTY,
    Code.CAPTURE_NOT_REACHED,
    Code.CAPTURE_WITHOUT_TRACE,
    Code.NOTHING_CAPTURED,
    Code.RECORDER_FAILED,
    Code.TRACE_LOST,
)
"""Codes of notes that say why a capture is not there."""


class Remark(NamedTuple):
    """A note that is made now and kept in the run later."""

    code: Code
    text: str
    facts: Mapping[str, Fact] = NO_FACTS


class Notes(Protocol):
    """What keeps a note in the run, and logs it at the level of its code."""

    def __call__(self, code: Code | Level, text: str, /, **facts: Fact) -> None:
        """Keep a note; a level in place of a code is for recorders of a user's own."""


def level_of(code: Code | Level) -> Level:
    """Return the level of a note."""
    return code.level if isinstance(code, Code) else code
