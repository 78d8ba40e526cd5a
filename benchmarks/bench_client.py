"""Load clients side by side on one mock server: what each costs, and how far its figures are from the server's truth.

The server (tests/mock_server.py) has a fixed schedule: 50 ms to the first token, then one every 10 ms, 64 tokens; its
own process is pinned to one core, each client with all its children to another. Peers run if they are installed:

    python benchmarks/bench_client.py                              servebook and, if importable, vllm bench serve
    python benchmarks/bench_client.py --python PATH                the Python whose vllm is meant
    python benchmarks/bench_client.py --guidellm PATH --aiperf PATH    their commands, each from its own environment
    python benchmarks/bench_client.py --only servebook --concurrency 64,256,1024
    python benchmarks/bench_client.py --no-gap --concurrency 64    2,048 requests, tokens without pauses
    python benchmarks/bench_client.py --arrivals                   gaps between arrivals, at the server
    python benchmarks/bench_client.py --prompts                    200 prompts of 20,000 tokens

Columns: CPU seconds of the client per 1,000 streamed tokens while it streamed; command to first request and last token
to exit, seconds; peak memory of its process tree; TTFT p50 and TPOT p99 as it reports them and as the server saw them,
ms; share of the time that a full closed loop's requests were in flight at the server (occupancy); share of the machine
that neither client nor server used while it streamed, but somebody else did (others: above 5 % a run is not clean);
CPU seconds of the server per 1,000 tokens: where it is above the client's, the server is what limits the rate.
With --repeat, clients take turns and the medians of each one's clean runs follow, with servebook's ratio to them.
"""

from __future__ import annotations

import argparse
import bisect
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).parents[1]
PROMPT, OUTPUT = 128, 64
CLEAN = 0.05
Command = tuple[list[str], Callable[[], dict[str, float]]]
VLLM_BENCH = (
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "p = FlexibleArgumentParser(); add_cli_args(p); main(p.parse_args())"
)


def get(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer that peers need; " tok" is one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    source = (p.read_text(errors="ignore") for p in sorted(Path(os.__file__).parent.glob("*.py"))[:80])
    special, alphabet = ["<|endoftext|>"], pre_tokenizers.ByteLevel.alphabet()
    words = (text for group in (source, [" tok" * 8] * 500) for text in group)
    t.train_from_iterator(
        words, trainers.BpeTrainer(vocab_size=4000, special_tokens=special, initial_alphabet=alphabet)
    )
    folder.mkdir()
    t.save(str(folder / "tokenizer.json"))
    end = special[0]
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": end, "pad_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "model_max_length": 131072}))
    shape = {"model_type": "gpt2", "vocab_size": 4000, "n_positions": 131072, "n_embd": 64, "n_layer": 1, "n_head": 2}
    (folder / "config.json").write_text(json.dumps({**shape, "architectures": ["GPT2LMHeadModel"]}))
    return folder


def servebook(o: argparse.Namespace, c: int, n: int, out: Path) -> Command:
    # the first C of the N are its warm-up
    command = [o.python, "-m", "servebook.cli", "measure", "--url", f"http://127.0.0.1:{o.port}", "--model", "mock"]
    command += ["--concurrency", str(c), "--prompt-tokens", str(PROMPT), "--output-tokens", str(OUTPUT)]
    command += ["--requests", str(n - c), "--warmup", str(c), "--json", str(out / "r.json"), "--jitter", str(o.jitter)]

    def read() -> dict[str, float]:
        p = json.loads((out / "r.json").read_text())
        ms = {"ttft_p50": 1e3 * p["ttft_p50_s"], "tpot_p99": 1e3 * p["tpot_p99_s"]}
        return {**ms, "tok_s": p["output_tok_per_s"], "verdict": p["verdict"], "reasons": p["reasons"]}

    return command, read


def vllm(o: argparse.Namespace, c: int, n: int, out: Path) -> Command:
    command = [o.python, "-c", VLLM_BENCH, "--backend", "openai", "--base-url", f"http://127.0.0.1:{o.port}"]
    command += ["--endpoint", "/v1/completions", "--model", "mock", "--tokenizer", str(o.tokenizer)]
    command += ["--dataset-name", "random", "--random-input-len", str(PROMPT), "--random-output-len", str(OUTPUT)]
    command += ["--ignore-eos", "--num-prompts", str(n), "--max-concurrency", str(c), "--disable-tqdm"]
    command += ["--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,99", "--save-result"]
    command += ["--result-dir", str(out), "--result-filename", "r.json"]

    def read() -> dict[str, float]:
        r = json.loads((out / "r.json").read_text())
        return {"ttft_p50": r["median_ttft_ms"], "tpot_p99": r["p99_tpot_ms"], "tok_s": r["output_throughput"]}

    return command, read


