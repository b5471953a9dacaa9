"""`rlprof throughput`: tokens per second, and MFU where FLOPs and the device are stated."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.test_run import recorded

Run = Callable[..., tuple[int, str, str]]


def test_stated_parameters_and_peak_give_mfu(rlprof: Run, tmp_path: Path) -> None:
    run = recorded(tmp_path).path

    plain = json.loads(rlprof("throughput", run, "--json")[1])["tables"][0]
    stated = json.loads(
        rlprof("throughput", run, "--json", "--parameters", "1e9", "--peak-tflops", "100")[1]
    )["tables"][0]

    names = [column["name"] for column in plain["columns"]]
    assert "MFU" in names
    assert plain["abstained"] is stated["abstained"] is None
    assert all(row[names.index("MFU")] is None for row in plain["rows"])
    status, out, err = rlprof("throughput", run)
    assert (status, err) == (0, "")
    assert out.startswith(f"{run}: tokens per second, and MFU\n")


@pytest.mark.parametrize("option", ["--parameters", "--peak-tflops"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_numbers_that_make_no_sense_are_refused(
    option: str, value: str, rlprof: Run, tmp_path: Path
) -> None:
    status, out, err = rlprof("throughput", recorded(tmp_path).path, option, value)
    assert (status, out) == (1, "")
    assert err.startswith(f"rlprof: {option} ")
    instance = {"--parameters": "7.6e9", "--peak-tflops": "989"}[option]
    assert err.endswith(f": takes a number above 0 and below 1e18, for instance {instance}\n")
