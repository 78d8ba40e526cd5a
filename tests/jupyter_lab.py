"""A real JupyterLab for the browser tests: started as `make lab` starts it, with folders of its own, driven by CDP."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromium

ROOT = Path(__file__).parents[1]
TOKEN = "a-token-of-the-tests"
DIRS = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR",
        "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR", "XDG_CACHE_HOME")  # fmt: skip


def made_command(root: Path) -> str:
    """What `make lab` would run, as one line of shell, over another folder."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    said = subprocess.run(["make", "-n", "lab"], cwd=ROOT, env=clean, capture_output=True, text=True, check=True).stdout
    line = said.replace("\\\n", " ").rpartition("jupyter lab")[2]
    return "jupyter lab " + re.sub(r"--ServerApp.root_dir=\S+", f"--ServerApp.root_dir='{root}'", line).strip()


@contextlib.contextmanager
def server(root: Path, home: Path, **env: str) -> Iterator[str]:
    """A JupyterLab over `root` on a free port of 127.0.0.1; gives its URL. It reads and writes nothing of the user's.

    env: further variables of the server, which its kernels see.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dirs = {name: str(home / name.lower()) for name in DIRS}
    # the expose flag lets the tests call Lab's own commands; all else is what a user gets
    options = (
        f"--no-browser --ServerApp.port={port} --ServerApp.port_retries=0 "
        f"--IdentityProvider.token={TOKEN} --LabApp.expose_app_in_browser=True --LabApp.extension_manager=readonly"
    )
    log = home / "lab.log"
    home.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {Path(sys.executable).parent}/{made_command(root)} {options}"], cwd=ROOT, stdout=out,
            stderr=out, start_new_session=True,
            env={**os.environ, **dirs, "HOME": str(home), "JUPYTER_PREFER_ENV_PATH": "1", **env},
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: _answers(url) or process.poll() is not None, "JupyterLab", 60)
        assert process.poll() is None, log.read_text()[-2000:]
        yield url
    finally:
        process.send_signal(signal.SIGTERM)  # it ends its kernels
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with contextlib.suppress(OSError), opener.open(f"{url}/api/status?token={TOKEN}", timeout=2) as answer:
        return answer.status == 200
    return False


def until(met: Any, what: str, seconds: float = 60) -> Any:
    """Ask until the answer is true, and give it."""
    deadline = time.monotonic() + seconds
    while not (found := met()):
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:.0f} s"
        time.sleep(0.1)
    return found


class Page:
    """JupyterLab in a browser's tab."""

    def __init__(self, tab: chromium.Tab, url: str) -> None:
        self.tab, self.url = tab, url

    def open(self, path: str, *, at: str | None = None, width: int = 1440, height: int = 1000) -> None:
        """Open a file in a fresh page of Lab and wait until it is there, in front. at: a place that leads to it."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.tab.events.clear()
        self.tab.call("Emulation.setDeviceMetricsOverride", **size)
        self.tab.call("Emulation.setFocusEmulationEnabled", enabled=True)  # Lab's commands go to what has the focus
        self.tab.call("Page.navigate", url=f"{self.url}{at or f'/lab/tree/{path}'}?token={TOKEN}")
        self.front(path)

    def front(self, path: str) -> None:
        """Wait for a file's tab and make it the one that Lab's commands go to."""
        mine = f"[...jupyterapp.shell.widgets('main')].find(w => w.context && w.context.path === {json.dumps(path)})"
        self.until(f"(window.here = {mine}) && here.context.isReady", path)
        self.tab.ask("jupyterapp.shell.activateById(here.id)")
        self.until("jupyterapp.shell.currentWidget === here", f"{path} in front")

    def until(self, condition: str, what: str, seconds: float = 60) -> None:
        """Wait until a JavaScript expression is true."""
        asked = f"(() => {{ try {{ return !!({condition}) }} catch (e) {{ return false }} }})()"
        try:
            until(lambda: self.tab.ask(asked), what, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; the page says: {self.errors()}") from None

    def errors(self) -> list[str]:
        """The errors that cells of the notebook in front show."""
        return self.tab.ask(
            "[...window.here?.content?.model?.cells ?? []].flatMap(c => c.type === 'code' ? c.outputs.toJSON() : [])"
            ".filter(o => o.output_type === 'error').map(o => o.ename + ': ' + o.evalue)"
        )

    def command(self, name: str, **options: Any) -> None:
        """One of Lab's own commands, not waited for (running cells would block)."""
        self.tab.ask(f"void jupyterapp.commands.execute({json.dumps(name)}, {json.dumps(options)})")

    def notebook(self) -> None:
        """Wait until the notebook in front has its kernel."""
        self.until("here.sessionContext.session.kernel.status === 'idle'", "an idle kernel")

    def idle(self) -> bool:
        return self.tab.ask("here.sessionContext.session.kernel.status") == "idle"

    def ran(self) -> bool:
        """Whether every code cell has been executed."""
        return self.idle() and self.tab.ask(
            "[...here.content.model.cells].filter(c => c.type === 'code').every(c => c.executionCount !== null)"
        )

    def save(self) -> None:
        assert self.tab.ask("jupyterapp.commands.execute('docmanager:save').then(() => true)")

    def press(self, key: str, code: int) -> None:
        """One press of a key, where the focus is."""
        for kind in ("keyDown", "keyUp"):
            self.tab.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def click(self, selector: str) -> None:
        """A click of the mouse in the middle of an element of the notebook in front."""
        box = f"here.node.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.tab.ask(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({box})")
        for kind in ("mousePressed", "mouseReleased"):
            self.tab.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path: Path) -> Path:
        path.write_bytes(base64.b64decode(self.tab.call("Page.captureScreenshot")["data"]))
        return path
