"""What the libraries behind a URL log of it; nobody listens at port 1."""

import logging
from collections.abc import Iterator

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load

pytest.importorskip("aiohttp", reason="aiohttp is not installed")


@pytest.fixture
def logs(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    before = logging.getLogRecordFactory()
    with caplog.at_level(logging.DEBUG):
        yield caplog
    logging.setLogRecordFactory(before)


@pytest.mark.parametrize(
    "url",
    [
        "http://someone:hunter2hunter2@127.0.0.1:1/none.json",
        "http://someone:hunter2hunter2@127.0.0.1:1/none/",
        "http://127.0.0.1:1/none.json?X-Amz-Signature=hunter2hunter2&x=1",
        "http://hunter2hunter2hunter2@127.0.0.1:1/x.json",
        "filecache::http://someone:hunter2hunter2@127.0.0.1:1/none.json",
    ],
)
def test_no_log_holds_a_credential_of_a_url(url: str, logs: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TraceError, match=r"127\.0\.0\.1:1"):
        load(url)
    try:
        raise OSError(url)
    except OSError:
        logging.getLogger("aiohttp.client").exception("late, from %s", url)
    assert "fsspec" in {record.name.partition(".")[0] for record in logs.records}
    assert "late, from " in logs.text
    assert "OSError: " in logs.text
    assert "hunter2" not in logs.text


def test_logs_of_others_stay_as_they_are(logs: pytest.LogCaptureFixture) -> None:
    """Whatever other tests have opened: this word is in none of their addresses."""
    with pytest.raises(TraceError):
        load("http://someone:hunter2hunter2@127.0.0.1:1/none.json")
    try:
        raise OSError("mine")
    except OSError:
        logging.getLogger("mine").exception("%d of %s", 3, "swordfish")
    (own,) = (record for record in logs.records if record.name == "mine")
    assert (own.msg, own.args) == ("%d of %s", (3, "swordfish"))
    assert own.exc_info
