"""The recorder on a fake of torch_npu's MSTX: it proves which calls are made, nothing on Ascend."""

import builtins
import inspect
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.errors import RecorderError
from lightning_rlprof.marking import stage
from lightning_rlprof.recorders.mstx import MstxRecorder
from lightning_rlprof.session import Session
from lightning_rlprof.testing import FakeClock, check_recorder, make_header
from tests.recorders.fake_mstx import Mstx, install

# torch_npu 2.13.0, npu/mstx.py. Every version from 2.6.0 and the post releases 2.1.0.post13 and
# 2.5.1.post1 have these; older ones have no domain.
SIGNATURES = {
    "range_start": [("message", inspect.Parameter.empty), ("stream", None), ("domain", "default")],
    "range_end": [("range_id", inspect.Parameter.empty), ("domain", "default")],
}


@pytest.fixture
def mstx(monkeypatch: pytest.MonkeyPatch) -> Mstx:
    return install(monkeypatch)


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_fake_has_the_signatures_of_torch_npu(name: str, mstx: Mstx) -> None:
    parameters = inspect.signature(getattr(mstx, name)).parameters.values()
    assert [(given.name, given.default) for given in parameters] == SIGNATURES[name]
    assert {given.kind for given in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_spans_start_and_end_ranges_in_the_domain_rlprof_of_a_fake(
    mstx: Mstx, tmp_path: Path
) -> None:
    config = ProfilerConfig.build(profile=True)
    with Session(config, tmp_path, make_header(), [MstxRecorder()], FakeClock()) as session:
        session.begin_step(1)
        with stage("actor_update"), stage("weight_sync"):
            pass
        session.end_step()
    assert mstx.calls == [
        ("start", 1, "step", None, "rlprof"),
        ("start", 2, "actor_update", None, "rlprof"),
        ("start", 3, "weight_sync", None, "rlprof"),
        ("end", 3, "rlprof"),
        ("end", 2, "rlprof"),
        ("end", 1, "rlprof"),
    ]


def test_the_contract_leaves_no_range_of_a_fake_running(mstx: Mstx, tmp_path: Path) -> None:
    check_recorder(MstxRecorder(), tmp_path)
    assert len(mstx.calls) == 12
    assert mstx.running == {}


def test_a_range_of_a_fake_ends_when_its_span_raises(mstx: Mstx, tmp_path: Path) -> None:
    config = ProfilerConfig.build(profile=True)

    @stage("actor_update")
    def update() -> None:
        raise KeyError("reward")

    with Session(config, tmp_path, make_header(), [MstxRecorder()], FakeClock()) as session:
        session.begin_step(1)
        with pytest.raises(KeyError):
            update()
        session.end_step()
    assert [call[0] for call in mstx.calls] == ["start", "start", "end", "end"]


def test_the_fake_refuses_what_mstx_loses_in_silence(mstx: Mstx) -> None:
    number = mstx.range_start("actor_update", domain="rlprof")
    with pytest.raises(ValueError, match="does not run in 'default'"):
        mstx.range_end(number)
    with pytest.raises(ValueError, match="does not run"):
        mstx.range_end(99, domain="rlprof")
    with pytest.raises(TypeError, match="refuses 3"):
        mstx.range_start(3)  # type: ignore[arg-type]


def test_a_recorder_of_a_fake_is_pickled_without_the_module(mstx: Mstx, tmp_path: Path) -> None:
    check_recorder(pickle.loads(pickle.dumps(MstxRecorder())), tmp_path)
    assert mstx.running == {}


def test_without_torch_npu_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(RecorderError, match=r'CANN \(.*\); pip install "lightning-rlprof\[npu\]"'):
        MstxRecorder()


def test_a_torch_npu_that_cannot_start_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_cann(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("torch_npu"):
            raise RuntimeError("libhccl.so: cannot open shared object file")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_cann)
    with pytest.raises(RecorderError, match=r"CANN \(libhccl\.so: cannot open"):
        MstxRecorder()


def test_a_torch_npu_without_mstx_is_an_error_of_ours(
    mstx: Mstx, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys.modules["torch_npu.npu"], "mstx")
    with pytest.raises(RecorderError, match="cannot import name 'mstx'"):
        MstxRecorder()


def test_a_torch_npu_without_domains_is_an_error_of_ours(
    mstx: Mstx, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mstx, "range_start", lambda message, stream=None: 1)  # as 2.5.1
    with pytest.raises(RecorderError, match=r"older than its MSTX domains; pip install 'torch_npu"):
        MstxRecorder()
