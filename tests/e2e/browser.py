"""A headless Chromium, spoken to by its DevTools protocol over a pipe; nothing else is needed."""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
    "about:blank",
)
END = b"\0"


class Page:
    """The one tab of a browser."""

    def __init__(self, send: int, receive: int) -> None:
        self._send = send
        self._receive = receive
        self._heard = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        """What the page's script threw, or what its policy held back."""

        target = next(
            each for each in self.ask("Target.getTargets")["targetInfos"] if each["type"] == "page"
        )
        attached = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command of the protocol."""
        self._number += 1
        order = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            order["sessionId"] = self._session
        os.write(self._send, json.dumps(order).encode() + END)
        while True:
            message = self._next()
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                result: dict[str, Any] = message["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while END not in self._heard:
            piece = os.read(self._receive, 1 << 20)
            assert piece, "the browser is gone"
            self._heard += piece
        line, self._heard = self._heard.split(END, 1)
        message: dict[str, Any] = json.loads(line)
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(message["params"]["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded":
            self.errors.append(message["params"]["entry"]["text"])
        return message

    def open(self, url: str) -> None:
        self.ask("Page.navigate", url=url)

    def sized(self, width: int, height: int, *, dark: bool = False) -> None:
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = "dark" if dark else "light"
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", features=features)

    def value(self, script: str) -> Any:
        """What a piece of JavaScript comes to."""
        result = self.ask("Runtime.evaluate", expression=script, returnByValue=True)["result"]
        return result.get("value")

    def text(self) -> str:
        return str(self.value("document.body.innerText"))

    def picture(self, path: Path) -> None:
        """All of the page, as a PNG."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser(directory: Path) -> Iterator[Page]:
    """A page of a browser whose profile is in ``directory``."""
    assert PROGRAM is not None
    to_browser, ours_out = os.pipe()
    ours_in, from_browser = os.pipe()
    script = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
    with (directory / "browser.log").open("wb") as log:
        running = subprocess.Popen(
            ("bash", "-c", script, "browser", PROGRAM, f"--user-data-dir={directory}", *FLAGS),
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        os.close(to_browser)
        os.close(from_browser)
        yield Page(ours_out, ours_in)
    finally:
        running.terminate()
        running.wait(10)
        os.close(ours_out)
        os.close(ours_in)
