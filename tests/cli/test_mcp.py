"""`rlprof mcp`: the official client asks every tool of a server that may read one folder only."""

import asyncio
import os
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.cli.mcp import shortened, tokens_of
from lightning_rlprof.cli.open_run import inside
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.records.run_directory import CACHE_FOLDER
from lightning_rlprof.store.open_run import LARGE
from tests.builders.chrome import ChromeTrace
from tests.cli.test_stragglers import recorded

Run = Callable[..., tuple[int, str, str]]
Answers = dict[str, tuple[bool, str]]
ARCHIVE = Path(__file__).parents[2] / "examples" / "runs.tar.gz"
TOOLS = {"ls", "findings", "summary", "compare", "hang", "sql", "show", "config_check"}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "runs": ("ls", {}),
    "findings": ("findings", {"run": "slow"}),
    "a changed setting": ("findings", {"run": "tuned/after"}),
    "undecided": ("findings", {"run": "slow", "every": True}),
    "summary": ("summary", {"run": "slow"}),
    "a trace": ("summary", {"run": "trace.json"}),
    "gate": ("compare", {"a": "demo", "b": "demo", "fail_if_slower": "3%", "run_noise": "5%"}),
    "hang": ("hang", {"run": "demo"}),
    "tables": ("sql", {"query": "show tables", "run": "demo"}),
    "rows": ("sql", {"query": "select rank, step from spans", "run": "slow", "limit": 5}),
    "analyses": ("show", {"run": "slow"}),
    "steps": ("show", {"run": "slow", "name": "steps", "limit": 200}),
    "configuration": ("config_check", {"path": "good.yaml"}),
    "wrong configuration": ("config_check", {"path": "bad.yaml"}),
    "no such analysis": ("show", {"run": "slow", "name": "nothing"}),
    "no such run": ("summary", {"run": "nothing"}),
    "outside": ("summary", {"run": "../secret"}),
    "absolute": ("config_check", {"path": "/etc/hostname"}),
    "a link": ("findings", {"run": "linked"}),
    "a link inside": ("summary", {"run": "with a link"}),
    "a URL": ("summary", {"run": "http://127.0.0.1:1/run"}),
    "a file by SQL": ("sql", {"query": "select * from read_text('/etc/hostname')", "run": "demo"}),
    "SQL that writes": ("sql", {"query": "copy spans to 'x.csv'", "run": "demo"}),
    "arguments": ("sql", {"run": "demo"}),
}
FAILED = {*list(CALLS)[list(CALLS).index("wrong configuration") :]}


def _root(folder: Path) -> Path:
    root = folder / "runs"
    root.mkdir()
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(root, filter="data")
    (folder / "secret").mkdir()
    (folder / "secret" / "rank-00000.jsonl").write_bytes(
        (root / "demo" / "rank-00000.jsonl").read_bytes()
    )
    for at, seqs in enumerate((128, 256)):
        run, facts = root / "tuned" / ("before", "after")[at], {"max_num_seqs": seqs}
        recorded(run, steps=40, slow={2: 0.5 - at / 2}, facts=facts, unix_ns=10**18 + at)
    (root / "good.yaml").write_text("steps: [2, 3]\n")
    (root / "bad.yaml").write_text("stepz: [2]\n")
    trace = ChromeTrace()
    trace.mark("ProfilerStep#1", 10_000_000, 20_000_000)
    trace.write(root / "trace.json")
    with (root / "trace.json").open("ab") as file:  # Large enough for a cache.
        file.write(b" " * LARGE)
    return root


def _links(root: Path) -> None:
    (root / "linked").symlink_to(root.parent / "secret")
    (root / "with a link").mkdir()
    (root / "with a link" / "rank-00000.jsonl").symlink_to(
        root.parent / "secret" / "rank-00000.jsonl"
    )


