"""The structure of the project: how many entries a folder has, names, imports, machine paths.

Linting, types and import contracts are checked by `make check`; this is what they cannot express.
"""

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.places import ROOT

PACKAGE = ROOT / "lightning_rlprof"
MOST_TOP_ENTRIES, MOST_FILES = 16, 20
TOP_WITHOUT_COUNT = {"py.typed", "__pycache__"}
READING = ("analysis", "cli", "config", "loaders", "records", "report", "run", "store", "tables")
HEAVY = {"torch", "torch_npu", "nvtx", "pytorch_lightning", "lightning", "ray"}
VAGUE = {"common", "constants", "helper", "helpers", "manager", "misc", "util", "utils"}
# Modules that search the notes of tables and of loaders, which have no codes yet.
STILL_SEARCH = {
    "analysis/device/work.py",
}
SENTENCES = {"text", "note", "abstained", "reason"}
PARTINGS = {"startswith", "endswith", "split", "partition", "rpartition", "removeprefix", "find"}
PATTERNS = {"match", "fullmatch", "search", "findall"}
BROKEN = 'found, session.step = "memory" in note.text, 3  # of a note\n'
LOWER_CASE = re.compile(r"noqa|type: |fmt: |pragma: |(torch|nsys|nvtx|verl|vllm|slime|rlprof)\b")
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|opt|root|Users|work|tmp/\w)/\w")


def crowded(package: Path) -> list[str]:
    """Return folders with more files than somebody can look over."""
    found = []
    top = [path for path in package.iterdir() if path.name not in TOP_WITHOUT_COUNT]
    if len(top) > MOST_TOP_ENTRIES:
        found.append(f"{package.name}: {len(top)} entries")
    for folder in [package, *(path for path in package.rglob("*") if path.is_dir())]:
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        if len(files) > MOST_FILES:
            found.append(f"{folder.name}: {len(files)} files")
    return found


def vague(package: Path) -> list[str]:
    """Return modules and folders whose names name no subject."""
    return [path.name for path in package.rglob("*") if path.stem in VAGUE]


def root_imports(package: Path) -> list[str]:
    """Return imports of the package root, whose names are for users, from inside."""
    rooms = {path.stem for path in package.iterdir()}
    return [
        f"{path.name}:{node.lineno}"
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        and node.module == "lightning_rlprof"
        and not {alias.name for alias in node.names} <= rooms
    ]


def sentence_searches(package: Path) -> list[str]:
    """Return where code looks into what was written for people: it has a code to decide by."""
    return [
        f"{path.name}:{node.lineno}"
        for path in sorted(package.rglob("*.py"))
        if path.relative_to(package).as_posix() not in STILL_SEARCH
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Compare) and _looks_into_a_sentence(node))
        or (isinstance(node, ast.Call) and _takes_a_sentence_apart(node))
    ]


def _looks_into_a_sentence(node: ast.Compare) -> bool:
    is_in = type(node.ops[0]).__name__.endswith("In")
    return is_in and any(map(_is_a_sentence, node.comparators))


def _takes_a_sentence_apart(node: ast.Call) -> bool:
    if not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr in PATTERNS:
        return any(map(_is_a_sentence, node.args))
    return node.func.attr in PARTINGS and _is_a_sentence(node.func.value)


