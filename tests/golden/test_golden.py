"""Each contract is still what its golden file says; `golden` explains how."""

from pathlib import Path

import pytest

from tests.golden.contracts import CONTRACTS
from tests.golden.golden import EXPECTED, difference, text_of
from tests.golden.inputs import write_inputs

# The quick suite has the other half; doctor imports every framework.
_DEEP = {"nsys", "ascend", "doctor"}


def _marks(name: str) -> list[pytest.MarkDecorator]:
    path = Path(name)
    return [pytest.mark.deep] if _DEEP & {path.parent.name, path.stem} else []


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.mark.parametrize("name", [pytest.param(n, marks=_marks(n)) for n in CONTRACTS])
def test_a_contract_holds(name: str, inputs: Path) -> None:
    changed = difference(name, text_of(CONTRACTS[name], inputs))
    assert not changed, changed


def test_each_golden_file_has_a_contract() -> None:
    files = {path.relative_to(EXPECTED).as_posix() for path in EXPECTED.rglob("*.*")}
    assert files == CONTRACTS.keys()
