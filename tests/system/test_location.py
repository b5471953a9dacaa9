import pickle
import string
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.system.location import RemotePath, place, scrubbed, secrets_of

SECRETS = st.text(string.ascii_letters + string.digits + "/+=@%~-_.", min_size=8, max_size=40)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        ("hdfs:///user/runs/x", "hdfs:///user/runs/x"),
        ("hdfs://namenode:8020/a@b/run", "hdfs://namenode:8020/a@b/run"),
        ("simplecache::s3://b/x.json.gz", "simplecache::s3://b/x.json.gz"),
        ("s3://KEY:SE/CR+ET@bucket/run", "s3://bucket/run"),
        ("ftp://me:p@ss@host:21/run", "ftp://host:21/run"),
        ("ftp://me:it's a <secret>@host/run", "ftp://host/run"),
        ("https://TOKEN@host/x.json", "https://host/x.json"),
        ("https://host/x.json?X-Amz-Signature=abc&b=c", "https://host/x.json?***"),
        ("https://host/x.json?sig=it's a secret", "https://host/x.json?***"),
        ("abfs://container@account.dfs.net/run", "abfs://container@account.dfs.net/run"),
        ("zip://a.json::https://u:pass@host/x.zip", "zip://a.json::https://host/x.zip"),
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


@given(SECRETS, st.booleans())
def test_no_secret_of_a_url_is_left_in_a_text(secret: str, query: bool) -> None:
    url = f"https://host/x?key={secret}" if query else f"s3://someone:{secret}@bucket/run"
    for text in (url, f"403 for url=URL('{url}')", f"no such key:\n{secret} ({url})"):
        said = scrubbed(text, url)
        assert "\n" not in said
        for each in secrets_of(url):
            assert each not in said.replace("https://host/x?", "").replace("s3://bucket/run", "")


@pytest.mark.parametrize(
    "text",
    [
        "aws_secret_access_key=hunter2222",
        "{'Authorization': 'Bearer hunter2222'}",
        'token: "hunter2222"',
        "?sig=hunter2222&x=1",
        "SharedAccessSignature=hunter2222;x",
    ],
)
def test_values_of_what_is_called_a_secret_are_hidden(text: str) -> None:
    assert "hunter2222" not in scrubbed(text)
    assert "***" in scrubbed(text)


def test_secrets_of_the_environment_and_of_fsspec_are_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2222")
    conf = SimpleNamespace(conf={"s3": {"client": {"secret": "hunter3333", "retries": 5}}})
    monkeypatch.setitem(sys.modules, "fsspec", SimpleNamespace(config=conf))
    assert scrubbed("hunter2222 is not\n hunter3333") == "*** is not ***"


def test_a_text_without_secrets_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "my-bucket")
    assert str(place("s3://my-bucket/run")) == "s3://my-bucket/run"
    text = "NoSuchBucket: The specified bucket does not exist (s3://bucket/run, retries=5)"
    assert scrubbed(text, "s3://bucket/run") == text


def test_the_rooms_import_no_library_before_it_is_needed() -> None:
    code = (
        "import sys; import lightning_rlprof.records.upload, lightning_rlprof.system.remote_files\n"
        "heavy = {'fsspec', 'aiohttp', 'numpy', 'torch'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
