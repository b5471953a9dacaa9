"""What each column of the SQL tables means, and its unit: the one place where it is written."""

from typing import NamedTuple


class Meaning(NamedTuple):
    """Unit ("" for texts, numbers of things, and counts) and meaning of a column."""

    unit: str
    text: str


def meaning(table: str, column: str) -> Meaning:
    """Return what a column of a table means; one that is not listed is a counter of ``spans``.

    Example::

        >>> meaning("kernels", "launch_ns").text, meaning("spans", "kv_bytes").unit
        ('start of the call that launched it', 'bytes')
    """
    text = _OF_TABLE.get((table, column)) or _OF_COLUMN.get(column)
    return Meaning(_unit(column), text or f"counter {column!r} of the span")


def _unit(column: str) -> str:
    if column.endswith("_ns"):
        return "ns"
    if column.endswith("bytes") or column in _BYTES:
        return "bytes"
    return _UNITS.get(column, "")


_BYTES = {"allocated", "reserved", "size", "active"}
_UNITS = {"bandwidth": "GB/s", "drift": "ppm", "drift_uncertainty": "ppm"}

_OF_COLUMN = {
    "active": "memory that tensors use",
    "aicore_time_ns": "time on the matrix cores",
    "allocated": "memory that tensors have",
    "attempt": "attempts at the sample before this one",
    "bandwidth": "bandwidth over all links of the rank",
    "block_dim": "number of cores that it was spread over",
    "bubble_ns": "waiting to receive, in pipelines",
    "bytes": "size of what was moved",
    "class": "what a kernel does: matmul, attention, elementwise, reduction, ...",
    "clock": "lowest rank that reads the same clock",
    "clock_ns": "monotonic clock when the recording began",
    "code": "id of what it says, for programs",
    "communicator": "process group, a text that is the same on all its ranks",
    "communicator_size": "ranks in the communicator",
    "communication_ns": "communication, overlapped or not",
    "communication_not_overlapped_ns": "communication without computation at the same time",
    "communication_not_overlapped_and_exclude_receive_ns": "the same without receiving",
    "component": "whose memory it is, such as an allocator",
    "computing_ns": "computation",
    "config": "configuration of the recording, as JSON",
    "destination": "device at the receiving end",
    "destination_rank": "rank at the receiving end",
    "device": "number of the device, as the process counts it",
    "device_name": "model of the device",
    "dims": "shapes of the inputs, as JSON",
    "drift": "how fast the clock runs away from the reference",
    "drift_uncertainty": "uncertainty of the drift",
    "dtype": "type of the elements",
    "duration_ns": "length",
    "end_ns": "end, since the first event of the run",
    "exchanges": "exchanges or collectives that were used",
    "facts": "numbers and names that belong to the code, as JSON",
    "format": "version of the file format",
    "forward": "id of the forward operator whose gradient this call computes",
    "free_ns": "nothing ran",
    "graph": "number of the CUDA graph replay that it ran in",
    "host": "name of the host",
    "id": "number of the row within its rank",
    "idle_ns": "time without transfer",
    "input_shapes": "shapes of the inputs",
    "jumps": "times that the clock was set",
    "kind": "what sort of row it is",
    "launch_duration_ns": "length of the call that launched it",
    "launch_ns": "start of the call that launched it",
    "level": "info, warning or error",
    "method": "how the clock was synchronized",
    "name": "name of what ran or was measured",
    "number": "number of the collective in its communicator",
    "op_type": "type of the operator",
    "operation": "operation, such as all_reduce",
    "overlapped_ns": "communication behind computation",
    "parent": "id of the span or call around it",
    "pid": "process",
    "preparing_ns": "time until the first operator of the step",
    "prompt": "name of the prompt",
    "prompt_group": "name of the samples whose rewards are compared",
    "range": "innermost range that the launch lies in",
    "rank": "global rank",
    "reference": "rank whose clock this one was compared with",
    "reserved": "memory that the allocator has taken from the device",
    "role": "role of the rank, such as actor",
    "run_id": "identity of the run",
    "sample": "number of the sample",
    "short_name": "name in short: what a kernel does, type, tile and library",
    "size": "size of what was allocated or moved",
    "source": "device at the sending end",
    "source_rank": "rank at the sending end",
    "stage": "RL stage",
    "start_ns": "start, since the first event of the run",
    "status": "how the rank ended; NULL if its file is truncated",
    "step": "RL step, from 1; 0 before training",
    "stream": "stream or queue of the device",
    "synchronization_ns": "time in which ranks synchronized",
    "text": "what the rank or the loader reports",
    "thread": "identity of the thread",
    "thread_name": "name of the thread",
    "time_ns": "time, since the first event of the run",
    "transport": "kind of link, such as HCCS or RDMA",
    "transfer_ns": "time in which data moved",
    "types": "types of the inputs, as JSON",
    "uncertainty_ns": "largest error of the rank's times",
    "unix_ns": "wall clock when the recording began",
    "value": "value of the sample",
    "values": "values of the inputs that are no tensors, as JSON",
    "vector_time_ns": "time on the vector cores",
    "versions": "versions of the software, as JSON",
    "wait_ns": "time in which it waited for other ranks",
    "wall_clock_off_ns": "how far the host's wall clock was ahead when the rank started",
    "world_size": "number of ranks in the job",
    "zero_unix_ns": "wall clock at time zero of the tables",
}
_OF_TABLE = {
    ("background_metrics", "duration_ns"): "time of which the value is the mean; 0: of one instant",
    ("calls", "kind"): "python, operator, runtime or module",
    ("collectives", "bytes"): "larger of what the rank sent and received",
    ("headers", "device"): "kind of device, such as cuda",
    ("memcpy", "kind"): "from where to where, such as HtoD, or memset",
    ("spans", "id"): "number of the span within its rank",
    ("spans", "kind"): "epoch, step, stage, region or mark",
    ("spans", "name"): "name of the stage, region or mark",
    ("step_trace", "stage_ns"): "whole step",
    ("sync", "kind"): "what the host or a stream waited for",
    ("warnings", "text"): "what is missing or doubtful",
}
