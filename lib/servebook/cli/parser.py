"""The parser of the `servebook` command: every command with its options. `measure` has its own (measure_options.py)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from .. import __version__


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage, which is long for commands with many options."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and the message."""
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def build(calls: Mapping[str, Callable[[argparse.Namespace], int]]) -> argparse.ArgumentParser:
    """The parser of all commands. calls: the function that runs each command, by the command's name."""
    parser = Parser(prog="servebook", description="Predict how fast an LLM serves, measure it, explain the difference.")
    parser.add_argument("--version", action="version", version=f"servebook {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, help: str, *, params: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.add_argument("--debug", action="store_true", help="show tracebacks")
        if params:
            sub.add_argument("params", metavar="PARAMS", help="a parameter file, e.g. params/demo.yaml")
        sub.set_defaults(call=calls[name])
        return sub

    _add_predicting(command)
    _add_measuring(command)
    commands.add_parser("measure", help="benchmark any OpenAI-compatible server (servebook measure --help)")
    _add_stored_runs(command)
    return parser


def _add_predicting(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Commands that need no GPU."""
    command("check", "validate a parameter file")
    _model_options(
        command("model", "describe a model (parameters, bytes, KV pool) and check whether it fits a GPU", params=False)
    )
    sub = command("plan", "show every point with its predicted duration and cost; needs no GPU")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.add_argument(
        "--budget-minutes",
        type=float,
        metavar="M",
        help="suggest points to drop so that the run takes at most M minutes",
    )
    sub.add_argument(
        "--budget-cost", type=float, metavar="X", help="suggest points to drop so that the run costs at most X"
    )
    sub = command(
        "preflight", "check driver, toolchain, disk, ports and GPU; show how to fix each problem", params=False
    )
    sub.add_argument("params", metavar="PARAMS", nargs="?", help="also check what this run needs")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub = command("predict", "predict every point; with --calibration, calibrate on C = 1 points and score the others")
    sub.add_argument("--calibration", metavar="CSV", help="measured points, e.g. outputs/published/a40-qwen2.5-7b.csv")
    sub.add_argument(
        "--html", type=Path, metavar="FILE", help="with --calibration: write the points and their scores as a page"
    )
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub = command("score", "compare results of another load generator with the prediction for this hardware")
    sub.add_argument(
        "--measured", type=Path, required=True, metavar="FILE",
        help="results of vllm bench serve, sglang bench_serving, guidellm, aiperf, inference-perf, or a CSV",
    )  # fmt: skip
    sub.add_argument(
        "--engine",
        metavar="NAME",
        help="the engine of PARAMS that was measured; default: the first with continuous batching",
    )
    sub.add_argument(
        "--workload",
        metavar="NAME",
        help="a workload of PARAMS that gives the length distribution and shared prefix if FILE lacks them",
    )
    sub.add_argument("--html", type=Path, metavar="FILE", help="write the comparison as a page")
    sub.add_argument("--json", action="store_true", help="print JSON")
    _add_choosing(command)


def _add_choosing(command: Callable[..., argparse.ArgumentParser]) -> None:
    sub = command(
        "capacity",
        "find the largest load within the service level (slo), its cost, and the effect of other settings",
    )
    sub.add_argument(
        "--workload", metavar="NAME", help="a workload of PARAMS; default: the requests of the first sweep"
    )
    for of in ("prompt", "output"):
        sub.add_argument(
            f"--{of}-tokens", metavar="N", help=f"{of} length: a number, 800:1000, normal:MEAN,SD or lognormal:MEAN,SD"
        )
    sub.add_argument(
        "--gpu", action="append", default=[], metavar="NAME[=PRICE]",
        help="also assess this GPU, at this price per hour; may be repeated",
    )  # fmt: skip
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub = command("choose", "find the cheapest configuration that meets the service level (slo) at its target load")
    sub.add_argument(
        "--gpu", action="append", default=[], metavar="NAME[=PRICE]",
        help="a GPU to consider and its price per hour; may be repeated; default: all with a public list price",
    )  # fmt: skip
    sub.add_argument("--max-gpus", type=int, metavar="N", help="maximum number of GPUs over all replicas; default: 16")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.add_argument("--html", type=Path, metavar="FILE", help="write the answer as a page")
    sub.add_argument(
        "--write-params",
        type=Path,
        metavar="DIR",
        help="write parameter files that measure the choice and its two closest rivals",
    )
    sub.add_argument(
        "--measured", type=Path, action="append", default=[], metavar="RUN_DIR",
        help="check the choice against a run that measured it; may be repeated",
    )  # fmt: skip


def _add_measuring(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Commands that start engines."""
    sub = command("serve", "start an engine in the foreground; Ctrl-C or SIGTERM stops it with all its processes")
    sub.add_argument("--engine", required=True, metavar="NAME", help="an engine of PARAMS")
    sub = command("grid", "write one parameter file for every combination of settings")
    sub.add_argument(
        "--set", action="append", required=True, metavar="KEY=A,B", dest="settings",
        help="a key and its values, e.g. hardware.gpu=A100-80GB-SXM,H200; may be repeated",
    )  # fmt: skip
    sub.add_argument("--into", type=Path, required=True, metavar="DIR", help="folder for the new files")
    sub = command("run", "run the whole book: predict, serve, measure, analyse, report; continues an interrupted run")
    sub.add_argument(
        "--only", metavar="STAGE", help="run only this: a notebook (name or number), a sweep, or report (the page)"
    )
    sub.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)  # until 0.1: it is what always happens


def _add_stored_runs(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Commands on the folder of a run."""
    sub = command("post", "write the post for a static site generator: Markdown and images", params=False)
    sub.add_argument("run", metavar="RUN_DIR", type=Path, help="a run's folder, or its parameter file")
    sub.add_argument(
        "--front-matter", default="hugo", metavar="GENERATOR", help="hugo (default), jekyll, astro or none"
    )
    sub.add_argument("--out", type=Path, metavar="DIR", help="default: post/ in the run's folder")
    sub = command("compare", "put several stored runs on one page; the first is the baseline", params=False)
    sub.add_argument("run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="folders of stored runs")
    sub.add_argument("--out", type=Path, metavar="FILE", help="default: compare.html beside the first run's folder")
    sub = command("pack", "write a compact copy of a stored run, to keep or publish", params=False)
    sub.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's folder, e.g. outputs/demo")
    sub.add_argument("into", metavar="DIR", type=Path, help="a new folder")
    sub = command("audit", "apply the current audit rules to a stored run and update its verdicts", params=False)
    sub.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's folder, e.g. outputs/demo")
    sub = command("report", "rebuild the page of a stored run; needs no GPU", params=False)
    sub.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's folder, e.g. outputs/demo")
    sub.add_argument("--again", action="store_true", help="execute the notebooks again first; nothing is measured")
    sub.add_argument("--url", help="where the page will be published: sets its canonical link and og:image")


def _model_options(sub: argparse.ArgumentParser) -> None:
    """Options of `servebook model`; they are here so that parsing imports nothing else."""
    sub.add_argument(
        "models", metavar="MODEL", nargs="+", help="a config.json, a folder that has one, a packaged name or a Hub id"
    )
    sub.add_argument("--gpu", metavar="NAME", help="a GPU of the catalog: show the KV pool and concurrency on it")
    sub.add_argument("--gpus", type=int, metavar="N", help="tensor parallel size; default: 1")
    sub.add_argument(
        "--context", type=int, metavar="TOKENS", help="longest context of a request; default: the model's own"
    )
    sub.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="type of the activations; default: bfloat16",
    )
    sub.add_argument(
        "--quantization", choices=("fp8", "int8", "int4"), help="quantize the weights when the engine loads them"
    )
    sub.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="type of the KV cache; default: auto, the model's type",
    )
    sub.add_argument("--json", action="store_true", help="print JSON: one object, or a list for several models")
