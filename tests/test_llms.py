"""The hook that writes `llms.txt`, with a navigation of two pages."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

from tests.places import ROOT


def test_the_list_for_language_models_has_each_page_and_the_skill(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("llms", ROOT / "docs" / "llms.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    for name, text in (
        ("index.md", "# Title\n\n- a list\n\nIt `reads` [a run](a.md). And more.\n"),
        ("guides/index.zh.md", "不是英文。"),
        ("guides/tuning.md", "| a | table |\n"),
    ):
        hook.on_page_markdown(text, page=SimpleNamespace(file=SimpleNamespace(src_uri=name)))
    nav = [{"Start": [{"Overview": "index.md"}, {"· Tuning": "guides/tuning.md"}]}]
    config = SimpleNamespace(nav=nav, site_name="n", site_description="d", site_dir=tmp_path)
    hook.on_post_build(config)
    lines = (tmp_path / "llms.txt").read_text().splitlines()
    assert "- [Overview](index.html): It reads a run." in lines
    assert "- [Tuning](guides/tuning/index.html)" in lines
    assert (tmp_path / "SKILL.md").read_text().startswith("---\nname: rlprof\n")
