"""What the real torch_npu makes of each option: what it tells CANN, what it keeps."""

import json
from typing import Any

import pytest

from tests.ascend.double import Run, shown
from tests.ascend.training import OPTIONS
from tests.builders.npu_run import notes

pytestmark = pytest.mark.deep

# acl_prof.h of CANN
ACL_API, TASK_TIME, AICORE, AICPU, L2_CACHE, HCCL = 0x1, 0x2, 0x4, 0x8, 0x10, 0x20
MSPROF_TX, RUNTIME_API, TASK_TIME_L0, MEMORY = 0x80, 0x100, 0x800, 0x1000
LEVEL0 = ACL_API | TASK_TIME_L0
LEVEL1 = ACL_API | TASK_TIME | AICORE | HCCL
MASKS = {
    "level_none": MSPROF_TX,
    "lightweight": MSPROF_TX,
    "level0": LEVEL0,
    "level1": LEVEL1,
    "level2": LEVEL1 | AICPU | RUNTIME_API,
    "mstx": LEVEL0 | MSPROF_TX,
    "included": LEVEL0 | MSPROF_TX,
    "excluded": LEVEL0 | MSPROF_TX,
    "streams": LEVEL0 | MSPROF_TX,
    "arithmetic": LEVEL1,
    "memory": LEVEL0 | MEMORY,
    "l2_cache": LEVEL0 | L2_CACHE,
}
ARITHMETIC, PIPES, NO_METRICS = 0, 1, 0xFF
METRICS = {"level1": PIPES, "level2": PIPES, "arithmetic": ARITHMETIC}
SYSTEM = {
    "memory": [(3, "50")],
    "host_sys": [(8, "cpu,mem")],
    "sys_io": [(5, "100")],
    "sys_interconnection": [(6, "50")],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_reaches_cann_as_its_bits(name: str, train: Run) -> None:
    calls = train("options").part(name)
    configs = [call for call in calls if call["call"] == "aclprofCreateConfig"]
    if name == "host":
        assert configs == []
        return
    (config,) = configs
    assert hex(config["mask"]) == hex(MASKS.get(name, LEVEL0))
    assert config["metrics"] == METRICS.get(name, NO_METRICS)
    assert config["device"] == 0
    said = [
        (call["type"], ",".join(sorted(call["value"].split(","))))
        for call in calls
        if call["call"] == "aclprofSetConfig"
    ]
    assert said == SYSTEM.get(name, [])


# Of profiler_info.json, where it differs from level0's.
COMMON: dict[str, dict[str, Any]] = {
    "host": {"activities": ["ProfilerActivity.CPU"]},
    "device": {"activities": ["ProfilerActivity.NPU"]},
    "lightweight": {"activities": ["ProfilerActivity.NPU"]},
    "shapes": {"record_shapes": True},
    "memory": {"profile_memory": True},
    "modules": {"with_modules": True},
    "stack": {"with_stack": True},
}
PIPE = {"_aic_metrics": "ACL_AICORE_PIPE_UTILIZATION"}
NONE = {"_profiler_level": "Level_none", "_mstx": True}
KEPT: dict[str, dict[str, Any]] = {
    "level_none": NONE,
    "lightweight": NONE,
    "level1": {"_profiler_level": "Level1", **PIPE},
    "level2": {"_profiler_level": "Level2", **PIPE},
    "arithmetic": {
        "_profiler_level": "Level1",
        "_aic_metrics": "ACL_AICORE_ARITHMETIC_UTILIZATION",
    },
    "mstx": {"_mstx": True},
    "streams": {"_mstx": True},
    "included": {"_mstx": True, "_mstx_domain_include": ["rlprof"]},
    "excluded": {"_mstx": True, "_mstx_domain_exclude": ["default"]},
    "db": {"_export_type": ["db"]},
    "l2_cache": {"_l2_cache": True},
    "op_attr": {"_op_attr": True, "_export_type": ["db"]},
    "raw": {"_data_simplification": False},
    "gc": {"_gc_detect_threshold": 1.5},
    "host_sys": {"_host_sys": ["cpu", "mem"]},
    "sys_io": {"_sys_io": True},
    "sys_interconnection": {"_sys_interconnection": True},
}


def ordered(config: dict[str, Any]) -> dict[str, Any]:
    return {key: sorted(v) if isinstance(v, list) else v for key, v in config.items()}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_is_kept_by_torch_npu_and_changes_nothing_else(name: str, train: Run) -> None:
    process = train("options")
    plain, mine = process.info("level0")["config"], process.info(name)["config"]
    for part, expected in (("common_config", COMMON), ("experimental_config", KEPT)):
        assert ordered(mine[part]) == ordered({**plain[part], **expected.get(name, {})})


def test_every_option_has_its_expectation() -> None:
    told = {*MASKS, *COMMON, *KEPT}
    assert {*OPTIONS} == told


def test_torch_npu_resets_no_option_and_prints_no_warning(train: Run) -> None:
    output = train("options").output
    # Of a capture without the device, and not to be avoided: torch_npu always looks at both.
    harmless = "Experimental config will not be used while ProfilerActivity.NPU is not set."
    said = [line for line in output.splitlines() if "[WARNING]" in line or "[ERROR]" in line]
    assert [line for line in said if harmless not in line] == []


def test_every_option_is_recorded_without_a_warning_of_ours(train: Run) -> None:
    process = train("options")
    for name in OPTIONS:
        trace = process.trace(name)
        assert (notes(trace), notes(trace, "error"), trace.status) == ([], [], "finished"), name


@pytest.mark.parametrize(
    ("name", "domains"),
    [
        ("mstx", {"rlprof", "default"}),
        ("included", {"rlprof"}),
        ("excluded", {"rlprof"}),
        ("level0", set()),
    ],
)
def test_filters_leave_the_domains_that_were_chosen(
    name: str, domains: set[str], train: Run
) -> None:
    said = shown(train("options").part(name))
    assert {line.split()[1] for line in said if " " in line} == domains


def test_ranges_go_into_the_stream_when_asked_for(train: Run) -> None:
    process = train("options")
    for name, on_stream in (("mstx", False), ("streams", True)):
        starts = [call for call in process.part(name) if call["call"] == "mstxRangeStart"]
        ours = {call["stream"] for call in starts if call["domain"] == "rlprof"}
        assert ours == {on_stream}


def test_the_contract_that_the_fake_is_made_from_is_that_of_the_real_one(train: Run) -> None:
    process = train("contract")
    (facts,) = (json.loads(one) for one in process.output.splitlines() if one.startswith('{"f'))
    assert facts["found"] == facts["written"]
