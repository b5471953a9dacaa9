"""Who may read what `rlprof serve` shows: methods, Host headers, tokens."""

import os
import stat
from http import HTTPStatus
from pathlib import Path

import pytest

from lightning_rlprof.cli.serve.access import (
    Guard,
    is_loopback,
    own_names,
    scraper_token,
    scraper_token_path,
)
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.system.http_server import Answer, Request
from tests.builders.http_client import Got, ask

TOKEN, SCRAPER = "s3cret", "of-scrapers"
BEARER = ("authorization", f"Bearer {TOKEN}")


async def inside(request: Request) -> Answer:
    return Answer(HTTPStatus.OK, b"inside")


def asked(target: str, *fields: tuple[str, str], **options: tuple[str, str] | None) -> Got:
    return ask(Guard(inside, ["train-7", ""], [TOKEN, SCRAPER]), target, *fields, **options)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:80",
        "127.0.0.1:9",
        "10.0.0.7",
        "[::1]:8321",
        "[fe80::1]",
        "Train-7:1",
    ],
)
def test_names_of_this_host_and_addresses_are_answered(host):
    assert asked("/", BEARER, host=("host", host)).body == "inside"


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "localhost:80.evil.example",
        "localhost@evil.example",
        "[::1].evil.example",
        "[::1",
        "",
        "evil.example#localhost",
    ],
)
def test_a_name_that_was_pointed_here_is_refused(host):
    assert asked("/", BEARER, host=("host", host)).status == 421


def test_a_request_has_exactly_one_host():
    assert asked("/", BEARER, host=None).status == 421
    assert asked("/", BEARER, ("host", "evil.example")).status == 421


@pytest.mark.parametrize(
    "field",
    [
        BEARER,
        ("authorization", "bearer  s3cret"),
        ("authorization", f"Bearer {SCRAPER}"),
        ("cookie", "other=1; rlprof-token-8321=s3cret"),
        ("cookie", "rlprof-token-8321=s3cret;other=" + '"\\' * 30_000),
        ("cookie", "=;;\\;" + '"' * 4000 + ";rlprof-token-8321=s3cret"),
    ],
)
def test_a_client_that_knows_a_token_is_answered(field):
    assert asked("/", field).body == "inside"


@pytest.mark.parametrize(
    ("target", "fields"),
    [
        ("/", []),
        ("/?token=", []),
        ("/?token=s3cre", []),
        ("/?token=s3cretx", []),
        ("/?token=" + "%" * 60_000, []),
        ("/?" + "&" * 60_000 + "token=s3cret", []),
        ("/", [("authorization", "s3cret")]),
        ("/", [("authorization", "Basic s3cret")]),
        ("/", [("authorization", "Bearer \xff")]),
        ("/", [("cookie", "rlprof-token-8321=wrong")]),
        ("/", [("cookie", "rlprof-token-8322=s3cret")]),
        ("/", [("cookie", "\x00=;;\xff")]),
        ("/", [("cookie", '"\\' * 30_000)]),
        ("/", [("cookie", "a" * 4096 + ";rlprof-token-8321=s3cret")]),
    ],
)
def test_a_client_that_does_not_know_it_is_refused(target, fields):
    answer = asked(target, *fields)
    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert TOKEN not in answer.body


def test_the_secret_is_looked_for_before_anything_else():
    assert asked("/", host=("host", "evil.example")).status == 401


def test_a_link_with_the_token_becomes_a_cookie_and_leaves_the_address():
    answer = asked("/report?token=s3cret")
    assert (answer.status, answer.headers["location"]) == (303, "/report")
    assert answer.headers["set-cookie"] == (
        "rlprof-token-8321=s3cret; Path=/; HttpOnly; SameSite=Strict"
    )
    plain = asked("/?token=s3cret", host=("host", "[::1]"))
    assert plain.headers["set-cookie"].startswith("rlprof-token-80=s3cret;")


def test_an_old_link_does_not_replace_the_cookie():
    assert asked("/?token=old", ("cookie", "rlprof-token-8321=s3cret")).body == "inside"


@pytest.mark.parametrize("path", ["//evil.example/", "///evil.example"])
def test_a_link_leads_nowhere_else(path):
    location = asked(f"{path}?token=s3cret").headers["location"]
    assert location.startswith("/")
    assert not location.startswith("//")


def test_every_answer_forbids_frames():
    for answer in (asked("/"), asked("/", BEARER), asked("/", BEARER, host=None)):
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the secret of scrapers will be."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state/rlprof/scraper-token"


def test_the_secret_of_scrapers_is_made_once_for_its_user_alone(state):
    token = scraper_token()
    assert len(token) > 40
    assert scraper_token() == token
    assert scraper_token_path() == state
    assert state.read_text() == f"{token}\n"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (state, state.parent)] == [0o600, 0o700]


def test_it_is_in_the_home_of_the_user(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert scraper_token_path() == tmp_path / ".local/state/rlprof/scraper-token"


def test_without_a_home_there_is_none(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    with pytest.raises(RlprofError, match="'state/rlprof/scraper-token' is not absolute"):
        scraper_token()


def with_mode(path: Path) -> None:
    path.write_text("a" * 43)
    path.chmod(0o640)


def as_link(path: Path) -> None:
    other = path.with_name("other")
    other.write_text("a" * 43)
    other.chmod(0o600)
    path.symlink_to(other)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (with_mode, "others can read '"),
        (as_link, "cannot open '"),
        (os.mkfifo, "cannot open '"),
        (os.mkdir, "cannot open '"),
    ],
)
def test_what_is_not_a_file_of_this_user_alone_is_no_secret(make, says, state):
    state.parent.mkdir(parents=True)
    make(state)
    with pytest.raises(RlprofError, match=says):
        scraper_token()


@pytest.mark.parametrize("text", [b"short", b"\xff" * 40, b"a b " * 20, b"a\nb" * 20])
def test_a_file_with_something_else_is_no_secret(text, state):
    state.parent.mkdir(parents=True)
    state.touch(0o600)
    state.write_bytes(text)
    with pytest.raises(RlprofError, match="contains no secret"):
        scraper_token()


def test_a_file_of_another_user_is_refused(state, monkeypatch):
    scraper_token()
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    with pytest.raises(RlprofError, match="is not a file of yours"):
        scraper_token()


def test_only_loopback_is_not_reached_from_elsewhere():
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.0.1", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "train-7", "localhost.evil")))
    assert "train-7" in own_names("train-7")
