"""What HTTP costs the naive server: its TPOT as a client sees it against the bare decode loop's, measured side by side.

    python benchmarks/bench_naive.py [--config tiny-qwen2] [--prompt-tokens 128] [--output-tokens 128] [--rounds 4]

The loop and the server take turns, so that whatever else the machine does meets both. Exit status 1 above --limit.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from servebook import engines
from servebook.config import params
from servebook.engines.naive_model import use_cores


def bare_tpot_s(model, prompt: list[int], output_tokens: int) -> float:
    cores = os.sched_getaffinity(0)
    if model.device == "cpu":
        use_cores(decoding=True)
    times = [time.perf_counter() for _ in model.generate(prompt, output_tokens)]
    os.sched_setaffinity(0, cores)
    return (times[-1] - times[0]) / (output_tokens - 1)


def http_tpot_s(url: str, prompt: list[int], output_tokens: int) -> float:
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    body = {"prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    times = [time.perf_counter() for line in answer if line.startswith(b"data: {")]
    connection.close()
    assert len(times) == output_tokens, f"{len(times)} events for {output_tokens} tokens"
    return (times[-1] - times[0]) / (output_tokens - 1)


def measure(run: params.RunParams, config: str, options: argparse.Namespace) -> list[tuple[float, float]]:
    """(bare, over HTTP) seconds per token of one server and one model in this process, taking turns."""
    from servebook.engines.naive_model import NaiveModel

    pairs = []
    with tempfile.TemporaryDirectory() as folder, engines.start(run, "hf", Path(folder), base=Path(folder)) as engine:
        model = NaiveModel(str(Path(folder) / "model" / config), dummy=True, device=options.device)
        for _ in range(options.repeats + 2):
            prompt = [random.randrange(model.vocab) for _ in range(options.prompt_tokens)]
            bare = bare_tpot_s(model, prompt, options.output_tokens)
            pairs.append((bare, http_tpot_s(engine.url, prompt, options.output_tokens)))
    return pairs[2:]  # the first two warm caches up


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tiny-qwen2", help="a packaged config; weights are random")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10, help="pairs a round")
    parser.add_argument(
        "--rounds", type=int, default=4, help="new processes each: where memory lands moves both by 5 %%"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=float, default=1.05, help="largest accepted ratio")
    options = parser.parse_args()

    run = params.RunParams.model_validate(
        {
            "run": "bench", "title": "bench", "model": {"config": options.config, "weights": "dummy"},
            "hardware": {"gpu": "detect"}, "engines": {"hf": {"kind": "naive", "device": options.device}},
        }
    )  # fmt: skip
    random.seed(1)
    pairs = [pair for _ in range(options.rounds) for pair in measure(run, options.config, options)]
    ratios = [served / bare for bare, served in pairs]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    size = f"{options.prompt_tokens}/{options.output_tokens} tokens"
    print(f"{options.config}, {size}, {len(pairs)} pairs in {options.rounds} rounds")
    for what, values in zip(("bare loop", "over HTTP"), zip(*pairs, strict=True), strict=True):
        print(f"{what}  TPOT {1e3 * statistics.median(values):.3f} ms")
    print(f"ratio {ratio:.3f} (quartiles {low:.3f}–{high:.3f}), limit {options.limit}")
    return 0 if ratio <= options.limit else 1


if __name__ == "__main__":
    sys.exit(main())
