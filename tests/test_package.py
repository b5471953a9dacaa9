"""The package's face: public names, lazily, and nothing that happens at import."""

import subprocess
import sys

import pytest

import lightning_rlprof


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
