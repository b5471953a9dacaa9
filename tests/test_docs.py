"""Pages are true: their Python runs, their YAML is valid, their commands and links exist."""

import ast
import inspect
import itertools
import json
import re
import runpy
import shlex
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml

from lightning_rlprof.analysis.catalog import ANALYSES
from lightning_rlprof.analysis.diagnosis.diagnosis import PROBLEMS
from lightning_rlprof.analysis.stages import stages
from lightning_rlprof.cli.app import app
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.notes import Code
from tests.builders.runs import grpo_run
from tests.places import ROOT, SHARED_DATA

PAGES = [
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    if path.is_file() and ".zh" not in path.name  # test_chinese: their code is that of the English
]
CHINESE = [*ROOT.glob("*.zh-CN.md"), *ROOT.glob("docs/**/*.zh.md")]
REAL = SHARED_DATA / "kineto" / "h100_qwen1.5-0.5b.json.gz"
FLAGS = re.MULTILINE | re.DOTALL
FENCE = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```", FLAGS)


def blocks(text: str, *languages: str) -> list[str]:
    """Return the fenced blocks of a page in these languages."""
    return [body for _, language, body in FENCE.findall(text) if language in languages]


def pages_with(*languages: str) -> list[Path]:
    return [page for page in PAGES if blocks(page.read_text(), *languages)]


def by_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", pages_with("python"), ids=by_name)
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profiler.yaml").write_text("integrated: {stage: actor_update}\n")
    namespace: dict[str, object] = {"__name__": "page"}
    for block in blocks(page.read_text(), "python"):
        exec(compile(block, by_name(page), "exec"), namespace)


NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))


@pytest.mark.deep
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=by_name)
def test_a_notebook_runs_in_a_real_kernel_and_is_kept_with_what_it_shows(
    notebook: Path, tmp_path: Path
) -> None:
    kept, made = outputs_of(nbformat_read(notebook)), outputs_of(executed(notebook, tmp_path))
    kinds = [[[each["output_type"] for each in cell] for cell in cells] for cells in (kept, made)]
    assert kinds[0] == kinds[1], "after a change: jupyter execute --inplace notebooks/*.ipynb"
    assert any("text/html" in each.get("data", {}) for cell in kept for each in cell)


@pytest.mark.deep
@pytest.mark.skipif(not REAL.is_file(), reason="no real traces in ../shared/data/kineto")
def test_the_notebook_of_offline_analysis_runs_on_a_real_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(REAL, tmp_path)
    monkeypatch.setenv("RLPROF_TRACE", str(tmp_path / REAL.name))
    shown = str(outputs_of(executed(ROOT / "notebooks/offline_analysis.ipynb", tmp_path)))
    assert "flash" in shown or "gemm" in shown, "its kernels"


def nbformat_read(notebook: Path) -> Any:
    import nbformat

    return nbformat.read(notebook, 4)  # type: ignore[no-untyped-call]


def executed(notebook: Path, folder: Path) -> Any:
    """Return a notebook as a kernel of Jupyter leaves it that runs in a copy of its folder."""
    import nbclient

    for name in ("notebooks", "examples"):  # a notebook may read ../examples
        shutil.copytree(ROOT / name, folder / name, dirs_exist_ok=True)
    found, place = nbformat_read(notebook), {"metadata": {"path": str(folder / "notebooks")}}
    client = nbclient.NotebookClient(
        found, timeout=300, startup_timeout=300, resources=place,
        coalesce_streams=True,  # a kernel sends what is printed every 0.2 s
    )  # fmt: skip
    return client.execute()


def outputs_of(notebook: Any) -> list[list[Any]]:
    """Return what each cell of code shows; all have run, in order, and warned of nothing."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    errors = [each for cell in cells for each in cell.outputs if each.get("name") == "stderr"]
    lines = [line for each in errors for line in each.text.splitlines()]
    assert [line for line in lines if not line.startswith("USDT:")] == []  # torch's, in C++
    return [[each for each in cell.outputs if each not in errors] for cell in cells]


@pytest.mark.parametrize("page", pages_with("yaml"), ids=by_name)
def test_the_yaml_of_a_page_is_a_configuration(page: Path) -> None:
    for block in blocks(page.read_text(), "yaml"):
        check_yaml(yaml.safe_load(block))


@pytest.mark.parametrize("page", pages_with("bash", "console"), ids=by_name)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    for block in blocks(page.read_text(), "bash", "console"):
        for words in commands(block):
            check_command(words)


# What zsh would take for a pattern of file names; without a file it runs nothing.
UNQUOTED = re.compile(r"""(?:'[^']*'|"[^"]*"|#.*)|(\S*[\[\]?*]\S*)""")
FILES_THERE = {"dist/*.whl"}


def shell_lines(text: str) -> Iterator[str]:
    """Yield the lines of a page that a reader types, those inside of sentences, too."""
    for block in blocks(text, "bash", "sh", "shell"):
        yield from block.splitlines()
    for block in blocks(text, "console"):
        yield from (line[2:] for line in block.splitlines() if line.startswith("$ "))
    for block in blocks(text, "text"):
        yield from (line for line in block.splitlines() if line.startswith("rlprof "))
    yield from re.findall(r"`(rlprof [^`\n]+)`", re.sub(FENCE, "", text))


@pytest.mark.parametrize("page", PAGES + CHINESE, ids=by_name)
def test_a_command_of_a_page_can_be_typed_into_zsh(page: Path) -> None:
    if page.name == "cli.md":  # generated: its usage lines have optional words in brackets
        return
    found = [word for line in shell_lines(page.read_text()) for word in UNQUOTED.findall(line)]
    assert {word for word in found if word} - FILES_THERE == set()


GUIDES = [*sorted(ROOT.glob("docs/guides/*.md")), ROOT / "docs" / "faq.md"]
GUIDES = [page for page in GUIDES if page.is_file() and ".zh" not in page.name]


@pytest.mark.parametrize("page", GUIDES, ids=by_name)
def test_commands_in_the_sentences_of_a_guide_exist(page: Path) -> None:
    commands = re.findall(r"`(rlprof [^`]+)`", re.sub(FENCE, "", page.read_text()))
    assert commands
    for command in commands:
        words = shlex.split(command)
        check_command(words[: words.index("--")] if "--" in words else words)
        if words[:2] == ["rlprof", "show"] and len(words) > 3:
            assert words[3] in ANALYSES, command


def test_every_analysis_is_in_the_list_of_analyses() -> None:
    rows = re.findall(r"^\| \[(.+?)\]\(", text_of("docs/analyses/index.md"), re.MULTILINE)
    assert sorted(name for row in rows for name in row.split(", ")) == sorted(ANALYSES)


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/*.md")), ids=by_name)
def test_a_heading_after_a_table_is_no_row_of_it(page: Path) -> None:
    assert re.findall(r"^\|.*\n#+ .*", re.sub(FENCE, "", page.read_text()), re.MULTILINE) == []


def test_every_rule_of_the_tuning_guide_has_an_anchor_and_settings() -> None:
    for page in ("docs/guides/tuning.md", "docs/guides/tuning.zh.md"):
        found = re.findall(r'^\| <a id="([a-z0-9-]+)"></a>`\1` \|', text_of(page), re.MULTILINE)
        assert len(found) == len(set(found)) > 60
        assert re.findall(r"^\| `([a-z0-9-]+)` \|", text_of(page), re.MULTILINE) == found


def test_settings_of_trl_and_lightning_in_the_tuning_guide_exist() -> None:
    import pytorch_lightning.strategies
    from torch.utils.data import DataLoader
    from trl.trainer.grpo_config import GRPOConfig

    rows = re.findall(r"^\| `[a-z0-9-]+` \|(.*)\|$", text_of("docs/guides/tuning.md"), re.MULTILINE)
    cells = [re.split(r"(?<!\\)\|", row) for row in rows]
    fields = GRPOConfig.__dataclass_fields__
    of_trl = [name for row in cells for name in re.findall("`([a-z_0-9]+)[:`]", row[2])]
    inner = {"version", "reshard_after_forward", "activation_checkpointing"}  # of fsdp_config
    assert {name for name in of_trl if name not in fields} - inner == set()
    assert len(of_trl) > 15
    places = {"Trainer": pytorch_lightning.Trainer, "DataLoader": DataLoader}
    calls = [call for row in cells for call in re.findall(r"`(\w+)\((.*?)\)`", row[4])]
    for name, arguments in calls:
        made = places.get(name) or getattr(pytorch_lightning.strategies, name)
        parameters = inspect.signature(made).parameters
        given = re.findall(r"(\w+)=", arguments)
        assert given
        if "kwargs" not in parameters:
            assert set(given) <= set(parameters), name
    assert len(calls) > 10


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=by_name)
def test_the_links_of_a_page_outside_docs_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [target for target in targets if not (ROOT / target).exists()] == []


@pytest.mark.parametrize("name", ["generate_cli", "generate_schema", "generate_problems"])
def test_a_generated_page_is_written_and_then_fresh(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = runpy.run_path(str(ROOT / "docs" / f"{name}.py"))
    main = generator["main"]
    main.__globals__["FOLDER"] = tmp_path / "reference"
    assert main(["--check"]) == 1
    assert f"stale: python docs/{name}.py" in capsys.readouterr().err
    assert main([]) == 0
    assert main(["--check"]) == 0
    text = "".join(path.read_text() for path in tmp_path.rglob("*.md"))
    known = {"generate_schema": ANALYSES, "generate_problems": PROBLEMS}
    names = known.get(name) or typer.main.get_command(app).commands
    assert [each for each in names if f"`{each}`" not in text and f" {each}" not in text] == []


EXAMPLES = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "generate_examples.py")))


def test_what_a_command_prints_of_an_example_run_is_kept_in_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = "<!-- example runs -->\n\n```console\n$ rlprof {}\n```\n"
    page, hand = tmp_path / "README.md", "```console\n$ rlprof ls\nby hand\n```\n"
    page.write_text(hand + block.format("stragglers slow"))
    assert EXAMPLES.main(["--check"], tmp_path) == 1
    assert "README.md is stale: python docs/generate_examples.py" in capsys.readouterr().err
    assert EXAMPLES.main([], tmp_path) == 0
    assert EXAMPLES.main(["--check"], tmp_path) == 0
    text = page.read_text()
    assert "   1  slow host " in text
    assert text.startswith(hand)
    page.write_text(text.replace("slow host", "slow device"))
    assert EXAMPLES.main(["--check"], tmp_path) == 1


def test_the_example_runs_name_neither_a_machine_nor_a_user() -> None:
    assert EXAMPLES.ARCHIVE.stat().st_size < 300_000
    with tarfile.open(EXAMPLES.ARCHIVE) as archive:
        members = archive.getmembers()
        texts = [archive.extractfile(each).read().decode() for each in members]  # type: ignore[union-attr]
    assert len(members) == 3 * 2
    assert {(each.uname, each.uid, each.mtime) for each in members} == {("", 0, 0)}
    assert {json.loads(text.split("\n", 1)[0])["host"] for text in texts} == {"node-1"}
    assert [path for text in texts for path in re.findall(r"[^\w.]/\w+/[\w/]*", text)] == []


def test_packing_a_run_leaves_out_the_host(tmp_path: Path) -> None:
    before = grpo_run(tmp_path / "run", ranks=2)
    EXAMPLES.pack({"kept": tmp_path / "run"}, tmp_path / "runs.tar.gz")
    with tarfile.open(tmp_path / "runs.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    after = load(tmp_path / "kept")
    assert {header.host for header in after.headers.values()} == {"node-1"}
    assert stages(before).rows == stages(after).rows


def test_a_wrong_block_is_found() -> None:
    page = "```bash\n$ rlprof sums run\n```\n\n```yaml\nstge: all\n```\n"
    with pytest.raises(AssertionError, match="sums"):
        check_command(next(commands(blocks(page, "bash")[0])))
    with pytest.raises(AssertionError, match="--quick"):
        check_command(["rlprof", "demo", "--quick"])
    with pytest.raises(AssertionError, match="make tset"):
        check_command(["make", "tset"])
    with pytest.raises(ConfigError, match="stge"):
        check_yaml(yaml.safe_load(blocks(page, "yaml")[0]))


def test_the_floors_of_the_architecture_are_those_of_the_import_contract() -> None:
    contract = re.search(
        r'^type = "layers".*?^layers = \[(.*?)^\]', text_of("pyproject.toml"), FLAGS
    )
    text = text_of("docs/internals/architecture.md")
    page = re.search(r"^1\. Floors, top to bottom:(.*?)\. ", text, FLAGS)
    assert contract
    assert page
    floors = [set(re.findall(r"[a-z_]+", one)) for one in re.findall('"(.*)"', contract[1])]
    assert [set(re.findall("`([a-z_]+)`", one)) for one in page[1].split("·")] == floors


def test_every_message_that_troubleshooting_explains_is_in_the_code() -> None:
    code = "".join(path.read_text() for path in ROOT.glob("lightning_rlprof/**/*.py"))
    code = re.sub(r'"\s*f?"', "", code)  # a text that continues in the next line
    rows = re.findall(r"^\| (`.*?`) \|", text_of("docs/troubleshooting.md"), re.MULTILINE)
    messages = [each for row in rows for each in re.findall("`([^`]+ [^`]+)`", row)]
    assert len(messages) > 15
    parts = [part.strip(" '") for each in messages for part in each.split("…")]
    assert [part for part in parts if part not in code] == []


def test_every_warning_of_a_recording_is_explained() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", text_of("docs/troubleshooting.md"), re.MULTILINE)
    known = [each.split("…") for row in rows for each in re.findall("`([^`]+)`", row)]
    found = [
        text
        for path in ROOT.glob("lightning_rlprof/recording/**/*.py")
        for text in warnings_of(ast.parse(path.read_text()))
    ]
    assert len(found) > 15
    for text in found:
        assert any(all(part in text for part in parts) for parts in known), text


def warnings_of(tree: ast.AST) -> Iterator[str]:
    """Yield the texts, of three words or more, that are notes of the level warning or error."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        named: dict[str, ast.JoinedStr] = {}
        for node in ast.walk(function):
            match node:
                case ast.Assign(targets=[ast.Name(name)], value=ast.JoinedStr() as text):
                    named[name] = text
        for node in ast.walk(function):
            match node:
                case ast.Call(args=[ast.Attribute(ast.Name("Code"), code), ast.Name(name), *_]):
                    text = named.get(name)
                case ast.Call(args=[ast.Attribute(ast.Name("Code"), code), text, *_]):
                    pass
                case _:
                    continue
            if isinstance(text, ast.JoinedStr) and Code[code].level != "info":
                parts = text.values
                said = [each.value if isinstance(each, ast.Constant) else "…" for each in parts]
                whole = "".join(map(str, said))
                if len(re.findall("[A-Za-z]+", whole)) > 2:
                    yield whole


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def check_yaml(block: dict[str, object]) -> None:
    """Validate a block, unless it is the part of another program's file that names the callback."""
    if "ProfilerCallback" not in str(block):
        ProfilerConfig.build(block)


def commands(block: str) -> Iterator[list[str]]:
    """Return the words of each ``rlprof`` or ``make`` command in a shell block.

    If some lines begin with a prompt, the other lines are output.
    """
    lines = block.replace("\\\n", " ").splitlines()
    typed = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    for line in typed or lines:
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words.pop(0)
        if words and words[0] in {"rlprof", "make"}:
            yield words


def check_command(words: list[str]) -> None:
    """Fail for a verb, an option or a make target that does not exist."""
    if words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        names = [word for word in words[1:] if "=" not in word]
        assert set(names) <= set(targets), f"make {' '.join(names)}"
        return
    command: Any = typer.main.get_command(app)  # typer brings its own click
    options = {"--help", "--version"}
    for word in itertools.takewhile(lambda word: word != "--", words[1:]):  # then a program
        if word.startswith("-"):
            name = word.split("=")[0]
            assert name in options, f"{command.name} has no option {name}"
        elif hasattr(command, "commands"):
            assert word in command.commands, f"rlprof has no {word}"
            command = command.commands[word]
            options |= {
                opt for item in command.params for opt in (*item.opts, *item.secondary_opts)
            }