def guidellm(o: argparse.Namespace, c: int, n: int, out: Path) -> Command:
    command = [o.guidellm, "run", "--backend"]
    command += [f"kind=openai_http,target=http://127.0.0.1:{o.port},model=mock,request_format=/v1/completions"]
    command += ["--profile", f"kind=concurrent,streams={c}", "--constraint", f"kind=max_requests,count={n}"]
    command += ["--tokenizer", f"kind=hf_auto,model={o.tokenizer}", "--disable-console-interactive"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}"]
    command += ["--output", f"kind=json,path={out / 'r.json'}"]

    def read() -> dict[str, float]:
        m = json.loads((out / "r.json").read_text())["benchmarks"][0]["metrics"]
        ttft, tpot = (m[k]["successful"] for k in ("time_to_first_token_ms", "inter_token_latency_ms"))
        tok_s = m["output_tokens_per_second"]["successful"]["mean"]
        return {"ttft_p50": ttft["median"], "tpot_p99": tpot["percentiles"]["p99"], "tok_s": tok_s}

    return command, read


def aiperf(o: argparse.Namespace, c: int, n: int, out: Path) -> Command:
    command = [o.aiperf, "profile", "--model", "mock", "--url", f"http://127.0.0.1:{o.port}", "--endpoint-type"]
    command += ["completions", "--streaming", "--tokenizer", str(o.tokenizer)]
    command += ["--isl", str(PROMPT), "--isl-stddev", "0"]
    command += ["--osl", str(OUTPUT), "--osl-stddev", "0", "--extra-inputs", "ignore_eos:true", "--ui-type", "none"]
    command += ["--use-server-token-count", "--concurrency", str(c), "--request-count", str(n)]
    command += ["--artifact-dir", str(out), "--no-gpu-telemetry", "--no-server-metrics"]

    def read() -> dict[str, float]:
        r = json.loads((out / "profile_export_aiperf.json").read_text())
        ttft, tpot = r["time_to_first_token"]["p50"], r["inter_token_latency"]["p99"]
        return {"ttft_p50": ttft, "tpot_p99": tpot, "tok_s": r["output_token_throughput"]["avg"]}

    return command, read


CLIENTS = {"servebook": servebook, "vllm": vllm, "guidellm": guidellm, "aiperf": aiperf}


class Watch(threading.Thread):
    """CPU seconds of the client, of the server and of everything else on the machine, every 0.1 s until `end`."""

    def __init__(self, client: psutil.Process, server: psutil.Process):
        super().__init__()
        self.client, self.server = client, server
        self.begun_s = time.monotonic()
        self.of_client: list[tuple[float, float]] = [(self.begun_s, 0.0)]
        self.of_server: list[tuple[float, float]] = []
        self.of_machine: list[tuple[float, float]] = []  # busy seconds of all cores less the server's
        self.peak_bytes = 0.0
        self._stop_watching = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._stop_watching.wait(0.1):
            cpu = memory = 0.0
            for p in _tree(self.client):
                try:
                    times = p.cpu_times()
                    cpu, memory = cpu + times.user + times.system, memory + p.memory_info().rss
                except psutil.Error:
                    continue
            if memory:
                busy, served = psutil.cpu_times(), self.server.cpu_times()
                total = sum(busy) - busy.idle - busy.iowait - busy.guest - busy.guest_nice
                self.of_machine.append((time.monotonic(), total - served.user - served.system))
                self.of_server.append((time.monotonic(), served.user + served.system))
                self.of_client.append((time.monotonic(), cpu))
                self.peak_bytes = max(self.peak_bytes, memory)

    def end(self) -> None:
        self._stop_watching.set()
        self.join()


