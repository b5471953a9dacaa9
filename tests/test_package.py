"""The package's face: public names, lazily, and nothing that happens at import."""

import re
import subprocess
import sys

import pytest
from packaging.version import Version

import lightning_rlprof
from tests.places import ROOT

TOP = ROOT
UNTESTED = {"torch", "torch_npu", "ray", "reasoning-gym"}


@pytest.mark.parametrize("name", lightning_rlprof.__all__)
def test_every_public_name_can_be_used(name):
    value = getattr(lightning_rlprof, name)
    assert value is getattr(lightning_rlprof, name)
    assert name in dir(lightning_rlprof)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'stagee'"):
        _ = lightning_rlprof.stagee


def test_marking_stages_imports_neither_torch_nor_lightning():
    code = (
        "import sys; from lightning_rlprof import stage, mark, count, annotate\n"
        "with stage('a'): pass\n"
        "heavy = {'torch', 'pytorch_lightning', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_lowest_versions_that_are_allowed_are_tested():
    asked = (TOP / "pyproject.toml").read_text()
    asked = asked[asked.index("\ndependencies = [") : asked.index("\ndocs = [")]
    lowest = dict(re.findall(r'"([\w-]+)(?:\[\w+\])?>=([\d.]+)', asked))
    tested = dict(re.findall(r"^([\w-]+)==([\d.]+)", (TOP / "oldest.txt").read_text(), re.M))
    assert len(lowest) > 10
    for name in lowest.keys() - UNTESTED:
        assert Version(tested[name.lower()]) == Version(lowest[name]), name