def _state(folder: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            facts = os.lstat(os.path.join(place, name))
            found[os.path.join(place, name)] = (facts.st_mtime_ns, facts.st_size)
    return found


async def _ask(root: Path) -> tuple[list[Any], Answers]:
    from mcp import Client, StdioServerParameters

    words = ["-m", "lightning_rlprof", "mcp", str(root)]
    server = StdioServerParameters(command=sys.executable, args=words, cwd=root)
    answers = {}
    async with Client(server) as client:
        tools = (await client.list_tools()).tools
        for at, (name, (tool, given)) in enumerate(CALLS.items()):
            if at == 1:  # Listing all runs would find the links.
                _links(root)
            found = await client.call_tool(tool, given)
            answers[name] = (bool(found.is_error), "".join(each.text for each in found.content))
    return tools, answers


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Answers]:
    """Tools, and whether each call failed, and its text; fails if anything was written."""
    pytest.importorskip("mcp", reason="the MCP SDK is not installed: lightning-rlprof[mcp]")
    root = _root(tmp_path_factory.mktemp("mcp"))
    before = _state(root)
    found = asyncio.run(_ask(root))
    after = _state(root)
    assert {path for path in after if path not in before and "link" not in path} == set()
    assert {path: after[path] for path in before} == before
    return found


@pytest.mark.deep
def test_each_tool_has_a_schema_and_only_reads(asked: tuple[list[Any], Answers]) -> None:
    tools, _ = asked
    assert {tool.name for tool in tools} == TOOLS
    for tool in tools:
        assert tool.description
        assert tool.annotations.read_only_hint
        assert tool.input_schema["type"] == "object"
        assert all("description" in each for each in tool.input_schema["properties"].values())


@pytest.mark.deep
def test_the_official_client_gets_short_answers(asked: tuple[list[Any], Answers]) -> None:
    answers = asked[1]
    assert {name for name, (failed, _) in answers.items() if failed} == FAILED
    assert max(tokens_of(text) for _, text in answers.values()) < 2_000
    assert "straggler" in answers["findings"][1]
    assert "- Changed max\\_num\\_seqs 128 → 256: faster, step " in answers["a changed setting"][1]
    assert "actor\\_generate" in answers["summary"][1]
    assert "1 step on 1 rank" in answers["a trace"][1]
    assert answers["gate"][1].startswith("INCONCLUSIVE: ")
    assert answers["gate"][1].endswith("exit code 3: inconclusive\n")
    assert answers["rows"][1].count("\n| ") == 7
    assert answers["steps"][1].rstrip().endswith("by sql.")
    assert all(name in answers["analyses"][1] for name in ("ledger", "critical\\_path"))


@pytest.mark.deep
def test_nothing_outside_the_root_is_read(asked: tuple[list[Any], Answers]) -> None:
    answers = asked[1]
    for name in ("outside", "absolute"):
        assert "is outside of" in answers[name][1]
    for name in ("a link", "a link inside"):
        assert "is a link" in answers[name][1]
    assert "no such run" in answers["a URL"][1]


def test_a_path_is_below_the_root_and_has_no_link(tmp_path: Path) -> None:
    root = _root(tmp_path)
    assert inside(root, "slow") == root / "slow"
    assert inside(root, ".") == root
    assert inside(root, str(root / "slow")) == root / "slow"
    assert inside(root, "slow/../demo") == root / "demo"
    _links(root)
    for path in ("..", "/", "slow/../../secret", "linked", "linked/rank-00000.jsonl", "."):
        with pytest.raises(RlprofError):
            inside(root, path)
    assert not (root / CACHE_FOLDER).exists()


def test_a_long_answer_says_how_much_is_left_out() -> None:
    text = "".join(f"| {at} | row |\n" for at in range(2_000))
    short = shortened(text)
    assert text.startswith(short.rpartition("\n\n")[0])
    assert tokens_of(short) < 2_000
    shown = short.count("| row |")
    assert f"{2_000 - shown:,} more lines left out" in short
    assert shortened("a short one\n") == "a short one\n"


def test_without_the_sdk_it_says_how_to_get_it(
    rlprof: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    monkeypatch.setitem(sys.modules, "mcp", None)
    status, _, err = rlprof("mcp", tmp_path)
    assert (status, "lightning-rlprof[mcp]" in err) == (2, True)
    assert rlprof("mcp", tmp_path / "nothing")[0] == 2


def test_help_for_agents_is_the_skill(rlprof: Run) -> None:
    status, out, _ = rlprof("help", "agents")
    assert (status, out.startswith("---\nname: rlprof\n")) == (0, True)
    assert tokens_of(out) < 2_000
