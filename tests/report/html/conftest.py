"""A real browser for the tests of pages, which those of a file share."""

from collections.abc import Iterator

import pytest

from tests.builders.browser import Tab, find_browser


@pytest.fixture(scope="module")
def browser_tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    browser = find_browser()
    if browser is None:
        pytest.skip("NO BROWSER: install chromium or set CHROMIUM; the report was not opened")
    with Tab(browser, tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def tab(browser_tab: Tab) -> Tab:
    """Return the tab as on a desk, without what an earlier test heard of problems."""
    browser_tab.resize(1280, 900)
    browser_tab.theme("light")
    browser_tab.problems.clear()
    return browser_tab
