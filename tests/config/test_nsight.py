import pytest
from pydantic import ValidationError

from lightning_rlprof.config.nsight import NsightConfig
from lightning_rlprof.config.section import explain


def said(data: object) -> str:
    with pytest.raises(ValidationError) as caught:
        NsightConfig.model_validate(data)
    return explain(caught.value)


def test_defaults_are_verls() -> None:
    trace = {
        "trace": "cuda,nvtx,cublas,ucx",
        "cuda-memory-usage": "true",
        "cuda-graph-trace": "graph",
    }
    assert NsightConfig().controller == trace
    capture = {"capture-range": "cudaProfilerApi", "capture-range-end": None, "kill": "none"}
    assert NsightConfig().worker == {**trace, **capture}


def test_reports_are_collected_from_rays_directory_at_the_end() -> None:
    config = NsightConfig()
    assert (config.collect, config.reports, config.wait_s) == (True, None, 30.0)
    given = NsightConfig(collect=False, reports="/data", wait_s=0)
    assert (given.collect, given.reports, given.wait_s) == (False, "/data", 0.0)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ({"collect": "yes"}, "collect='yes' should be a valid boolean; write true or false"),
        ({"wait_s": -1}, "wait_s=-1 should be greater than or equal to 0"),
        ({"wait_s": "30"}, "wait_s='30' should be a valid number"),
        ({"reports": ""}, "reports='' should have at least 1 character"),
        ({"reports": 3}, "reports=3 should be a valid string"),
        ({"wait": 1}, "wait is not a key here; did you mean 'wait_s'?"),
        ({"workers": {}}, "workers is not a key here; did you mean 'worker'?"),
    ],
)
def test_bad_input_names_its_key(data: object, part: str) -> None:
    assert said(data).startswith(part)


def test_options_are_laid_over_the_defaults() -> None:
    config = NsightConfig.model_validate({"worker": {"trace": "nvtx", "gpu-metrics-device": "all"}})
    assert config.worker["trace"] == "nvtx"
    assert config.worker["gpu-metrics-device"] == "all"
    assert config.worker["kill"] == "none"


def test_null_leaves_an_option_out() -> None:
    assert NsightConfig(controller={"trace": None}).controller["trace"] is None


def test_underscores_in_an_option_are_dashes() -> None:
    config = NsightConfig(controller={"cuda_memory_usage": "false"})
    assert config.controller["cuda-memory-usage"] == "false"
    assert "cuda_memory_usage" not in config.controller


@pytest.mark.parametrize(("value", "quoted"), [(True, "true"), (6, "6"), (False, "false")])
def test_a_value_that_is_no_text_is_refused(value: object, quoted: str) -> None:
    text = said({"worker": {"cuda-memory-usage": value}})
    expected = f"={value!r} must be text: put it into quotes, '{quoted}'"
    assert text == f"worker.cuda-memory-usage{expected}"


@pytest.mark.parametrize(
    "value", ["a;b", "$(id)", "a b", "`x`", "a|b", "a&", "x>y", "a\nb", "", "*"]
)
def test_what_a_shell_would_interpret_is_refused(value: str) -> None:
    text = said({"controller": {"trace": value}})
    assert text.startswith(f"controller.trace={value!r} may hold only letters, digits and ")


@pytest.mark.parametrize("value", ["cuda,nvtx", "/data/%p", "rlprof.capture@rlprof", "repeat:6"])
def test_usual_values_pass(value: str) -> None:
    assert NsightConfig(controller={"trace": value}).controller["trace"] == value


@pytest.mark.parametrize("key", ["--trace", "a;b", "Trace", 3])
def test_an_option_is_a_long_name_without_dashes_in_front(key: object) -> None:
    assert said({"controller": {key: "x"}}).startswith(f"controller.{key} is no option of nsys")


def test_a_near_option_is_offered() -> None:
    assert said({"controller": {"Trace": "x"}}).endswith("; did you mean 'trace'?")


def test_options_are_a_mapping() -> None:
    assert said({"worker": "nvtx"}).startswith("worker='nvtx' is no mapping of nsys options")


@pytest.mark.parametrize("value", ["nvtx", None])
def test_the_capture_range_of_workers_is_fixed(value: object) -> None:
    text = said({"worker": {"capture-range": value}})
    assert text.startswith(f"worker.capture-range={value!r} must stay 'cudaProfilerApi'")
