"""Chinese pages say what the English ones say.

Sections, commands, tables, links, names and numbers are the same. The words are those that
users of verl and MindSpeed-RL know, and no sentence is broken into lines.
"""

import re
import runpy
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from mkdocs.exceptions import PluginError

from tests.places import ROOT

PAGES = [ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.zh.md"))]
MOST_CHARACTERS = 60
"""Of a sentence, without its code and Latin words."""
BANNED = re.compile(
    "轨迹|内核|步长|步骤|通信组|令牌|排名|未标记|未追踪|绝不|恰好|如实|悄无声息|分析器|记录器"
    "|掉队者|落后者|拖尾|捕获|转储|剖析|您|该命令|「|」"
)
KEPT_IN_NAVIGATION = {"torch.profiler", "Nsight Systems", "Python API"}
"""And the names of analyses and frameworks."""
_BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_TARGET = re.compile(r"\]\([^)]*\)|<https?:[^>]*>")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_HAN = "[\u4e00-\u9fff]"
_MARK = "[，。：；（）、？！]"
_TYPOS = {
    "no space between Chinese and Latin": re.compile(f"{_HAN}[A-Za-z0-9`]|[A-Za-z0-9`]{_HAN}"),
    "a half-width mark": re.compile(f"{_HAN}[,;:?!]|[,;?!]{_HAN}"),
    "a space beside a full-width mark": re.compile(f"{_MARK} [^|]|[^|] {_MARK}"),
    "a line break within a sentence": re.compile(f"(?:{_HAN}|[，、（])\n *{_HAN}"),
}


HOOK = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "chinese_headings.py")))


def english_of(page: Path) -> Path:
    return page.with_name(page.name.replace(".zh-CN.md", ".md").replace(".zh.md", ".md"))


def levels(text: str) -> list[int]:
    return [len(heading.split()[0]) for heading in HOOK.headings(text)]


def blocks(text: str) -> list[tuple[str, str]]:
    """Return language and text of each code block, without comments."""
    return [
        (language, re.sub(r" *(^| )# .*$", "", body, flags=re.MULTILINE))
        for _, language, body in _BLOCK.findall(text)
    ]


def tables(text: str) -> list[list[int]]:
    """Return how many cells each row of each table has."""
    plain = _BLOCK.sub("", text)
    found = re.findall(r"(?:^ *\|.*\n?)+", plain, re.MULTILINE)
    return [[len(re.findall(r"(?<!\\)\|", row)) for row in one.splitlines()] for one in found]


def links(text: str) -> list[str]:
    """Return the targets of a page's links, each language's pages under the English name."""
    targets = re.findall(r"\]\(([^)\s]+)\)", _BLOCK.sub("", text))
    return sorted(re.sub(r"\.zh(-CN)?\.md", ".md", each) for each in targets)


def facts(text: str) -> list[set[str]]:
    """Return the numbers of each section's prose, and what is marked there as code."""
    sections = re.split(r"^#+ ", _BLOCK.sub("", text), flags=re.MULTILINE)
    return [
        {*re.findall(r"`([^`\n]+)`", section), *_NUMBER.findall(_TARGET.sub("", section))}
        for section in sections
    ]


def differences(english: str, chinese: str) -> list[str]:
    """Return what a Chinese page lacks, or has beyond its English page."""
    if levels(english) != levels(chinese):
        return [f"headings: {levels(english)} in English, {levels(chinese)} in Chinese"]
    found = [
        f"{what}: {ours!r} in English, {theirs!r} in Chinese"
        for what, read in {"code blocks": blocks, "tables": tables, "links": links}.items()
        for ours, theirs in zip_longest(read(english), read(chinese))
        if ours != theirs
    ]
    for heading, ours, theirs in zip(
        ["(top)", *HOOK.headings(english)], facts(english), facts(chinese), strict=True
    ):
        if missing := ours - theirs:
            found.append(f"{heading!r} lacks {sorted(missing)} in Chinese")
    return found


