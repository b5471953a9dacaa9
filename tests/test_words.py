"""Plain English: no banned phrase and no endless sentence in messages, docstrings and docs."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.places import ROOT

MOST_WORDS = 30
BANNED = re.compile(
    r"\b(not told|untold|nobody|somebody|whoever|is no (?!longer|need|more)[a-z]+|came last"
    r"|hangs on|played again|told apart|anew|of ours|by itself|so many|goes on|dear|as nothing"
    r"|at hand)\b",
    re.IGNORECASE,
)
EXCEPTIONS: tuple[str, ...] = ()
PACKAGE = ROOT / "lightning_rlprof"
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir())
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if ".zh" not in path.name  # test_chinese reads these
)
ASSETS = sorted(path for path in (PACKAGE / "report").rglob("*.*") if path.suffix in {".j2", ".js"})

_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1", re.MULTILINE | re.DOTALL)
_PROGRAM = re.compile(
    r"\s*(import|with|select|insert|create|update|delete)\b.*\b(def|as|from) ", re.S
)
_PROSE = re.compile(r"[A-Z.,:;!?]")
_CODE = re.compile(r"`[^`]*`")
_BREAK = re.compile(
    r"(?<=[.!?:;])\s+|\n\s*\n|\n(?=\s*(?:[-*#|>]|\d+\.|Args|Raises|Returns))|\s\|\s"
    r"|\n(?=\s*\S+(?: \S+)*  +\S)"  # the row of a table in plain text
)


def sentences(text: str) -> list[str]:
    """Return the sentences of a text; list items, table cells and headings count as sentences."""
    return [each for each in _BREAK.split(_FENCE.sub("\n\n", text)) if each.strip()]


def faults(text: str) -> list[str]:
    """Return the banned phrases of a text, and its sentences that are too long."""
    if _PROGRAM.match(text) or not _PROSE.search(text):  # SQL, Python, or a list of names
        return []
    plain = _CODE.sub("code", _FENCE.sub("\n\n", text))
    found = [f"banned {match[0]!r}" for match in BANNED.finditer(plain)]
    for sentence in sentences(plain):
        words = [word for word in sentence.split() if any(map(str.isalnum, word))]
        if len(words) > MOST_WORDS:
            found.append(f"{len(words)} words: {' '.join(words)[:70]}…")
    return [each for each in found if not any(known in each for known in EXCEPTIONS)]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of every comment, and of every string that is more than a name."""
    tree = ast.parse(path.read_text())
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            values = node.values
            yield (
                node.lineno,
                "".join(
                    str(each.value) if isinstance(each, ast.Constant) else "value"
                    for each in values
                ),
            )
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in parts
            and " " in node.value
        ):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


@pytest.mark.parametrize("room", ROOMS)
def test_strings_and_docstrings_are_plain_english(room: str) -> None:
    place = PACKAGE / room
    files = [place] if place.suffix == ".py" else sorted(place.rglob("*.py"))
    found = [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in files
        for line, text in texts(path)
        for fault in faults(text)
    ]
    assert found == []


@pytest.mark.parametrize("asset", ASSETS, ids=lambda asset: asset.name)
def test_the_report_is_plain_english(asset: Path) -> None:
    assert BANNED.findall(asset.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_plain_english(page: Path) -> None:
    assert faults(page.read_text()) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("No kernels were recorded. Capture a step with torch.profiler.", 0),
        ("idle: not told, no device tool recorded kernels", 1),
        ("kernel: is no analysis", 1),
        ("It is no longer there.", 0),
        ("```\nnobody is slow\n```\nNo straggler.", 0),
        ("Rows say `nobody`.", 0),
        (" ".join(["word"] * 31) + ".", 1),
        (" ".join(["word"] * 30) + ". Next sentence.", 0),
        ("- " + "word " * 20 + "\n- " + "word " * 20, 0),
    ],
)
def test_faults_are_found(text: str, count: int) -> None:
    assert len(faults(text)) == count


def test_exceptions_are_few_and_needed() -> None:
    assert len(EXCEPTIONS) <= 10
