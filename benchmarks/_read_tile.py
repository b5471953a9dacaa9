"""One training step of an RL job on one GPU as torch.profiler writes it: a text with blanks."""

import random
from dataclasses import dataclass, field

import numpy as np

from lightning_rlprof.tables.arrays import Int64s

__all__ = ["FIRST_US", "STEP_US", "Tile", "make_tile"]

STEP_US = 12_000
"""How long a step is."""

FIRST_US = 5_112_000_000_000
"""When the first one begins, since a quarter of a year did, as torch counts."""

_STAGES = {"actor_generate": 20, "actor_compute_log_prob": 10, "actor_update": 30}
_HOST, _GPU = '"pid": 4037, "tid": 4037', '"pid": 0, "tid": 7'
_NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"
_WORK = (
    (
        "aten::linear",
        "aten::addmm",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128_32x5_nn>"
        "(cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128_32x5_nn_align8::Params)",
    ),
    (
        "aten::add",
        "aten::add_",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>"
        ", std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>)",
    ),
    ("aten::matmul", "aten::mm", "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn"),
)
# Each {} is a blank.
_SPAN = """  {
    "ph": "X", "cat": "CAT", "name": "NAME", WHERE,
    "ts": {}.FRACTION, "dur": DURATION,
    "args": {
      ARGS
    }
  },
"""
_FLOW = """  {
    "ph": "CAT", "id": {}, WHERE, "ts": {}.FRACTION, "cat": "ac2g", "name": "ac2g"ARGS
  },
"""
_MEMORY = """  {
    "ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", WHERE,
    "ts": {}.FRACTION,
    "args": {
      "Total Reserved": 8589934592, "Total Allocated": 4294967296, "Bytes": 1048576, \
"Addr": 139720000000000, "Device Id": 0, "Device Type": 1, "Ev Idx": {}
    }
  },
"""
_ID = '"External id": {}, "Record function id": 0, "Ev Idx": {}'
_SHAPES = f"""{_ID}, "Concrete Inputs": ["", "", ""], \
"Input type": ["c10::BFloat16", "c10::BFloat16", "c10::BFloat16"], \
"Input Strides": [[1], [4096, 1], [1, 4096]], "Input Dims": [[4096], [2048, 4096], [4096, 4096]]"""
_LAUNCH = '"External id": {}, "cbid": 211, "correlation": {}'
_KERNEL = """"External id": {}, "queued": 0, "device": 0, "context": 1, "stream": 7, \
"correlation": {},
      "registers per thread": 122, "shared memory": 16640,
      "blocks per SM": 0.592593, "warps per SM": 2.37037,
      "grid": [16, 8, 1], "block": [128, 1, 1],
      "est. achieved occupancy %": 7"""
_COLLECTIVE = f"""{_KERNEL},
      "Collective name": "allreduce", "In msg nelems": 4194304, "Out msg nelems": 4194304, \
"Group size": 8, "dtype": "BFloat16", "Process Group Name": "0", \
"Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]\""""
_COPY = """"External id": {}, "device": 0, "context": 1, "stream": 7, "correlation": {}, \
"bytes": 1048576, "memory bandwidth (GB/s)": 12.5"""


@dataclass
class Tile:
    """A step's text, with "%d" for each blank, and what these are.

    Attributes:
        text: Events, each with a comma behind it.
        first: What stands in each blank in the first step.
        each: What is added with every step.
    """

    text: str
    first: Int64s
    each: Int64s


@dataclass
class _Writer:
    """Writes events one after the other; the host works, and the device follows it."""

    noise: random.Random
    texts: list[str] = field(default_factory=list)
    blanks: list[tuple[str, int]] = field(default_factory=list)
    host: int = 30
    device: int = 30
    calls: int = 0

    def event(self, form: str, kind: str, where: str, at: int, **parts: object) -> None:
        """Write one event that begins at a microsecond; blanks before its time are numbers."""
        text = form.replace("CAT", kind).replace("WHERE", where)
        duration = f"{parts.get('dur', 0)}.{self.noise.randrange(1000):03}"
        text = text.replace("NAME", str(parts.get("name"))).replace("DURATION", duration)
        text = text.replace("ARGS", str(parts.get("args", "")))
        before, _, behind = text.partition("{}.FRACTION")
        numbers = [("number", self.calls)]
        self.blanks += numbers * before.count("{}") + [("time", at)] + numbers * behind.count("{}")
        self.texts.append(text.replace("FRACTION", f"{self.noise.randrange(1000):03}"))

    def operator(self, outer: str, inner: str, kernel: str, length: int, args: str) -> None:
        """Write two nested operators, the launch in them, the flow, and what runs on the device."""
        at, self.calls = self.host, self.calls + 1
        self.device = max(self.device + 2, at + 22)
        self.event(_SPAN, "cpu_op", _HOST, at, name=outer, dur=34, args=_SHAPES)
        self.event(_SPAN, "cpu_op", _HOST, at + 2, name=inner, dur=28, args=_SHAPES)
        self.event(
            _SPAN, "cuda_runtime", _HOST, at + 9, name="cudaLaunchKernel", dur=8, args=_LAUNCH
        )
        self.event(_FLOW, "s", _HOST, at + 9)
        self.event(_SPAN, "kernel", _GPU, self.device, name=kernel, dur=length, args=args)
        self.event(_FLOW, "f", _GPU, self.device, args=', "bp": "e"')
        self.host, self.device = at + 40, self.device + length + 1

    def stage(self, name: str, layers: int) -> None:
        """Write a stage of some layers; the update ends with an all_reduce."""
        begin = self.host
        for _ in range(layers):
            for work in _WORK:
                self.operator(*work, self.noise.randint(8, 45), _KERNEL)
            self.event(_MEMORY, "", _HOST, self.host - 3)
        if name == "actor_update":
            self.operator("c10d::allreduce_", "record_param_comms", _NCCL, 400, _COLLECTIVE)
        length = self.host - begin + 4
        self.event(_SPAN, "user_annotation", _HOST, begin - 2, name=name, dur=length, args=_ID)
        self.host += 60


def make_tile(seed: str) -> Tile:
    """Return the step that a seed gives."""
    writer = _Writer(random.Random(seed))
    writer.event(_SPAN, "cuda_runtime", _HOST, 4, name="cudaMemcpyAsync", dur=6, args=_LAUNCH)
    copied = "Memcpy HtoD (Pageable -> Device)"
    writer.event(_SPAN, "gpu_memcpy", _GPU, 14, name=copied, dur=5, args=_COPY)
    for name, layers in _STAGES.items():
        writer.stage(name, layers)
    at, writer.calls = writer.host, writer.calls + 1
    wait = max(writer.device - at, 0) + 5
    wait_name = "cudaDeviceSynchronize"
    writer.event(_SPAN, "cuda_runtime", _HOST, at, name=wait_name, dur=wait, args=_LAUNCH)
    if at + wait > STEP_US - 4:
        raise AssertionError(f"the step is full at {at + wait} µs")
    step = _SPAN.replace("NAME", "ProfilerStep#STEP")
    writer.event(step, "user_annotation", _HOST, 1, dur=STEP_US - 3, args=_ID)
    return _tile(writer)


def _tile(writer: _Writer) -> Tile:
    text = "".join(writer.texts).replace("%", "%%").replace("{}", "%d")
    grows = {"time": (FIRST_US, STEP_US), "number": (1, writer.calls + 1)}
    first = [grows[kind][0] + value for kind, value in writer.blanks]
    each = [grows[kind][1] for kind, _ in writer.blanks]
    return Tile(text, np.array(first), np.array(each))
