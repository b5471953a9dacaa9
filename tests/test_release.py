"""What is published: the files around the code, and packages that install and run elsewhere."""

import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_rlprof.system.version import VERSION
from tests.places import ROOT

FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
FIELDS = {"input", "textarea", "dropdown", "checkboxes"}


def test_the_citation_file_has_what_its_format_requires() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(found)
    assert all("name" in each or "family-names" in each for each in found["authors"])
    assert found["type"] == "software"
    assert found["version"] == VERSION
    project = (ROOT / "pyproject.toml").read_text()
    assert f'license = "{found["license"]}"' in project
    assert f'name = "{found["title"]}"' in project


def test_the_same_status_is_said_everywhere() -> None:
    assert "Development Status :: 3 - Alpha" in (ROOT / "pyproject.toml").read_text()
    assert "**Status: alpha.**" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_a_form_for_issues_is_one(form: Path) -> None:
    found: dict[str, Any] = yaml.safe_load(form.read_text())
    if form.stem == "config":
        assert found == {"blank_issues_enabled": False}
        return
    assert set(found) == {"name", "description", "labels", "body"}
    asked = [each for each in found["body"] if each["type"] in FIELDS]
    assert {each["type"] for each in found["body"]} <= FIELDS | {"markdown"}
    assert len({each["id"] for each in asked}) == len(asked) > 0
    assert all(each["attributes"]["label"] for each in asked)
    lists = [each for each in asked if each["type"] in ("dropdown", "checkboxes")]
    assert all(each["attributes"]["options"] for each in lists)


def test_there_are_forms_and_rules_of_conduct_and_security() -> None:
    assert len(FORMS) > 2
    assert (ROOT / "CODE_OF_CONDUCT.md").is_file()
    assert "Report it in private" in (ROOT / "SECURITY.md").read_text()


def test_the_changelog_keeps_its_format() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert sections[0] == "Unreleased"
    kinds = set(re.findall(r"^### (.+)", text, re.MULTILINE))
    assert len(text.partition("### In 0.1.0")[2].partition("###")[0].split()) < 300  # two minutes
    assert kinds - {"In 0.1.0"} <= {
        "Added",
        "Changed",
        "Deprecated",
        "Removed",
        "Fixed",
        "Security",
    }


def run(*command: str | Path, folder: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build wheel and sdist, as a release does."""
    if find_spec("hatchling") is None:
        pytest.skip("NO HATCHLING: pip install hatchling")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", folder)
    assert {path.name for path in folder.iterdir()} == {
        f"lightning_rlprof-{VERSION}-py3-none-any.whl",
        f"lightning_rlprof-{VERSION}.tar.gz",
    }
    return folder


@pytest.mark.deep
def test_the_packages_pass_the_check_of_the_index(packages: Path) -> None:
    if find_spec("twine") is None:
        pytest.skip("NO TWINE: pip install twine")
    said = run(sys.executable, "-m", "twine", "check", "--strict", *sorted(packages.iterdir()))
    assert said.count("PASSED") == 2


@pytest.mark.deep
def test_the_packages_have_what_they_need_and_no_more(packages: Path) -> None:
    wheel, sdist = sorted(packages.iterdir(), key=lambda path: path.suffix != ".whl")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    assert {name.split("/")[0] for name in names} == {
        "lightning_rlprof",
        f"lightning_rlprof-{VERSION}.dist-info",
    }
    assert "lightning_rlprof/py.typed" in names
    code = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("lightning_rlprof/**/*.py")}
    assert code <= set(names)
    with tarfile.open(sdist) as file:
        names = [name.partition("/")[2] for name in file.getnames()]
    wanted = {
        "README.md",
        "LICENSE",
        "CITATION.cff",
        "examples/runs.tar.gz",
        "tests/test_release.py",
    }
    assert wanted <= set(names)
    assert [
        name for name in names if re.search(r"\.venv|__pycache__|profiler_data|\.git/", name)
    ] == []


@pytest.mark.deep
def test_the_wheel_reads_a_run_in_a_clean_environment(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python, rlprof = (tmp_path / "venv" / "bin" / name for name in ("python", "rlprof"))
    (wheel,) = packages.glob("*.whl")
    pip = (python, "-m", "pip", "install", "--quiet", "--retries", "1")
    done = subprocess.run([*pip, wheel], capture_output=True, text=True, check=False)
    if "No matching distribution found for" in done.stderr:
        pytest.skip("NO PACKAGE INDEX: the dependencies of the wheel cannot be installed")
    assert done.returncode == 0, done.stderr
    with tarfile.open(ROOT / "examples" / "runs.tar.gz") as file:
        file.extractall(tmp_path, filter="data")
    assert run(rlprof, "--version", folder=tmp_path) == f"rlprof {VERSION}\n"
    said = run(rlprof, "summary", "slow", folder=tmp_path)
    assert "60 steps on 2 ranks" in said
    assert "Fix first: A rank slows the others down (rank 1, slow host)" in said
    run(rlprof, "report", "slow", "-o", "slow.html", folder=tmp_path)
    assert (tmp_path / "slow.html").stat().st_size > 100_000