def faults(text: str) -> list[str]:
    """Return the banned words, typographical faults and endless sentences of a Chinese page."""
    prose = re.sub(r"`[^`\n]*`", "`x`", _BLOCK.sub("", text))
    found = [f"banned {each}" for each in BANNED.findall(prose)]
    for what, pattern in _TYPOS.items():
        visible = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", prose)
        found += [f"{what}: {match[0]!r}" for match in pattern.finditer(visible)]
    for sentence in re.split(r"[。？！|\n]", prose):
        if len(re.findall(_HAN, sentence)) > MOST_CHARACTERS:
            found.append(f"a long sentence: {sentence}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_chinese_page_is_in_step_with_its_english_page(page: Path) -> None:
    assert differences(english_of(page).read_text(), page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_chinese_page_has_the_words_and_marks_of_its_readers(page: Path) -> None:
    assert faults(page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_chinese_page_lead_to_chinese_pages(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s:#]+\.md)", _BLOCK.sub("", page.read_text()))
    others = [each for each in targets if not each.endswith(".zh.md") and each != "README.md"]
    assert [each for each in others if (page.parent / each).with_suffix(".zh.md").exists()] == [], (
        "write PAGE.zh.md"
    )


def test_titles_of_the_navigation_are_translated() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    i18n = next(each["i18n"] for each in config["plugins"] if "i18n" in each)
    translated = i18n["languages"][1]["nav_translations"]
    sections = [next(iter(each.items())) for each in config["nav"]]
    titles = {section for section, _ in sections}
    titles |= {title for _, pages in sections for page in pages for title in page}
    titles = {each for each in titles if not re.fullmatch("· .*|[a-z_]+", each)}
    assert titles - set(translated) == KEPT_IN_NAVIGATION
    assert set(translated) - titles == set()


ENGLISH = """# Title

See `key` in [ledger](ledger.md).

```bash
rlprof summary  # where time went
```

| a | b |
|---|---|
| `x` | y |
"""
CHINESE = """# 标题

见[账本](ledger.zh.md)中的 `key`。

```bash
rlprof summary  # 时间花在哪里
```

| 甲 | 乙 |
|---|---|
| `x` | 丙 |
"""


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("# Title", "# Title", None),
        ("# Title", "# Title\n\n## New section", "headings"),
        ("rlprof summary", "rlprof findings", "code blocks"),
        ("| `x` | y |", "| `x` | y |\n| `x` | y |", "tables"),
        ("ledger.md", "ledger.md#columns", "links"),
        ("`key`", "`other`", "lacks"),
        ("ledger.md).", "ledger.md): 0.2 ms.", "lacks"),
    ],
)
def test_a_change_of_the_english_page_is_found(old: str, new: str, complaint: str | None) -> None:
    found = differences(ENGLISH.replace(old, new), CHINESE)
    assert [complaint in each for each in found] == ([True] if complaint else [])


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("慢卡是第 3 个 rank（`rank 3`）。", 0),
        ("单步步长为 3 ms。", 1),
        ("共 3个 rank。", 1),
        ("如果超时,重试。", 1),
        ("如果超时， 重试。", 1),
        ("一句话在这里，\n然后继续。", 1),
        ("```text\n共3个\n```", 0),
        ("字" * 61 + "。", 1),
        ("字" * 60 + "。" + "字" * 60 + "。", 0),
    ],
)
def test_faults_are_found(text: str, count: int) -> None:
    assert len(faults(text)) == count


def test_a_chinese_heading_has_the_anchor_of_the_english_one(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# A `key`\n\n```text\n# no heading\n```\n\n## A key\n")
    page = SimpleNamespace(file=SimpleNamespace(abs_src_path=str(tmp_path / "page.zh.md")))
    text = "# 配置项\n\n```text\n# 不是标题\n```\n\n## 键\n"
    written = HOOK.on_page_markdown(text, page=page)
    assert HOOK.headings(written) == ["# 配置项 {#a-key}", "## 键 {#a-key_1}"]
    with pytest.raises(PluginError, match=r"page.zh.md has 1 headings, its English page 2"):
        HOOK.on_page_markdown("# 配置项\n", page=page)
    page.file.abs_src_path = str(tmp_path / "page.md")
    assert HOOK.on_page_markdown(text, page=page) == text
