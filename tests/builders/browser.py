"""A real browser for tests: opens a page from disk and says what became of it."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Any

AXE = resources.files("axe_core_python").joinpath("axe.min.js").read_text()
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


class Tab:
    """A page in a real browser, used as a person does, by the DevTools protocol over two pipes.

    Attributes:
        problems: Exceptions, errors on the console, and requests other than for the file itself or
            to ``site``.
    """

    def __init__(
        self, browser: str, folder: Path, *, width: int = 1280, height: int = 900, site: str = ""
    ) -> None:
        self._own = ("file:", "data:", "about:", "blob:", *([site] if site else []))
        self._folder, self._number, self._events = folder, itertools.count(1), list[Any]()
        self.problems: list[str] = []
        down, up = os.pipe(), os.pipe()
        flags = [flag for flag in FLAGS if not flag.startswith(("--virtual", "--window", "--dump"))]
        profile = f"--user-data-dir={folder / 'tab-profile'}"
        command = [browser, *flags, "--remote-debugging-pipe", profile, "about:blank"]

        def as_three_and_four() -> None:
            read, write = os.dup(down[0]), os.dup(up[1])  # neither may be 3 or 4 already
            os.dup2(read, 3)
            os.dup2(write, 4)

        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(  # the browser reads descriptor 3 and writes 4
            command,
            close_fds=False,
            preexec_fn=as_three_and_four,  # noqa: PLW1509 - no other thread runs yet
            stdout=quiet,
            stderr=quiet,
        )
        os.close(down[0])
        os.close(up[1])
        self._to, self._from = os.fdopen(down[1], "wb", 0), os.fdopen(up[0], "rb", 0)
        self._rest, self._session = b"", ""
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in targets if each["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> "Tab":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._to.close()
        self._from.close()

    def open(self, path: Path, fragment: str = "") -> None:
        """Open a file and wait until it is drawn."""
        self.visit(f"{path.resolve().as_uri()}{fragment}")
        self.wait("document.readyState === 'complete' && 'drawn' in document.body.dataset")

    def visit(self, address: str) -> None:
        """Begin to open an address."""
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=address)

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        limit = time.monotonic() + 120
        while not self.run(condition):
            assert time.monotonic() < limit, f"never true: {condition}"
            time.sleep(0.01)

    def run(self, script: str) -> Any:
        """Return what an expression is worth; its value has to be JSON."""
        done = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def violations(self) -> list[list[str]]:
        """Return what keeps somebody from reading the page: the rule of axe, and the first node."""
        self.run(f"{AXE}; 1")
        ask = "axe.run().then((all) => all.violations.map((one) => [one.id, one.nodes[0].html]))"
        found: list[list[str]] = self.run(ask)
        return found

    def resize(self, width: int, height: int) -> None:
        """Give the window a size in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def theme(self, scheme: str) -> None:
        """Prefer ``light`` or ``dark``."""
        wanted = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=wanted)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key."""
        for kind in ("rawKeyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, modifiers=8 * shift)

    def drag(self, x: float, y: float, to: float) -> None:
        """Drag the mouse to the right."""
        self._mouse("mouseMoved", x, y, 0)
        self._mouse("mousePressed", x, y, 1)
        for part in (0.5, 1.0):
            self._mouse("mouseMoved", x + part * (to - x), y, 1)
        self._mouse("mouseReleased", to, y, 0)

    def hover(self, x: float, y: float) -> None:
        """Move the mouse to a place."""
        self._mouse("mouseMoved", x, y, 0)

    def _mouse(self, kind: str, x: float, y: float, buttons: int) -> None:
        about = {"button": "left", "buttons": buttons, "clickCount": 1}
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **about)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write a PNG of what is on screen, or of the whole page."""
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self) -> bytes:
        """Return the page as it is printed on A4."""
        made = self._call("Page.printToPDF", preferCSSPageSize=True)
        return base64.b64decode(made["data"])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._number)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("id") == number:
                assert "error" not in heard, heard["error"]
                return dict(heard["result"])
            self._note(heard)

    def _hear(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = self._from.read(1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))

    def _note(self, heard: dict[str, Any]) -> None:
        what, about = heard.get("method"), heard.get("params", {})
        if what == "Runtime.exceptionThrown":
            self.problems.append(str(about["exceptionDetails"].get("exception", about)))
        elif what == "Runtime.consoleAPICalled" and about["type"] == "error":
            self.problems.append(str(about["args"]))
        elif what == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.problems.append(about["entry"]["text"])
        elif what == "Network.requestWillBeSent":
            url = about["request"]["url"]
            if not url.startswith(self._own):
                self.problems.append(f"request: {url}")
