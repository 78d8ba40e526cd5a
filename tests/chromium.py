"""A small client of Chromium's DevTools protocol for the page tests: load a file, watch it, ask it things."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import websocket

PATH = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--remote-debugging-port=0", "--remote-allow-origins=*",
)  # fmt: skip


class Tab:
    """One page and everything that it said on the way."""

    def __init__(self, url: str) -> None:
        self.socket = websocket.create_connection(url, timeout=30)
        self.count = 0
        self.events: list[dict[str, Any]] = []
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.count += 1
        self.socket.send(json.dumps({"id": self.count, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self.count:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def open(self, path: Path, *, width: int = 1200, dark: bool = False) -> None:
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + 30
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            assert time.monotonic() < deadline, "the page did not load"
            self.call("Runtime.evaluate", expression="1")

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression (a promise is awaited)."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def requests(self) -> list[str]:
        """URLs asked for beyond the page itself and what is inside it."""
        sent = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [u for u in sent if not u.startswith(("data:", "file:"))] + [u for u in sent if u.startswith("file:")][
            1:
        ]

    def complaints(self) -> list[str]:
        """Console messages, log entries and exceptions."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(e["params"])[:400] for e in self.events if e.get("method") in kinds]


@contextlib.contextmanager
def browser() -> Iterator[Tab]:
    """A headless Chromium with a fresh profile, ended with all of its processes."""
    assert PATH
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [PATH, *QUIET, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            yield Tab(_tab_url(Path(profile) / "DevToolsActivePort", process))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=10)


def _tab_url(port_file: Path, process: subprocess.Popen[bytes]) -> str:
    import urllib.request

    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert process.poll() is None, "Chromium ended at once"
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError, StopIteration):
            port = int(port_file.read_text().splitlines()[0])
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(f"http://127.0.0.1:{port}/json/list", timeout=5) as answer:
                return next(t["webSocketDebuggerUrl"] for t in json.load(answer) if t["type"] == "page")
        time.sleep(0.1)
    raise AssertionError("Chromium's DevTools did not come up")
