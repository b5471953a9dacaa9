"""Options of an Ascend capture: their defaults, and what is refused without torch_npu."""

from typing import Any

import pytest
from pydantic import ValidationError

from lightning_rlprof.config.npu import NpuConfig
from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.config.section import explain
from tests.config.verl_blocks import new, values


def said(data: object) -> str:
    with pytest.raises(ValidationError) as caught:
        NpuConfig.model_validate(data)
    return explain(caught.value)


def test_by_default_nothing_is_asked_for_beyond_the_block() -> None:
    assert NpuConfig().model_dump() == {
        "export_types": None,
        "aic_metrics": None,
        "l2_cache": False,
        "op_attr": False,
        "with_stack": False,
        "record_op_args": False,
        "data_simplification": True,
        "gc_detect_threshold_ms": None,
        "host_sys": None,
        "sys_io": False,
        "sys_interconnection": False,
        "mstx_domain_include": None,
        "mstx_domain_exclude": None,
        "device_ranges": False,
        "analysis_timeout_s": 3600.0,
    }


GOOD: list[tuple[str, Any]] = [
    ("export_types", ["text", "db"]),
    ("aic_metrics", "MemoryAccess"),
    ("gc_detect_threshold_ms", 0),
    ("host_sys", ["cpu", "mem", "disk", "network", "osrt", "numa"]),
    ("mstx_domain_include", ["rlprof", "default"]),
    ("mstx_domain_exclude", ["communication"]),
    ("analysis_timeout_s", 60),
]


@pytest.mark.parametrize(("key", "value"), GOOD)
def test_a_key_takes_its_values(key: str, value: Any) -> None:
    assert getattr(NpuConfig.model_validate({key: value}), key) == value


BAD: list[tuple[dict[str, Any], str]] = [
    ({"export_types": []}, "export_types=[] is an empty list: name at least one, or leave it out"),
    ({"export_types": ["db", "db"]}, "export_types=['db', 'db'] names 'db' twice"),
    ({"export_types": "db"}, "export_types='db' should be a valid list"),
    ({"export_types": ["csv"]}, "export_types[0]='csv' should be 'text' or 'db'"),
    ({"aic_metrics": "pipes"}, "aic_metrics='pipes' should be 'PipeUtilization'"),
    ({"host_sys": ["gpu"]}, "host_sys[0]='gpu' should be 'cpu'"),
    ({"host_sys": ["cpu", "cpu"]}, "host_sys=['cpu', 'cpu'] names 'cpu' twice"),
    ({"gc_detect_threshold_ms": -1}, "gc_detect_threshold_ms=-1 should be greater than or equal"),
    ({"analysis_timeout_s": 0}, "analysis_timeout_s=0 should be greater than 0"),
    ({"l2_cache": "yes"}, "l2_cache='yes' should be a valid boolean; write true or false"),
    ({"l2": True}, "l2 is not a key here"),
    ({"mstx_domain_include": ["default"]}, "mstx_domain_include=['default'] leaves out our own"),
    ({"mstx_domain_exclude": ["rlprof"]}, "mstx_domain_exclude=['rlprof'] leaves out our own dom"),
    (
        {"mstx_domain_include": ["rlprof"], "mstx_domain_exclude": ["default"]},
        "mstx_domain_exclude=['default'] contradicts mstx_domain_include: give one of the two",
    ),
]


@pytest.mark.parametrize(("data", "text"), BAD)
def test_bad_input_names_its_key(data: dict[str, Any], text: str) -> None:
    assert said(data).startswith(text)


def test_an_option_of_ascend_switches_captures_on() -> None:
    assert not ProfilerConfig.build().captures
    assert ProfilerConfig.build(npu={"l2_cache": True}).captures
    assert not ProfilerConfig.build(npu={"l2_cache": True}, profile=False).captures


@pytest.mark.parametrize("stack", [True, False])
def test_contents_of_verl_choose_python_stacks(stack: bool) -> None:
    contents = ["npu", "cpu", *(["stack"] if stack else [])]
    actor = {"enable": True, "tool_config": {"npu": {"contents": contents}}}
    assert values(new(actor, tool="npu"))["npu.with_stack"] is stack
    assert ProfilerConfig.build(new(actor, tool="npu")).npu.with_stack is stack
