import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.system.location import RemotePath, place, redact


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        ("hdfs:///user/runs/x", "hdfs:///user/runs/x"),
        ("hdfs://namenode:8020/a@b/run", "hdfs://namenode:8020/a@b/run"),
        ("sftp://me@host/run", "sftp://host/run"),
        ("simplecache::s3://b/x.json.gz", "simplecache::s3://b/x.json.gz"),
        ("https://host/x.json?X-Amz-Signature=abc&b=c", "https://host/x.json?***"),
        ("abfs://container@account.dfs.net/run", "abfs://container@account.dfs.net/run"),
    ],
)
def test_a_url_is_a_path_that_shows_no_credentials(url: str, shown: str) -> None:
    path = place(url)
    assert isinstance(path, RemotePath)
    assert (str(path), path.url) == (shown, url)
    assert path.name == shown.partition("?")[0].rpartition("/")[2]
    again = pickle.loads(pickle.dumps(path))
    assert (str(again), again.url) == (shown, url)


@pytest.mark.parametrize("text", ["profiler_data", "a/b:c", "C:/x", "x:y", "/a//b", "s3:/b/run"])
def test_everything_else_is_a_path_here(text: str) -> None:
    for given_as in (text, Path(text)):
        path = place(given_as)
        assert path == Path(text)
        assert not isinstance(path, RemotePath)


def test_a_path_made_of_a_url_is_a_path_like_others() -> None:
    path = place("s3://bucket/run.jsonl")
    assert place(path) is path
    assert (path.suffix, str(path.parent)) == (".jsonl", "s3:/bucket")
    assert pickle.loads(pickle.dumps(path.parent)) == path.parent


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://KEY:hunter2@bucket/run", "s3://bucket/run"),
        ("s3://KEY:hun/ter2+x@bucket/run", "s3://bucket/run"),
        ("ftp://me:hun@ter2@host:21/run", "ftp://host:21/run"),
        ("https://hunter2@host/x.json", "https://host/x.json"),
        ("https://me:hunter2@host/x.json?sig=hunter2", "https://host/x.json?***"),
        ("zip://a.json::https://u:hunter2@host/x.zip", "zip://a.json::https://host/x.zip"),
        ("zip://a.json::https://hunter2@host/x.zip", "zip://a.json::https://host/x.zip"),
    ],
)
def test_a_url_with_credentials_is_refused_and_not_shown(url: str, shown: str) -> None:
    with pytest.raises(TraceError) as caught:
        place(url)
    assert str(caught.value).startswith(f"{shown}: the URL contains credentials")
    assert "ter2" not in str(caught.value)
    for text in (url, f"403 for url=URL('{url}')", f"no such key:\n{url} '{url}'"):
        assert redact(text) == text.replace(url, shown)


@pytest.mark.parametrize(
    "text",
    [
        "NoSuchBucket: The specified bucket does not exist (s3://bucket/run, retries=5)",
        "a/b:c@d and someone@example.com, at 12:30",
    ],
)
def test_a_text_without_credentials_stays_as_it_is(text: str) -> None:
    assert redact(text) == text


def test_a_url_that_became_a_path_is_redacted_too() -> None:
    assert redact(str(Path("s3://KEY:hunter2@bucket/run"))) == "s3:/bucket/run"


def test_the_rooms_import_no_library_before_it_is_needed() -> None:
    code = (
        "import sys; import lightning_rlprof.records.upload, lightning_rlprof.system.remote_files\n"
        "heavy = {'fsspec', 'aiohttp', 'numpy', 'torch'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
