"""Who may read what `rlprof serve` shows: methods, Host headers, tokens."""

import pytest

from lightning_rlprof.cli.serve.access import Guard, is_loopback, own_names
from tests.builders.asgi import ask

TOKEN = "s3cret"


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"inside"})


def guard(token=None):
    return Guard(app, ["train-7", ""], token)


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
    assert ask(guard(), "/", host=(b"host", host.encode())).body == "inside"


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
    assert ask(guard(), "/", host=(b"host", host.encode())).status == 421


def test_a_request_has_exactly_one_host():
    assert ask(guard(), "/", host=None).status == 421
    assert ask(guard(), "/", (b"host", b"evil.example")).status == 421


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "get"])
def test_nothing_can_be_changed(method):
    answer = ask(guard(), "/", method=method)
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "headers",
    [
        (b"authorization", b"Bearer s3cret"),
        (b"authorization", b"bearer  s3cret"),
        (b"cookie", b"other=1; rlprof-token=s3cret"),
    ],
)
def test_a_client_that_knows_the_token_is_answered(headers):
    assert ask(guard(TOKEN), "/", headers).body == "inside"


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        ("/", []),
        ("/?token=", []),
        ("/?token=s3cre", []),
        ("/?token=s3cretx", []),
        ("/", [(b"authorization", b"s3cret")]),
        ("/", [(b"authorization", b"Basic s3cret")]),
        ("/", [(b"authorization", b"Bearer \xff")]),
        ("/", [(b"cookie", b"rlprof-token=wrong")]),
        ("/", [(b"cookie", b"\x00=;;\xff")]),
    ],
)
def test_a_client_that_does_not_know_it_is_refused(target, headers):
    answer = ask(guard(TOKEN), target, *headers)
    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert TOKEN not in answer.body


def test_a_link_with_the_token_becomes_a_cookie_and_leaves_the_address():
    answer = ask(guard(TOKEN), "/report?token=s3cret")
    assert (answer.status, answer.headers["location"]) == (303, "/report")
    assert answer.headers["set-cookie"] == (
        "rlprof-token=s3cret; Path=/; HttpOnly; SameSite=Strict"
    )


@pytest.mark.parametrize("path", ["//evil.example/", "///evil.example", "/\r\nset-cookie: a=b"])
def test_a_link_leads_nowhere_else(path):
    location = ask(guard(TOKEN), f"{path}?token=s3cret").headers["location"]
    assert location.startswith("/")
    assert not location.startswith("//")
    assert "\n" not in location


def test_without_a_token_none_is_asked_for_or_set():
    assert ask(guard(), "/?token=x").body == "inside"


def test_every_answer_forbids_frames_and_caches():
    for answer in (ask(guard(), "/"), ask(guard(TOKEN), "/"), ask(guard(), "/", host=None)):
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_only_loopback_needs_no_token():
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.0.1", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "train-7", "localhost.evil")))
    assert "train-7" in own_names("train-7")
