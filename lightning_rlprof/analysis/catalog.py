"""Every analysis of one run: its name, what it answers, and where it is shown."""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from lightning_rlprof.analysis.advice.advice import advice
from lightning_rlprof.analysis.communication.collectives import communication
from lightning_rlprof.analysis.communication.links import link_matrix, links
from lightning_rlprof.analysis.communication.weight_sync import weight_sync
from lightning_rlprof.analysis.comparison.changes import changes
from lightning_rlprof.analysis.critical_path.critical_path import critical_path
from lightning_rlprof.analysis.device.device_counters import device_counters
from lightning_rlprof.analysis.device.device_critical_path import device_critical_path
from lightning_rlprof.analysis.device.kernels import kernels
from lightning_rlprof.analysis.device.launches import launches
from lightning_rlprof.analysis.device.utilization import breakdown, idle, overlap
from lightning_rlprof.analysis.efficiency.experts import experts
from lightning_rlprof.analysis.efficiency.matmuls import matmuls
from lightning_rlprof.analysis.efficiency.throughput import throughput
from lightning_rlprof.analysis.findings.data_quality import data_quality
from lightning_rlprof.analysis.findings.findings import findings
from lightning_rlprof.analysis.ledger.ledger import ledger
from lightning_rlprof.analysis.memory.phases import memory_phases
from lightning_rlprof.analysis.memory.usage import memory, memory_timeline
from lightning_rlprof.analysis.operators.costs import modules, operators
from lightning_rlprof.analysis.samples.fates import samples
from lightning_rlprof.analysis.samples.length_balance import length_balance
from lightning_rlprof.analysis.samples.lengths import lengths
from lightning_rlprof.analysis.samples.long_tail import long_tail, tail_causes
from lightning_rlprof.analysis.samples.sample_path import sample_path
from lightning_rlprof.analysis.samples.staleness import staleness
from lightning_rlprof.analysis.stages.overviews import (
    background_stages,
    host_vs_device,
    rank_status,
    regions,
    roles,
    slowest_ranks,
    steps,
)
from lightning_rlprof.analysis.stages.stage_times import gaps, stages
from lightning_rlprof.analysis.stragglers.stragglers import stragglers
from lightning_rlprof.analysis.whatif.whatif import whatif
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table

Group = Literal["Steps", "Ranks", "Device", "Memory", "Samples", "Diagnosis"]


class Analysis(NamedTuple):
    """One analysis.

    Attributes:
        run: Takes `Spans` and returns a `Table` that has the function's name.
        group: The heading it is listed under.
        answers: What its table contains, as a noun phrase.
        summary: Whether `rlprof summary --json` contains it. The others read large tables of device
            tools, so each is computed when it is asked for.
        report: Whether the HTML report shows it.
    """

    run: Callable[[Spans], Table]
    group: Group
    answers: str
    summary: bool = False
    report: bool = False

    @property
    def name(self) -> str:
        """The name in Python, on the command line, in JSON and in the docs."""
        return self.run.__name__


CATALOG: tuple[Analysis, ...] = (
    Analysis(data_quality, "Diagnosis", "Checks of the data, before any number", True, True),
    Analysis(findings, "Diagnosis", "What to fix first: cost, evidence, what to try", True, True),
    Analysis(advice, "Diagnosis", "What to set: evidence, savings, risks", report=True),
    Analysis(ledger, "Diagnosis", "GPU-hours of the whole job by category", True, True),
    Analysis(stragglers, "Ranks", "Ranks that slow the others down, at equal work", True, True),
    Analysis(critical_path, "Steps", "Work that decides step time, and slack", True, True),
    Analysis(whatif, "Diagnosis", "Step time after a change", True, True),
    Analysis(stages, "Steps", "Step time by stage", True, True),
    Analysis(host_vs_device, "Device", "Host and device time of each stage", True, True),
    Analysis(background_stages, "Steps", "Stages of other threads and outside steps", True, True),
    Analysis(regions, "Steps", "Regions inside steps: data, training step, optimizer", True, True),
    Analysis(gaps, "Steps", "Untraced time, by the stages before and after it", True, True),
    Analysis(slowest_ranks, "Ranks", "Slowest rank of each stage", True, True),
    Analysis(steps, "Steps", "Every step of every rank", True, True),
    Analysis(changes, "Steps", "Steps at which time changed, trends, outliers", True, True),
    Analysis(memory, "Memory", "Peak memory of each stage and rank", True, True),
    Analysis(samples, "Samples", "Fates of samples, and useful tokens", True, True),
    Analysis(lengths, "Samples", "How long samples were, by stage", True, True),
    Analysis(long_tail, "Samples", "Idle time of the last responses, and cuts", True, True),
    Analysis(tail_causes, "Samples", "Why the last responses are late", True, True),
    Analysis(staleness, "Samples", "Age of weights, waits and queue by update", True, True),
    Analysis(length_balance, "Samples", "Tokens by rank: as trained, and at best", True, True),
    Analysis(sample_path, "Samples", "One sample from prompt to update", True, True),
    Analysis(roles, "Ranks", "Roles of a job: ranks, when, and how busy", True, True),
    Analysis(rank_status, "Ranks", "How each rank's recording ended", True, True),
    Analysis(breakdown, "Device", "Compute, communication, memcpy and idle time", report=True),
    Analysis(idle, "Device", "Device idle time by cause and stage", report=True),
    Analysis(overlap, "Device", "Communication hidden behind compute", report=True),
    Analysis(
        device_critical_path, "Device", "Kernels, copies and host work that step time waits for"
    ),
    Analysis(kernels, "Device", "Kernels and copies by total time"),
    Analysis(launches, "Device", "Launch cost and queue depth of each stream"),
    Analysis(operators, "Device", "Operators by device and host time"),
    Analysis(matmuls, "Device", "Matmuls and attention against peak FLOP/s"),
    Analysis(modules, "Device", "Modules by device and host time"),
    Analysis(communication, "Ranks", "Collectives: transfer, wait, bandwidth", report=True),
    Analysis(weight_sync, "Steps", "Weight sync in parts, against its lower bound", report=True),
    Analysis(links, "Ranks", "Bandwidth of links between ranks, and which are slow"),
    Analysis(link_matrix, "Ranks", "Bandwidth from each rank to each other"),
    Analysis(experts, "Ranks", "Balance of tokens over experts and their ranks"),
    Analysis(memory_timeline, "Memory", "Peak, fragmentation and growth of device memory"),
    Analysis(memory_phases, "Memory", "What each stage leaves in memory, and which one leaks"),
    Analysis(throughput, "Diagnosis", "Tokens/s, samples/s and MFU of each stage"),
    Analysis(device_counters, "Device", "Counters of hosts and devices, over time and by stage"),
)
"""All analyses, in reading order."""

ANALYSES: Mapping[str, Analysis] = {each.name: each for each in CATALOG}
"""All analyses by name."""
