# Written by docs/generate_methods.py from lightning_rlprof/analysis/catalog.py.
from lightning_rlprof.analysis.diagnosis.data_quality import data_quality as _data_quality
from lightning_rlprof.analysis.diagnosis.diagnosis import findings as _findings
from lightning_rlprof.analysis.ledger.ledger import ledger as _ledger
from lightning_rlprof.analysis.stragglers.stragglers import stragglers as _stragglers
from lightning_rlprof.analysis.critical_path.critical_path import critical_path as _critical_path
from lightning_rlprof.analysis.whatif.whatif import whatif as _whatif
from lightning_rlprof.analysis.stages import stages as _stages
from lightning_rlprof.analysis.stages import regions as _regions
from lightning_rlprof.analysis.stages import gaps as _gaps
from lightning_rlprof.analysis.stages import steps as _steps
from lightning_rlprof.analysis.comparison.changes import changes as _changes
from lightning_rlprof.analysis.device.breakdown import breakdown as _breakdown
from lightning_rlprof.analysis.device.timeline import idle as _idle
from lightning_rlprof.analysis.stages import roles as _roles
from lightning_rlprof.analysis.stages import rank_status as _rank_status
from lightning_rlprof.analysis.memory import memory as _memory
from lightning_rlprof.analysis.samples.sample_tables import samples as _samples
from lightning_rlprof.analysis.samples.sample_tables import lengths as _lengths
from lightning_rlprof.analysis.samples.long_tail import long_tail as _long_tail
from lightning_rlprof.analysis.samples.long_tail import tail_causes as _tail_causes
from lightning_rlprof.analysis.samples.sample_tables import staleness as _staleness
from lightning_rlprof.analysis.samples.sample_tables import length_balance as _length_balance
from lightning_rlprof.analysis.samples.sample_tables import sample_path as _sample_path
from lightning_rlprof.analysis.device.device_critical_path import device_critical_path as _device_critical_path
from lightning_rlprof.analysis.kernels import kernels as _kernels
from lightning_rlprof.analysis.device.launches import launches as _launches
from lightning_rlprof.analysis.operators import operators as _operators
from lightning_rlprof.analysis.efficiency.matmuls import matmuls as _matmuls
from lightning_rlprof.analysis.operators import modules as _modules
from lightning_rlprof.analysis.communication.collectives import communication as _communication
from lightning_rlprof.analysis.communication.weight_sync import weight_sync as _weight_sync
from lightning_rlprof.analysis.communication.links import links as _links
from lightning_rlprof.analysis.efficiency.experts import experts as _experts
from lightning_rlprof.analysis.memory import memory_phases as _memory_phases
from lightning_rlprof.analysis.efficiency.throughput import throughput as _throughput
from lightning_rlprof.analysis.device.device_counters import device_counters as _device_counters

class Methods:
    data_quality = _data_quality
    findings = _findings
    ledger = _ledger
    stragglers = _stragglers
    critical_path = _critical_path
    whatif = _whatif
    stages = _stages
    regions = _regions
    gaps = _gaps
    steps = _steps
    changes = _changes
    breakdown = _breakdown
    idle = _idle
    roles = _roles
    rank_status = _rank_status
    memory = _memory
    samples = _samples
    lengths = _lengths
    long_tail = _long_tail
    tail_causes = _tail_causes
    staleness = _staleness
    length_balance = _length_balance
    sample_path = _sample_path
    device_critical_path = _device_critical_path
    kernels = _kernels
    launches = _launches
    operators = _operators
    matmuls = _matmuls
    modules = _modules
    communication = _communication
    weight_sync = _weight_sync
    links = _links
    experts = _experts
    memory_phases = _memory_phases
    throughput = _throughput
    device_counters = _device_counters