def run(o: argparse.Namespace, name: str, c: int, n: int, scratch: Path) -> dict[str, Any]:
    """One client once; what it reports beside what the server saw."""
    out = scratch / f"{name}-{c}-{time.monotonic_ns()}"
    out.mkdir()
    command, read = CLIENTS[name](o, c, n, out)
    get(o.port, "/truth?reset=1")
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "0"}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} if name in ("vllm", "guidellm") else {}
    with (out / "log").open("w") as log:
        child = psutil.Popen(
            ["taskset", "-c", str(o.client_core), *command],
            env={**os.environ, **quiet, **offline}, cwd=out, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        watch = Watch(child, o.server)
        code = child.wait(timeout=600)
    exited = time.monotonic()
    watch.end()
    truth = get(o.port, "/truth")
    if code not in (0, 1) or not truth["arrived_s"]:
        return {"client": name, "c": c, "failed": (out / "log").read_text()[-400:]}
    return {
        "client": name,
        "c": c,
        **_costs(watch, truth, exited),
        "occupancy": _occupancy(truth, c),
        "max_live": truth["max_live"],
        "true_ttft_p50": 1e3 * float(np.median(truth["ttft_s"])),
        "true_tpot_p99": 1e3 * float(np.percentile(truth["tpot_s"], 99)),
        **{f"reported_{k}": v for k, v in read().items()},
    }


def _costs(watch: Watch, truth: dict[str, Any], exited_s: float) -> dict[str, float]:
    """CPU, memory and idle time of a client that ran, between its first request and its last token."""
    first, last = truth["arrived_s"][0], truth["ended_s"][-1]
    used, served, all_but_server = (
        _cpu_at(samples, last) - _cpu_at(samples, first)
        for samples in (watch.of_client, watch.of_server, watch.of_machine)
    )
    return {
        "requests": truth["requests"],
        "true_tok_s": truth["tokens"] / (last - first),
        "others": max(0.0, (all_but_server - used) / (last - first) / (os.cpu_count() or 1)),
        "server_cpu_s_per_1k": 1e3 * served / truth["tokens"],
        "load_1m": os.getloadavg()[0],
        "cpu_s_per_1k": 1e3 * used / truth["tokens"],
        "first_request_s": first - watch.begun_s,
        "exit_s": exited_s - last,
        "peak_mb": watch.peak_bytes / 1e6,
    }


def _occupancy(truth: dict[str, Any], c: int) -> float:
    """Requests in flight over C in the steady part: neither the starting ramp nor the end, when requests run out."""
    first, last = truth["arrived_s"][0], truth["ended_s"][-1]
    begin, end = first + 0.2 * (last - first), first + 0.8 * (last - first)
    changes = [(t, 1) for t in truth["arrived_s"]] + [(t, -1) for t in truth["left_s"]]
    return sum(k * (end - max(t, begin)) for t, k in changes if t < end) / (end - begin) / c


def _tree(child: psutil.Process) -> list[psutil.Process]:
    try:
        return [child, *child.children(recursive=True)]
    except psutil.Error:
        return []


def _cpu_at(samples: list[tuple[float, float]], at: float) -> float:
    k = min(max(1, bisect.bisect([t for t, _ in samples], at)), len(samples) - 1)
    (t0, c0), (t1, c1) = samples[k - 1], samples[k]
    return c0 + (c1 - c0) * min(1.0, max(0.0, (at - t0) / (t1 - t0)))


def arrivals(o: argparse.Namespace) -> None:
    """Coefficient of variation of the gaps between arrivals, measured at the server: 0 for constant, 1 for Poisson."""
    for kind, rate, n in (("constant", 20, 300), ("poisson", 200, 4000)):
        get(o.port, "/truth?reset=1")
        command = [o.python, "-m", "servebook.cli", "measure", "--url", f"http://127.0.0.1:{o.port}", "--model", "mock"]
        command += ["--rate", str(rate), "--arrivals", kind, "--requests", str(n), "--warmup", "1"]
        command += ["--prompt-tokens", str(PROMPT), "--output-tokens", "2"]
        subprocess.run(["taskset", "-c", str(o.client_core), *command], check=False, stdout=subprocess.DEVNULL)
        gaps = np.diff(get(o.port, "/truth")["arrived_s"][1:])  # the first is the probe
        print(f"{kind:>10} {rate}/s: {len(gaps)} gaps, coefficient of variation {gaps.std() / gaps.mean():.4f}")


PROMPTS = """
import time
from servebook.load.prompts import Bodies, Prompts
begun = time.perf_counter()
bodies = Bodies(Prompts(range(1000, 151000), 20000, 1), {"model": "m", "stream": True})
size = sum(len(bodies(i)) for i in range(200))
print(f"200 prompts of 20,000 tokens out of a vocabulary of 150,000, {size / 1e6:.0f} MB of request bodies: ", end="")
print(f"{time.perf_counter() - begun:.2f} s")
"""


def show(r: dict[str, Any]) -> None:
    if "failed" in r:
        print(f"{r['client']:>10} {r['c']:>5}  failed: {r['failed']}")
        return
    print(
        f"{r['client']:>10} {r['c']:>5} {r['cpu_s_per_1k']:>9.4f} {r['first_request_s']:>8.2f} {r['exit_s']:>6.2f}"
        f" {r['peak_mb']:>8.0f} {r['reported_ttft_p50']:>9.1f} / {r['true_ttft_p50']:<7.1f}"
        f" {r['reported_tpot_p99']:>7.2f} / {r['true_tpot_p99']:<7.2f} {100 * r['occupancy']:>6.1f} {r['max_live']:>5}"
        f" {r['reported_tok_s']:>9.0f} {r['true_tok_s']:>9.0f} {100 * r['others']:>7.1f} {r['load_1m']:>5.1f}"
        f" {r['server_cpu_s_per_1k']:>9.4f}",
        flush=True,
    )


def medians(rows: list[dict[str, Any]]) -> None:
    """Each client's median over its clean runs (all of them, marked, where none was clean)."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for r in rows:
        if "failed" not in r:
            groups.setdefault((r["c"], r["client"]), []).append(r)
    print("medians of the runs in which others used less than 5 % of the machine")
    ours: dict[int, dict[str, Any]] = {}
    for (c, name), group in sorted(groups.items(), key=lambda g: (g[0][0], list(CLIENTS).index(g[0][1]))):
        clean = [r for r in group if r["others"] < CLEAN]
        numbers = [k for k, v in group[0].items() if isinstance(v, int | float)]
        r = {"client": name, **{k: float(np.median([r[k] for r in clean or group])) for k in numbers}}
        r |= {"c": c, "max_live": int(r["max_live"])}
        show(r)
        ours = ours | {c: r} if name == "servebook" else ours
        note = f"{len(clean)} of {len(group)} runs clean" if clean else f"NOT CLEAN, all {len(group)} runs"
        if name != "servebook" and c in ours:
            cpu, rate = (ours[c][k] / r[k] for k in ("cpu_s_per_1k", "true_tok_s"))
            # what a core of its own would read, whatever the server and others do
            note += (
                f"; tokens per CPU second {1e3 / ours[c]['cpu_s_per_1k']:,.0f} against {1e3 / r['cpu_s_per_1k']:,.0f}"
            )
            note += f"; servebook / {name}: CPU {cpu:.2f}, tokens/s {rate:.2f}"
        print(f"{'':>16}  {note}")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--python", default=sys.executable)
    p.add_argument("--guidellm", help="its command")
    p.add_argument("--aiperf", help="its command")
    p.add_argument("--only", help="clients, comma-separated")
    p.add_argument("--concurrency", default="64,256")
    p.add_argument("--rounds", type=int, default=10, help="requests = rounds x C")
    p.add_argument("--repeat", type=int, default=1)
    p.add_argument("--jitter", type=float, default=0.05)
    p.add_argument("--no-gap", action="store_true", help="a server without pauses: how fast can each client read")
    p.add_argument("--arrivals", action="store_true", help="instead: how regular servebook's arrivals are")
    p.add_argument("--prompts", action="store_true", help="instead: how soon 200 prompts of 20,000 tokens are ready")
    p.add_argument("--server-core", type=int, default=0)
    p.add_argument("--client-core", type=int, default=1)
    p.add_argument("--port", type=int, default=9100)
    p.add_argument("--json", type=Path)
    o = p.parse_args()
    if o.prompts:
        subprocess.run(["taskset", "-c", str(o.client_core), o.python, "-c", PROMPTS], check=True)
        return
    names = o.only.split(",") if o.only else [n for n in CLIENTS if n in ("servebook", "vllm") or getattr(o, n)]
    pace = ["ttft_s=0", "itl_s=0"] if o.no_gap else ["ttft_s=0.05", "itl_s=0.01"]
    pin = ["taskset", "-c", str(o.server_core)]
    server = psutil.Popen([*pin, sys.executable, str(ROOT / "tests/mock_server.py"), "--port", str(o.port), *pace])
    o.server = server
    try:
        for _ in range(100):
            try:
                get(o.port, "/v1/models")
                break
            except OSError:
                time.sleep(0.1)
        if o.arrivals:
            arrivals(o)
            return
        with tempfile.TemporaryDirectory() as scratch:
            o.tokenizer = tokenizer(Path(scratch) / "tokenizer") if names != ["servebook"] else None
            print(f"{'client':>10} {'C':>5} {'CPU s/1k':>9} {'first s':>8} {'exit s':>6} {'peak MB':>8}", end="")
            print(
                f" {'TTFT p50 / true':>19} {'TPOT p99 / true':>19} {'occ. %':>6} {'live':>5} {'tok/s':>9}",
                end="",
            )
            print(f" {'tok/s':>9} {'true':>9} {'others%':>7} {'load':>5} {'server/1k':>9}")
            rows = []
            for c in [int(c) for c in o.concurrency.split(",")] * o.repeat:
                for name in names:
                    n = 2048 if o.no_gap else o.rounds * c
                    rows.append(run(o, name, c, n, Path(scratch)))
                    show(rows[-1])
            if o.repeat > 1:
                medians(rows)
        if o.json:
            o.json.write_text(json.dumps(rows, indent=1))
    finally:
        server.terminate()
        server.wait(10)


if __name__ == "__main__":
    main()
