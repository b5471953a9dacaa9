"""No command shows what is secret in a URL, wherever among its words that stands."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer

from lightning_rlprof.cli.app import app
from lightning_rlprof.errors import TraceError
from lightning_rlprof.store.ingest import ingest

Run = Callable[..., tuple[int, str, str]]
URLS = (
    "ftp://user:hunter2secret@127.0.0.1:1/runs/x?sig=SIGSECRET",
    "ftp://hunter2secret@127.0.0.1:1/x",
    "s3://AKIA:hunter2secret/with+slash@no-bucket",
)
NONE = "/no/such/place"


def lines() -> Iterator[tuple[str, ...]]:
    """Yield, with URL where one stands, the words of every command, and of each of its options."""
    root: Any = typer.main.get_command(app)
    config = root.commands["config"].commands
    commands = root.commands | {f"config {name}": each for name, each in config.items()}
    del commands["config"]
    yield ("URL",)
    for name, command in commands.items():
        needed = [each for each in command.params if each.param_type_name == "argument"]
        if name != "nsys":  # whose words are a command line, to be shown and run
            yield (*name.split(), *["URL"] * max(1, len(needed)))
        for each in command.params:
            if each.param_type_name == "option" and not each.is_flag:
                yield (*name.split(), each.opts[-1], "URL", *[NONE] * len(needed))


@pytest.mark.parametrize("words", list(lines()), ids=" ".join)
def test_no_command_shows_credentials(rlprof: Run, words: tuple[str, ...]) -> None:
    for url in URLS:
        status, out, err = rlprof(*(url if word == "URL" else word for word in words))
        said = "".join(filter(str.isalnum, out + err))
        assert status != 0
        assert "hunter2" not in said
        assert "SIGSECRET" not in said


@pytest.mark.parametrize("command", ["ingest", "ascend parse", "config check"])
def test_a_command_that_needs_a_local_path_refuses_a_url(rlprof: Run, command: str) -> None:
    status, out, err = rlprof(*command.split(), "ftp://127.0.0.1:1/runs/x?sig=SIGSECRET")
    assert (status, out) == (2, "")
    text = "ftp://127.0.0.1:1/runs/x?*** is a URL, but a local path is required; download it first"
    assert text in err


def test_only_a_run_of_this_machine_is_uploaded(rlprof: Run) -> None:
    url = "ftp://127.0.0.1:1/runs/x?sig=SIGSECRET"
    status, out, err = rlprof("export", url, "--to", "s3://bucket/runs")
    assert (status, out, "SIGSECRET" in err) == (2, "", False)
    assert err.startswith("rlprof: error: 'ftp://127.0.0.1:1/runs/x?***' is not a directory of")


def test_ingest_refuses_a_url_without_showing_its_credentials() -> None:
    with pytest.raises(TraceError, match=r"^s3://no-bucket: the URL contains credentials"):
        ingest([URLS[2]])
