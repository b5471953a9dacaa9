"""A real browser for tests: opens a page from disk and says what became of it."""

import os
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=4000",
    "--window-size=1200,2000",
    "--dump-dom",
)


class Page(HTMLParser):
    """What a test asks a page: elements by tag, with attributes and the text in them."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.texts.append((self.elements[-1][0] if self.elements else "", data))

    def find(self, tag: str, **wanted: str) -> list[dict[str, str]]:
        found = [attributes for name, attributes in self.elements if name == tag]
        return [a for a in found if all(a.get(k.strip("_")) == v for k, v in wanted.items())]

    def text(self) -> str:
        return " ".join(text for tag, text in self.texts if tag not in ("script", "style"))

    @property
    def body(self) -> dict[str, str]:
        return self.find("body")[0]


def find_browser() -> str | None:
    """Return the binary that CHROMIUM names, or one from the PATH."""
    names = [os.environ.get("CHROMIUM", ""), *BROWSERS]
    return next((found for name in names if (found := shutil.which(name))), None)


def open_page(browser: str, source: str, folder: Path) -> Page:
    """Return the page as it is after its scripts have run."""
    count = len(list(folder.glob("page-*.html")))
    path = folder / f"page-{count}.html"
    path.write_text(source, encoding="utf-8")
    profile = f"--user-data-dir={folder / f'profile-{count}'}"
    command = [browser, *FLAGS, profile, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return Page(done.stdout)
