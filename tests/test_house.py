"""The house holds: size, names, documents, imports; and each rule can fail."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import house_rules as rules
from tests.house_graph import find_cycle, import_graph, modules_in

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_rlprof"
MODULES = modules_in(PACKAGE)
READING = (
    *("address", "analysis", "cli", "clock", "config", "errors", "frames", "ingest", "loaders"),
    *("model", "notebook", "remote", "report", "spans", "store", "table", "tracefile"),
)
HEAVY = ("torch", "torch_npu", "nvtx", "pytorch_lightning", "lightning", "ray")

Rule = Callable[[Path], list[str]]

EVERYWHERE = ("lightning_rlprof", "benchmarks", "docs", "tests")
WHERE: dict[Rule, tuple[str, ...]] = {
    rules.incomplete_all: ("lightning_rlprof",),
    rules.long_files: EVERYWHERE,
    rules.long_functions: EVERYWHERE,
    rules.machine_paths: EVERYWHERE,
    rules.prints: ("lightning_rlprof",),
    rules.relative_imports: EVERYWHERE,
    rules.root_imports: ("lightning_rlprof",),
    rules.undocumented: ("lightning_rlprof", "benchmarks", "docs"),
    rules.untold_constants: ("lightning_rlprof",),
    rules.vague_names: EVERYWHERE,
}

BAD: dict[Rule, str] = {
    rules.incomplete_all: '__all__ = ["one"]\ndef one(): ...\ndef two(): ...\n',
    rules.long_files: "x = 1\n" * 301,
    rules.long_functions: "def long():\n" + "    x = 1\n" * 30,
    rules.machine_paths: "x = '/" + "home/me/traces'\n",
    rules.prints: "def speak():\n    print('hello')\n",
    rules.relative_imports: "from .model import Span\n",
    rules.root_imports: "def late():\n    from lightning_rlprof import stage\n",
    rules.untold_constants: "LIMIT = 5\ndef f(): ...\n",
    rules.undocumented: '"""Told."""\nclass Told:\n    """Told."""\n    def untold(self): ...\n',
    rules.vague_names: "",
}
GOOD: dict[Rule, str] = {
    rules.incomplete_all: '__all__ = ["one"]\ndef one(): ...\ndef _two(): ...\n',
    rules.long_files: "x = 1\n" * 300,
    rules.long_functions: "def long():\n" + "    x = 1\n" * 29,
    rules.machine_paths: "x = 'a/home/traces', '../shared/data'\n",
    rules.prints: "def speak():\n    log.info('print')\n",
    rules.relative_imports: "from lightning_rlprof.records.records import Span\n",
    rules.root_imports: "from lightning_rlprof import model\nimport lightning_rlprof.errors\n",
    rules.untold_constants: 'LIMIT = 5\n"""Of it."""\n_MOST = 3\nlog = logging.getLogger()\n',
    rules.undocumented: '"""Told."""\ndef told():\n    """Told."""\ndef _inner(): ...\n',
    rules.vague_names: "",
}


def by_name(rule: Rule) -> str:
    return rule.__name__


@pytest.mark.parametrize("rule", WHERE, ids=by_name)
def test_every_file_keeps_the_rule(rule: Rule) -> None:
    files = [path for folder in WHERE[rule] for path in sorted((ROOT / folder).rglob("*.py"))]
    if rule is rules.prints:
        files = [path for path in files if PACKAGE / "cli" not in path.parents]
    assert files
    assert [problem for path in files for problem in rule(path)] == []


@pytest.mark.parametrize("rule", WHERE, ids=by_name)
def test_the_rule_finds_a_bad_file_and_passes_a_good_one(rule: Rule, tmp_path: Path) -> None:
    bad = tmp_path / ("utils.py" if rule is rules.vague_names else "bad.py")
    bad.write_text(BAD[rule])
    good = tmp_path / "good.py"
    good.write_text(GOOD[rule])
    assert len(rule(bad)) == 1
    assert rule(good) == []


def test_no_page_or_script_names_a_machines_path() -> None:
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split("\n")
    kinds = {"", ".cfg", ".html", ".json", ".md", ".toml", ".txt", ".yaml", ".yml"}
    files = [ROOT / n for n in names if Path(n).suffix in kinds and (ROOT / n).is_file()]
    assert [problem for path in files for problem in rules.machine_paths(path)] == []


def test_a_module_without_all_is_found(tmp_path: Path) -> None:
    path = tmp_path / "room.py"
    path.write_text("LIMIT: int = 3\nT = TypeVar('T')\nlog = logging.getLogger('')\n")
    assert rules.incomplete_all(path) == [f"{path}: has no __all__ and defines ['LIMIT']"]


def test_no_import_cycle_lazy_imports_counted() -> None:
    assert find_cycle(import_graph(PACKAGE)) == []


@pytest.mark.parametrize(
    "closing",
    [
        "import room.a",
        "from room.a import x",
        "def late():\n    from room import a",
        "import importlib\ndef late():\n    importlib.import_module('room.a')",
    ],
)
def test_a_cycle_is_found_however_it_is_closed(closing: str, tmp_path: Path) -> None:
    package = _package(tmp_path, a="from room.b import y", b="import room.c", c=closing)
    assert find_cycle(import_graph(package)) == ["room.a", "room.b", "room.c", "room.a"]


def test_an_import_for_type_checking_closes_no_cycle(tmp_path: Path) -> None:
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from room.a import x"
    package = _package(tmp_path, a="from room.b import y", b=guarded)
    assert find_cycle(import_graph(package)) == []


@pytest.mark.parametrize("name", MODULES)
def test_all_is_sorted_and_every_name_is_there(name: str) -> None:
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])
    assert exported == sorted(exported, key=_order)
    assert [n for n in exported if not hasattr(module, n)] == []


def test_the_order_of_all_is_constants_classes_functions() -> None:
    assert sorted(["stage", "Span", "STAGES", "Kind"], key=_order) == [
        "STAGES",
        "Kind",
        "Span",
        "stage",
    ]


@pytest.mark.parametrize("room", READING)
def test_the_reading_wing_loads_nothing_heavy(room: str) -> None:
    names = [name for name in MODULES if name.split(".")[1:2] == [room]]
    assert names
    assert _heavy_after(f"import {', '.join(names)}") == set()


def test_what_is_heavy_would_be_seen() -> None:
    assert _heavy_after("import lightning_rlprof.records.records, nvtx") == {"nvtx"}


def test_importing_the_package_imports_nothing() -> None:
    loaded = _loaded_after("import lightning_rlprof")
    assert loaded & set(HEAVY) == set()
    assert {name for name in loaded if name.startswith("lightning_rlprof")} == {"lightning_rlprof"}


def _order(name: str) -> tuple[bool, bool, str]:
    return not name.isupper(), not name[0].isupper(), name


def _package(folder: Path, **sources: str) -> Path:
    package = folder / "room"
    package.mkdir()
    for name, source in {"__init__": "", **sources}.items():
        (package / f"{name}.py").write_text(source + "\n")
    return package


def _heavy_after(statement: str) -> set[str]:
    return _loaded_after(statement) & set(HEAVY)


def _loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())
