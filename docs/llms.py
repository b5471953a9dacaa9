"""A hook of MkDocs: write ``llms.txt``, the list of pages for language models, and the skill.

Each page of the navigation is a link with its first sentence. `SKILL.md` lies beside it.
"""

import re
import shutil
from pathlib import Path
from typing import Any

_SKILL = Path(__file__).parents[1] / "lightning_rlprof" / "cli" / "SKILL.md"
_HEAD = """# {name}

> {description}

An agent begins with [SKILL.md](SKILL.md): which verb first, how to read verdicts, when to stop.
"""
_lines: dict[str, str] = {}


def first_sentence(text: str) -> str:
    """Return the first sentence of a page, past headings, lists, tables, lists of links and code.

    Example::

        >>> first_sentence("It `reads` [a run](a.md). Then more.")
        'It reads a run.'
    """
    for part in re.split(r"\n\s*\n", re.sub(r"<!--.*?-->|```.*?```", "", text, flags=re.S)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", " ".join(part.split()))
        if plain and plain[0].isalnum():
            return re.split(r"(?<=[.:])\s", plain)[0].rstrip(":")
    return ""


def on_page_markdown(text: str, page: Any, **_: Any) -> None:
    """Remember an English page; called by MkDocs."""
    if not page.file.src_uri.endswith(".zh.md"):
        sentence = first_sentence(text)
        _lines.setdefault(page.file.src_uri, f": {sentence}" if sentence else "")


def on_post_build(config: Any) -> None:
    """Write the files; called by MkDocs for each language, with the same result."""
    lines = [_HEAD.format(name=config.site_name, description=config.site_description)]
    for section in config.nav:
        for heading, pages in section.items():
            lines.append(f"## {heading}\n")
            for title, source in (pair for page in pages for pair in page.items()):
                address = re.sub(r"(^|/)index\.md$|\.md$", r"\1", source).rstrip("/")
                link = f"{address}/index.html" if address else "index.html"
                lines.append(f"- [{title.removeprefix('· ')}]({link}){_lines.get(source, '')}")
            lines.append("")
    site = Path(config.site_dir)
    (site / "llms.txt").write_text("\n".join(lines), encoding="utf-8")
    shutil.copy(_SKILL, site / "SKILL.md")
