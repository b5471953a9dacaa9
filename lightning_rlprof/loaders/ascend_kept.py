"""What a trace_view.json can be asked for, and what is decoded of one event."""

import re

import msgspec

__all__ = [
    "COMMUNICATION",
    "COPIES",
    "LANES",
    "QUEUE",
    "WAITS",
    "AscendArgs",
    "AscendEvent",
    "Flow",
    "Id",
    "Kept",
]

Id = int | float | str | None
"""As found in traces: 7, "937", "Group 0 Communication", null."""

COMMUNICATION = ("HCCL", "Communication")
"""Process of the collectives, in older and in newer versions."""

LANES = ("Computing", "Communication", "Communication(Not Overlapped)", "Free")
"""Threads of the process that says what overlapped with what; its rows have the same names."""

COPIES = ("MEMCPY_ASYNC", "PCIE_DMA_SQE", "SDMA_SQE")
"""What tasks that copy are called, or their types."""

QUEUE = ("enqueue", "dequeue")
"""Categories of the two ends of torch_npu's queue."""

WAITS = re.compile(r"Synchronize|aclrtMemcpy$")
"""Of names of calls of CANN that wait for the device."""


class Kept:
    """What of a trace can be asked for.

    Attributes:
        MARKS: Ranges and marks of MSTX.
        SHADOWS: What ranges became on the device that went through a stream.
        STEPS: ``ProfilerStep#N`` as torch's operators show it.
        OPERATORS: torch's operators, steps among them.
        MODULES: ``nn.Module: ...``, the only Python functions that are kept.
        DEVICE: Tasks of the device, its collectives, and what overlapped with what.
        FLOWS: Arrows between rows.
        COLLECTIVES: The collectives of the device, which then are none of its tasks.
        WAITS: Calls of CANN that wait for the device.
        COPIES: Tasks of the device that copy, which then are none of its others.
        CALLS: All that the host called, which then is nothing else.
        SHAPES: Matrix products with the shapes of their inputs, which then are nothing else.
        QUEUE: Both ends of the queue between the thread that calls and the one that launches.
    """

    MARKS, SHADOWS, STEPS, OPERATORS, MODULES, DEVICE, FLOWS, COLLECTIVES, WAITS = range(9)
    COPIES, CALLS, SHAPES, QUEUE = range(9, 13)


class Flow:
    """Kinds of arrows that are kept.

    Attributes:
        TORCH: From an operator of torch; its id is the start of the task on the device.
        LAUNCH: From a call of CANN; its id is the connection.
        TASK: To a task on the device; its id is the connection.
        MARK: From a range of MSTX.
        SHADOW: To what that became on the device.
    """

    TORCH, LAUNCH, TASK, MARK, SHADOW = range(5)


class AscendArgs(msgspec.Struct, gc=False):
    """What is decoded of the arguments of an event."""

    event_type: Id = None
    domain: Id = None
    mark_id: Id = None
    connection: Id = msgspec.field(default=None, name="connection_id")
    stream: Id = msgspec.field(default=None, name="Physic Stream Id")
    task: Id = msgspec.field(default=None, name="Task Type")
    type: Id = msgspec.field(default=None, name="data_type")
    count: Id = None
    size: Id = msgspec.field(default=None, name="size(B)")
    operation: Id = None
    sequence: Id = msgspec.field(default=None, name="Sequence number")
    forward: Id = msgspec.field(default=None, name="Fwd thread id")
    level: Id = None
    correlation: Id = msgspec.field(default=None, name="correlation_id")
    name: Id = None
    labels: Id = None
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")


class AscendEvent(msgspec.Struct, gc=False):
    """What is decoded of one event; times stay as they are written."""

    name: Id = ""
    ph: str = ""
    cat: str | None = None
    ts: msgspec.Raw = msgspec.Raw()
    dur: msgspec.Raw = msgspec.Raw()
    pid: Id = None
    tid: Id = None
    id: Id = None
    args: AscendArgs | None = None
