"""Every analysis of one run: its name, what it answers, and where it is shown.

This table is the only place that names them. `Run` has a method for each row, ``rlprof show`` a
name to complete, the docs a table of columns. A module is imported when its analysis runs.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lightning_rlprof.tables.spans import Spans
    from lightning_rlprof.tables.table import Table

# The columns are: name (also of the function and of its table) | module in this package | heading |
# where it is shown | what the table contains. Of the places, `show` means only `rlprof show`,
# `report` adds the HTML report, and `summary` adds `rlprof summary --all`. A `verb` is like
# `summary`, but a verb of `rlprof` prints it instead of `show`. Tables that read much data of a
# profiler are in no summary: they are computed only on request.
_ROWS = """
data_quality | diagnosis.data_quality | Diagnosis | summary | Checks of the data, before any number
findings | diagnosis.diagnosis | Diagnosis | verb | What to fix first: price, evidence, remedies
ledger | ledger.ledger | Diagnosis | summary | GPU-hours of the whole job by category
stragglers | stragglers.stragglers | Ranks | verb | Ranks that slow the others down, at equal work
critical_path | critical_path.critical_path | Steps | summary | What decides step time, and slack
whatif | whatif.whatif | Diagnosis | verb | Step time after a change
stages | stages | Steps | summary | Step time by stage
regions | stages | Steps | summary | Regions, and stages beside the steps
gaps | stages | Steps | summary | Untraced time, by the stages before and after it
steps | stages | Steps | summary | Every step of every rank
changes | comparison.changes | Steps | summary | Steps at which time changed, trends, outliers
breakdown | device.breakdown | Device | report | Compute, communication, memcpy and idle time
idle | device.timeline | Device | report | Device idle time by cause and stage
roles | stages | Ranks | summary | Roles of a job: ranks, when, and how busy
rank_status | stages | Ranks | summary | How each rank's recording ended
memory | memory | Memory | summary | Peak memory of each stage, and fragmentation
samples | samples.sample_tables | Samples | summary | Fates of samples, and useful tokens
lengths | samples.sample_tables | Samples | summary | How long samples were, by stage
long_tail | samples.long_tail | Samples | summary | Idle time of the last responses, and cuts
tail_causes | samples.long_tail | Samples | summary | Why the last responses are late
staleness | samples.sample_tables | Samples | summary | Age of weights, waits and queue by update
length_balance | samples.sample_tables | Samples | summary | Tokens by rank, and the best split
sample_path | samples.sample_tables | Samples | summary | One sample from prompt to update
device_critical_path | device.device_critical_path | Device | show | What a device's step waits for
kernels | kernels | Device | show | Kernels and copies by total time
launches | device.launches | Device | show | Launch cost and queue depth of each stream
operators | operators | Device | show | Operators by device and host time
matmuls | efficiency.matmuls | Device | show | Matmuls and attention against peak FLOP/s
modules | operators | Device | show | Modules by device and host time
communication | communication.collectives | Ranks | report | Collectives: transfer, wait, overlap
weight_sync | communication.weight_sync | Steps | report | Parts of weight syncs, and lower bound
links | communication.links | Ranks | show | Bandwidth of links between ranks, and which are slow
experts | efficiency.experts | Ranks | show | Balance of tokens over experts and their ranks
memory_phases | memory | Memory | show | What each stage leaves in memory, and leaks
throughput | efficiency.throughput | Diagnosis | show | Tokens/s, samples/s and MFU of each stage
device_counters | device.device_counters | Device | show | Counters of hosts and devices, by stage
"""


class Analysis(NamedTuple):
    """One analysis.

    Attributes:
        name: Its name in Python, on the command line, in JSON and in the docs.
        module: Where its function is, which has the same name.
        group: The heading it is listed under.
        place: Where it is shown: ``show``, ``report``, ``summary`` or ``verb``.
        answers: What its table contains, as a noun phrase.
    """

    name: str
    module: str
    group: str
    place: str
    answers: str

    @property
    def run(self) -> "Callable[[Spans], Table]":
        """The function: it takes `Spans` and returns a `Table` with its name."""
        module = import_module(f"{__package__}.{self.module}")
        found: Callable[[Spans], Table] = getattr(module, self.name)
        return found

    @property
    def summary(self) -> bool:
        """Whether ``rlprof summary --all`` contains it."""
        return self.place in ("summary", "verb")

    @property
    def report(self) -> bool:
        """Whether the HTML report shows it."""
        return self.place != "show"


CATALOG = tuple(Analysis(*row.split(" | ")) for row in _ROWS.strip().splitlines())
"""All analyses, in reading order."""

ANALYSES: Mapping[str, Analysis] = {each.name: each for each in CATALOG}
"""All analyses by name."""
