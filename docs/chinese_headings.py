"""A hook of MkDocs: headings of a Chinese page get the anchors of its English page.

So a link with an anchor is right in both languages, also from a page that exists in English only.
"""

import re
from pathlib import Path
from typing import Any

import markdown
from mkdocs.exceptions import PluginError

_PART = re.compile(r"^( *)```.*?^\1```|^#+ [^\n]+", re.MULTILINE | re.DOTALL)


def headings(text: str) -> list[str]:
    """Return the headings of a page, as they are written, without what code blocks contain."""
    return [part[0] for part in _PART.finditer(text) if part[0].startswith("#")]


def anchors(text: str) -> list[str]:
    """Return the anchor that MkDocs gives each heading of an English page."""
    html = markdown.markdown(
        "\n\n".join(headings(text)), extensions=["toc", "attr_list"], output_format="html"
    )
    return re.findall(r'<h\d id="([^"]+)"', html)


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """Return a page with its anchors; called by MkDocs."""
    chinese = Path(page.file.abs_src_path or "")
    if not chinese.name.endswith(".zh.md"):
        return text
    found = anchors(chinese.with_name(chinese.name.replace(".zh.md", ".md")).read_text())
    if len(found) != len(headings(text)):
        raise PluginError(
            f"{chinese.name} has {len(headings(text))} headings, its English page {len(found)}: "
            "give it the same ones; tests/test_chinese.py names what else is missing"
        )
    ids = iter(found)

    def with_anchor(part: re.Match[str]) -> str:
        return f"{part[0]} {{#{next(ids)}}}" if part[0].startswith("#") else part[0]

    return _PART.sub(with_anchor, text)
