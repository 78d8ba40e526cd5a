"""What the client itself adds at a given load: a short run against a loopback server that records the truth.

The server is this module run as a program, in a process of its own. It answers every request with the given time to
first token and time per token and records its own time stamps, comparable on the same machine's clock.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
from statistics import median
from typing import Any, NamedTuple

from ..common.errors import ServebookError
from ..config.params import Load, Slo
from ..config.points import PointSpec
from .client import now

_TOKEN = b'data: {"choices":[{"index":0,"text":" x","finish_reason":null}]}\n\n'
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Added(NamedTuple):
    """What the client adds to the medians of TTFT and TPOT."""

    ttft_s: float
    tpot_s: float


SECONDS = 3.0  # of a self-check, about


def self_check(spec: PointSpec, *, ttft_s: float, tpot_s: float) -> Added:
    """Measure the loopback server with `spec`'s load and given schedule.

    Returns the client's medians minus the server's.
    """
    from .point import measure_point_sync
    from .window import Rule

    c = spec.concurrency or 1
    tokens = min(spec.output_tokens, max(2, int(SECONDS / 3 / max(tpot_s, 1e-3))))
    rounds = max(2, round(SECONDS / (ttft_s + tokens * tpot_s)))
    command = [sys.executable, "-m", __name__, str(min(ttft_s, SECONDS / 3)), str(tpot_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and server.stdin is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            point = measure_point_sync(
                dataclasses.replace(spec, output_tokens=tokens, prompt_tokens=min(spec.prompt_tokens, 512)),
                url=url, model="loopback", vocab=range(100, 1000), load=Load(), slo=Slo(), run_dir=None, batching=True,
                rule=Rule(c, rounds * c, rounds * c, 0.0, 10 * SECONDS),
            )  # fmt: skip
            server.stdin.close()  # on end of input, print the recorded times and exit
            truth = json.loads(server.stdout.readline())
        except (ValueError, OSError) as error:
            raise ServebookError(f"the loopback server failed ({error})", "self-check") from None
        finally:
            server.kill()
    return Added((point.ttft_p50_s or 0.0) - truth["ttft_p50_s"], (point.tpot_p50_s or 0.0) - truth["tpot_p50_s"])


async def _serve(ttft_s: float, itl_s: float) -> None:
    seen: list[tuple[float, float, float, int]] = []  # arrival, first, last, tokens

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                arrived = now()
                if head.startswith(b"get"):
                    writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                    continue
                length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
                await _answer(json.loads(await reader.readexactly(length)), arrived, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(request: dict[str, Any], arrived: float, writer: asyncio.StreamWriter) -> None:
        writer.write(_HEAD)
        first, tokens = 0.0, request["max_tokens"]
        for k in range(tokens):
            await asyncio.sleep(arrived + ttft_s + k * itl_s - now())
            if writer.is_closing():
                return
            last = now()
            first = first or last
            writer.write(b"%x\r\n%b\r\n" % (len(_TOKEN), _TOKEN))
        seen.append((arrived, first, last, tokens))
        usage = {"prompt_tokens": len(request["prompt"]), "completion_tokens": tokens}
        end = b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"choices": [], "usage": usage}).encode()
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(end), end))

    server = await asyncio.start_server(connection, "127.0.0.1", 0, backlog=4096, limit=1 << 24)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    whole = [s for s in seen if s[3] > 2]
    ttft = median(s[1] - s[0] for s in whole)
    print(json.dumps({"ttft_p50_s": ttft, "tpot_p50_s": median((s[2] - s[1]) / (s[3] - 1) for s in whole)}), flush=True)


if __name__ == "__main__":
    try:
        import uvloop

        uvloop.run(_serve(*map(float, sys.argv[1:3])))
    except ImportError:
        asyncio.run(_serve(*map(float, sys.argv[1:3])))
