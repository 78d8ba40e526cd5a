"""What HTTP costs the naive server: its TPOT as a client sees it against the bare decode loop's, measured side by side.

    python benchmarks/bench_naive.py [--config tiny-qwen2] [--prompt-tokens 128] [--output-tokens 128] [--repeats 15]

The loop and the server take turns, so that whatever else the machine does meets both. Exit status 1 above --limit.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from servebook import engines, params


def bare_tpot_s(model, prompt: list[int], output_tokens: int) -> float:
    times = [time.perf_counter() for _ in model.generate(prompt, output_tokens)]
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tiny-qwen2", help="a packaged config; weights are random")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=float, default=1.05, help="largest accepted ratio")
    options = parser.parse_args()

    run = {
        "run": "bench", "title": "bench", "model": {"config": options.config, "weights": "dummy"},
        "hardware": {"gpu": "detect"}, "engines": {"hf": {"kind": "naive", "device": options.device}},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        with engines.start(params.RunParams.model_validate(run), "hf", run_dir, base=run_dir) as engine:
            from servebook.engines.naive_model import NaiveModel

            model = NaiveModel(str(run_dir / "model" / options.config), dummy=True, device=options.device)
            rng = random.Random(1)
            bare, served = [], []
            for repeat in range(options.repeats + 2):
                prompt = [rng.randrange(model.vocab) for _ in range(options.prompt_tokens)]
                pair = (
                    bare_tpot_s(model, prompt, options.output_tokens),
                    http_tpot_s(engine.url, prompt, options.output_tokens),
                )
                if repeat >= 2:  # the first two warm caches up
                    bare.append(pair[0])
                    served.append(pair[1])
    ratio = statistics.median(s / b for s, b in zip(served, bare, strict=True))
    quiet = statistics.mean(sorted(served)[: len(served) // 4]) / statistics.mean(sorted(bare)[: len(bare) // 4])
    low, _, high = statistics.quantiles((s / b for s, b in zip(served, bare, strict=True)), n=4)
    size = f"{options.prompt_tokens}/{options.output_tokens} tokens, {options.repeats} pairs"
    print(f"{options.config} on {model.facts['device']}, {size}")
    print(f"bare loop  TPOT {1e3 * statistics.median(bare):.3f} ms")
    print(f"over HTTP  TPOT {1e3 * statistics.median(served):.3f} ms")
    print(f"ratio {ratio:.3f} (quartiles {low:.3f}–{high:.3f}); fastest quarters {quiet:.3f}; limit {options.limit}")
    return 0 if ratio <= options.limit else 1


if __name__ == "__main__":
    sys.exit(main())
