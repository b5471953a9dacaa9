"""What the tests on the CANN double stand on: torch_npu in a folder of its own, and a compiler."""

import shutil
import sysconfig
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.ascend import double
from tests.doubles.cann import cann

_FOLDER = double.find_torch_npu()
_ANALYZE = double.find_msprof_analyze()

_SILENT = "NOTHING IS TESTED ON ASCEND'S OWN SOFTWARE: "
_NO_TORCH_NPU = f"{_SILENT}no torch_npu in .npu (make npu) or $RLPROF_TORCH_NPU"
_NO_COMPILER = f"{_SILENT}no gcc to build the CANN double with"
_NO_ANALYZE = "NOT READ BY ASCEND'S OWN ANALYSIS: no msprof-analyze in .npu/tools (make npu)"

Run = double.Run


@pytest.fixture(scope="session")
def torch_npu() -> Path:
    """The folder with the real torch_npu; the test is skipped, loudly, where there is none."""
    if _FOLDER is None:
        pytest.skip(_NO_TORCH_NPU)
    if shutil.which("gcc") is None:
        pytest.skip(_NO_COMPILER)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if not list(_FOLDER.glob(f"torch_npu/_C*{suffix}")):
        pytest.skip(f"{_SILENT}{_FOLDER.name} holds a torch_npu without {suffix}; rm -r .npu")
    (there,) = (found.name.split("-")[1] for found in _FOLDER.glob("torch_npu-*.dist-info"))
    here = version("torch")
    if there.split(".")[:2] != here.split(".")[:2]:
        pytest.skip(f"{_SILENT}torch_npu {there} does not work with torch {here}")
    return _FOLDER


@pytest.fixture(scope="session")
def msprof_analyze() -> Path:
    """Huawei's own consumer of captures, in an environment of its own."""
    if _ANALYZE is None:
        pytest.skip(_NO_ANALYZE)
    return _ANALYZE


@pytest.fixture(scope="session")
def library(torch_npu: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The double, with all its libraries."""
    return cann.build(tmp_path_factory.mktemp("cann"))


@pytest.fixture(scope="session")
def train(torch_npu: Path, library: Path, tmp_path_factory: pytest.TempPathFactory) -> double.Run:
    """Run ``tests.ascend.training`` with some words; one process serves all who say the same."""
    made: dict[tuple[Any, ...], double.Process] = {}

    def run(*words: str, on: Path | None = None, **changes: str | None) -> double.Process:
        key = (words, on, *sorted(changes.items(), key=str))
        if key not in made:
            folder = tmp_path_factory.mktemp("train")
            script = ["-m", "tests.ascend.training", *words]
            made[key] = double.run(script, folder, on or library, torch_npu, **changes)
        return made[key]

    return run