def _is_a_sentence(node: ast.expr) -> bool:
    """Whether an expression is a text, a note or a reason of something, or ``str.lower`` of one."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr == "lower" and _is_a_sentence(node.func.value)
    return isinstance(node, ast.Attribute) and node.attr in SENTENCES


def sessions_changed_from_outside(package: Path) -> list[str]:
    """Return assignments to attributes of a session in other modules than its own."""
    found = []
    for path in sorted(package.rglob("*.py")):
        if path.parts[-2:] == ("recording", "session.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AugAssign | ast.AnnAssign):
                targets = [node.target]
            parts = [each for target in targets for each in ast.walk(target)]
            found += [
                f"{path.name}:{each.lineno}"
                for each in parts
                if isinstance(each, ast.Attribute) and _is_a_session(each.value)
            ]
    return found


def _is_a_session(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name.strip("_") == "session"


def comments_that_are_fragments(package: Path) -> list[str]:
    """Return comments that begin in lower case: those of tools, code and names do so rightly."""
    found = []
    for path in sorted(package.rglob("*.py")):
        above = 0  # The line of a comment that goes on below.
        with path.open() as lines:
            tokens = list(tokenize.generate_tokens(lines.readline))
        for kind, text, (line, _), _, whole in tokens:
            if kind != tokenize.COMMENT:
                continue
            goes_on = above == line - 1 and whole.lstrip().startswith("#")
            above = line if whole.lstrip().startswith("#") else 0
            words = text.lstrip("# ")
            if words[:1].islower() and not goes_on and not LOWER_CASE.match(words):
                found.append(f"{path.name}:{line}")
    return found


RULES = [
    crowded,
    vague,
    root_imports,
    sentence_searches,
    sessions_changed_from_outside,
    comments_that_are_fragments,
]


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps_the_rule(rule: Callable[[Path], list[str]]) -> None:
    assert rule(PACKAGE) == []


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_finds_a_package_that_breaks_it(
    rule: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    for at in range(MOST_FILES + 1):
        (tmp_path / f"module_{at}.py").write_text("")
    (tmp_path / "utils.py").write_text("from lightning_rlprof import stage\n" + BROKEN)
    assert rule(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        'found = "memory" in note.text',
        "found = any(word in each.text.lower() for word in words)",
        'found = note.text.startswith("captured ")',
        'found = table.note.split("; ")',
        "found = PATTERN.match(note.text)",
    ],
)
def test_each_way_to_search_a_sentence_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(line)
    assert sentence_searches(tmp_path) == ["module.py:1"]


@pytest.mark.parametrize(
    "line",
    ["session.step = 3", "self._session.remarks += found", "run.session.idles: bool = True"],
)
def test_each_way_to_change_a_session_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(line)
    assert sessions_changed_from_outside(tmp_path) == ["module.py:1"]


def test_no_file_depends_on_a_machine() -> None:
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split("\n")
    kinds = {"", ".cfg", ".html", ".json", ".md", ".py", ".toml", ".txt", ".yaml", ".yml"}
    files = [ROOT / n for n in names if Path(n).suffix in kinds and (ROOT / n).is_file()]
    assert len(files) > 100
    found = [
        f"{path}:{number}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []
    assert MACHINE_PATH.search("open('/" + "home/me/traces')")


def test_reading_loads_nothing_heavy() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for room in READING
        for path in [*PACKAGE.glob(f"{room}.py"), *(PACKAGE / room).rglob("*.py")]
        if "demo" not in path.parts
    ]
    assert len(modules) > 100
    assert loaded_after(f"import {', '.join(modules)}") & HEAVY == set()


def test_a_heavy_import_would_be_seen() -> None:
    assert loaded_after("import nvtx") & HEAVY == {"nvtx"}


def test_importing_the_package_imports_nothing() -> None:
    loaded = loaded_after("import lightning_rlprof")
    assert loaded & HEAVY == set()
    assert {name for name in loaded if name.startswith("lightning_rlprof")} == {"lightning_rlprof"}


def test_the_walks_of_the_architecture_name_what_exists() -> None:
    page = (ROOT / "docs" / "internals" / "architecture.md").read_text()
    steps = re.findall(r"^\| `([\w/]+\.py):([\w.]+)` \|", page, re.MULTILINE)
    assert len(steps) > 30
    missing = [f"{file}:{name}" for file, name in steps if name not in defined_in(PACKAGE / file)]
    assert missing == []


@pytest.mark.parametrize("name", ["internals/extending.md", "reliability.md"])
def test_a_page_that_names_files_names_those_that_exist(name: str) -> None:
    page = (ROOT / "docs" / name).read_text()
    names = re.findall(r"(?:`|pytest |ARGS=\")((?:docs|lightning_rlprof|tests)/[\w./]+)", page)
    names += re.findall(r"[ ](tests/[\w./]+)", page)
    assert len(names) > 25
    assert [each for each in names if not (ROOT / each).exists()] == []


def defined_in(path: Path) -> set[str]:
    """Return the names that a module defines at its top, and the methods of its classes."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {f"{node.name}.{each.name}" for each in methods}
    return found


def loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())
