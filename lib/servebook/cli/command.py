"""The command. Parses, calls one room, prints; every fault the user can act on is one line and exit status 1."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import __version__
from ..common.errors import ServebookError

EXIT_FAULT, EXIT_INTERRUPTED = 1, 130


def main(argv: list[str] | None = None) -> int:
    """Run the command; its exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a character shows another
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if arguments[:1] == ["measure"]:  # its own parser: it must be at the first request within a second
        return _guarded(_measure, argparse.Namespace(debug="--debug" in arguments, rest=arguments[1:]))
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return _guarded(options.call, options)


def _measure(options: argparse.Namespace) -> int:
    from .measure import main as measure

    return measure(options.rest)


def _guarded(call: Any, options: argparse.Namespace) -> int:
    try:
        return int(call(options) or 0)
    except ServebookError as error:
        if options.debug:
            raise
        print(f"servebook: {error}", file=sys.stderr)
        return EXIT_FAULT
    except KeyboardInterrupt:
        kept = "; what was measured is kept, run again to go on" if getattr(options, "call", None) is _run else ""
        print(f"\nservebook: interrupted{kept}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):  # what they still hold would be written at the end, to nobody
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return EXIT_FAULT
    except OSError as error:  # what nothing else has put into words: a disk, a permission
        if options.debug:
            raise
        print(f"servebook: {error.filename or 'system'}: {error.strerror or error}", file=sys.stderr)
        return EXIT_FAULT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="servebook", description="Predict how fast an LLM serves, measure it, explain the difference."
    )
    parser.add_argument("--version", action="version", version=f"servebook {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, call: Any, help: str, *, params: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.add_argument("--debug", action="store_true", help="show tracebacks")
        if params:
            sub.add_argument("params", metavar="PARAMS", help="a parameter file, e.g. params/demo.yaml")
        sub.set_defaults(call=call)
        return sub

    _add_predicting(command)
    _add_measuring(command)
    commands.add_parser("measure", help="load any OpenAI-compatible server (servebook measure --help)")
    _add_stored_runs(command)
    return parser


def _add_predicting(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Commands that need no GPU."""
    command("check", _check, "validate a parameter file")
    _model_options(
        command("model", _model, "what a model is and whether it fits: parameters, bytes, KV pool", params=False)
    )
    sub = command("plan", _plan, "show every point with its predicted duration and cost; needs no GPU")
    sub.add_argument("--json", action="store_true")
    sub.add_argument(
        "--budget-minutes",
        type=float,
        metavar="M",
        help="suggest what to leave out so that the run takes at most M minutes",
    )
    sub.add_argument(
        "--budget-cost", type=float, metavar="X", help="suggest what to leave out so that the run costs at most X"
    )
    sub = command(
        "preflight", _preflight, "check driver, toolchain, disk, ports and GPU, and say how to fix each", params=False
    )
    sub.add_argument("params", metavar="PARAMS", nargs="?", help="also check what this run needs")
    sub.add_argument("--json", action="store_true")
    sub = command(
        "predict", _predict, "predict every point; with --calibration, calibrate on C = 1 points and score the others"
    )
    sub.add_argument("--calibration", metavar="CSV", help="measured points, e.g. outputs/published/a40-qwen2.5-7b.csv")
    sub.add_argument(
        "--html", type=Path, metavar="FILE", help="with --calibration: write the points and their scores as a page"
    )
    sub.add_argument("--json", action="store_true")
    sub = command("score", _score, "results of another load generator against what this hardware should do")
    sub.add_argument(
        "--measured", type=Path, required=True, metavar="FILE",
        help="of vllm bench serve, sglang bench_serving, guidellm, aiperf, inference-perf, or a CSV of requests",
    )  # fmt: skip
    sub.add_argument("--engine", metavar="NAME", help="default: the first that batches")
    sub.add_argument(
        "--workload",
        metavar="NAME",
        help="of the parameters: what the file does not tell of the requests (spread, shared prefix)",
    )
    sub.add_argument("--html", type=Path, metavar="FILE", help="a page of it")
    sub.add_argument("--json", action="store_true")
    _add_choosing(command)


def _add_choosing(command: Callable[..., argparse.ArgumentParser]) -> None:
    sub = command(
        "capacity",
        _capacity,
        "find the largest load within the service level (slo), its cost, and what would change it",
    )
    sub.add_argument("--prompt-tokens", type=int, metavar="N", help="default: those of the first sweep")
    sub.add_argument("--output-tokens", type=int, metavar="N", help="default: those of the first sweep")
    sub.add_argument(
        "--gpu", action="append", default=[], metavar="NAME[=PRICE]", help="another GPU of the catalog; may be repeated"
    )
    sub.add_argument("--json", action="store_true")
    sub = command("choose", _choose, "the cheapest set-up that meets the run's slo at its target load")
    sub.add_argument(
        "--gpu", action="append", default=[], metavar="NAME[=PRICE]",
        help="a card to search and its price per hour; may be repeated (default: all with a public list price)",
    )  # fmt: skip
    sub.add_argument("--max-gpus", type=int, metavar="N", help="cards over all replicas (default 16)")
    sub.add_argument("--json", action="store_true")
    sub.add_argument("--html", type=Path, metavar="FILE", help="write the answer as a page")
    sub.add_argument(
        "--write-params", type=Path, metavar="DIR", help="write parameter files that measure the choice and two rivals"
    )
    sub.add_argument(
        "--measured", type=Path, action="append", default=[], metavar="RUN_DIR",
        help="say whether the choice stands by a run that measured it; may be repeated",
    )  # fmt: skip


def _add_measuring(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Commands that start engines."""
    sub = command(
        "serve", _serve, "start an engine in the foreground; Ctrl-C or SIGTERM stops it with all its processes"
    )
    sub.add_argument("--engine", required=True, metavar="NAME")
    sub = command("grid", _grid, "write one parameter file for every combination of settings")
    sub.add_argument(
        "--set", action="append", required=True, metavar="KEY=A,B", dest="settings",
        help="a key and its values, e.g. hardware.gpu=A100-80GB-SXM,H200; may be repeated",
    )  # fmt: skip
    sub.add_argument("--into", type=Path, required=True, metavar="DIR", help="folder for the files")
    sub = command(
        "run", _run, "run the whole book: predict, serve, measure, analyse, report; continues an interrupted run"
    )
    sub.add_argument("--only", metavar="STAGE", help="run only this: a notebook (name or number), a sweep, or report")
    sub.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)  # until 0.1: it is what always happens


def _add_stored_runs(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Commands on the folder of a run."""
    sub = command("post", _post, "write the post for a blog engine: index.md and images/", params=False)
    sub.add_argument("run", metavar="RUN_DIR", type=Path, help="a run's folder, or its parameter file")
    sub.add_argument("--front-matter", default="hugo", metavar="ENGINE", help="hugo (default), jekyll, astro or none")
    sub.add_argument("--out", type=Path, metavar="DIR", help="default: post/ in the run's folder")
    sub = command("compare", _compare, "put several stored runs on one page; the first is the baseline", params=False)
    sub.add_argument("run_dirs", metavar="RUN_DIR", type=Path, nargs="+")
    sub.add_argument("--out", type=Path, metavar="FILE", help="default: compare.html beside the first run's folder")
    sub = command("pack", _pack, "write a compact copy of a stored run, to keep or publish", params=False)
    sub.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    sub.add_argument("into", metavar="DIR", type=Path, help="a new folder")
    sub = command("audit", _audit, "judge the points of a stored run again by today's rules", params=False)
    sub.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    sub = command("report", _report, "write the page of a stored run again; needs no GPU", params=False)
    sub.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    sub.add_argument("--again", action="store_true", help="execute the notebooks again first; nothing is measured")


def _model_options(sub: argparse.ArgumentParser) -> None:
    """Here and not beside what answers them: no other command waits for its imports."""
    sub.add_argument(
        "models", metavar="MODEL", nargs="+", help="a config.json, a folder that has one, a packaged name or a Hub id"
    )
    sub.add_argument("--gpu", metavar="NAME", help="a card of the catalog: its KV pool and concurrency")
    sub.add_argument("--gpus", type=int, metavar="N", help="how many of them the model is split over (default: 1)")
    sub.add_argument("--context", type=int, metavar="TOKENS", help="the longest context (default: the model's own)")
    sub.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    sub.add_argument("--quantization", choices=("fp8", "int8", "int4"), help="applied when the engine loads it")
    sub.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    sub.add_argument("--json", action="store_true", help="one object, or a list where several models are given")


def _check(options: argparse.Namespace) -> int:
    from ..hardware import catalog as hardware
    from ..predictor import server_limits
    from ..run import preflight
    from ..run.book import Book

    book = Book.open(options.params)
    for warning in preflight.warnings(book.params, book.base):
        print(f"servebook: {options.params}: {warning}", file=sys.stderr)
    gpu = hardware.resolve(book.params.hardware)
    for name, engine in book.params.engines.items():
        # the model can be split over so many GPUs, and the flags are what the predictor knows
        for note in server_limits.server(name, engine, book.shape, gpu).notes:
            print(f"servebook: {options.params}: engines.{name}: {note}", file=sys.stderr)
    engines = ", ".join(book.params.engines)
    print(
        f"{options.params}: valid. {book.shape.name} on {gpu.name}, engines {engines}, {len(book.params.sweeps)} sweeps"
    )
    return 0


def _model(options: argparse.Namespace) -> int:
    from .model import main as model

    return model(options)


def _plan(options: argparse.Namespace) -> int:
    from ..predictor import plan as planning
    from ..run.book import Book

    book = Book.open(options.params)
    plan = planning.plan(
        book.params,
        book.shape,
        book.gpu,
        budget_minutes=options.budget_minutes,
        budget_cost=options.budget_cost,
        on_point=_predicting(),
    )
    print(json.dumps(plan, indent=1) if options.json else planning.plan_text(plan))
    return 0


def _predicting() -> Callable[[int, int], None]:
    """Says every few seconds how far the predictions are, where they take long."""
    said = time.monotonic()

    def say(done: int, of: int) -> None:
        nonlocal said
        if time.monotonic() - said > 3.0:
            said = time.monotonic()
            _say(f"predicted {done} of {of} points")

    return say


def _preflight(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from ..config import params
    from ..run import preflight
    from ..run.book import find_params, outputs_folder

    if options.params:  # not through Book: a model that cannot be had is a finding like the others
        path = find_params(options.params)
        run = params.load(path)
        checks = preflight.run(run, path.resolve().parent, outputs_folder() / run.run)
    else:
        checks = preflight.run(None, None, None)
    print(json.dumps([asdict(c) for c in checks], indent=1) if options.json else preflight.text(checks))
    return EXIT_FAULT if any(c.status == "fail" for c in checks) else 0


def _predict(options: argparse.Namespace) -> int:
    from . import predict as predict_cli

    if options.html:
        return _published(options)
    return predict_cli.main(options.params, options.calibration, as_json=options.json)


def _score(options: argparse.Namespace) -> int:
    from . import score as score_cli

    return score_cli.main(
        options.params, options.measured, engine=options.engine, workload=options.workload, html=options.html,
        as_json=options.json,
    )  # fmt: skip


def _capacity(options: argparse.Namespace) -> int:
    from . import capacity as capacity_cli

    return capacity_cli.main(
        options.params, options.prompt_tokens, options.output_tokens, options.gpu, as_json=options.json
    )


def _choose(options: argparse.Namespace) -> int:
    from . import choose as choose_cli

    return choose_cli.main(
        options.params, options.gpu, options.max_gpus, as_json=options.json, html=options.html,
        write_params=options.write_params, measured=options.measured,
    )  # fmt: skip


def _grid(options: argparse.Namespace) -> int:
    from ..run.book import find_params
    from .grid import write_grid

    for path in write_grid(find_params(options.params), options.settings, options.into):
        print(path)
    return 0


def _serve(options: argparse.Namespace) -> int:
    from ..run.book import Book
    from ..run_folder.lock_and_signals import orderly_signals

    book = Book.open(options.params, create=True)
    book.engine_names(options.engine)
    try:
        with orderly_signals(kept=""), book.engine(options.engine) as engine:
            print(f"{options.engine}: {engine.url}/v1 serves {engine.model}; Ctrl-C stops it")
            print(_measuring(engine, getattr(book.params.engines[options.engine], "api_key_env", None)), flush=True)
            while engine.alive():
                engine.wait(1.0)
            raise ServebookError(f"{options.engine} ended by itself", engine.url, engine.log_tail(5))
    except KeyboardInterrupt:  # how it is meant to end, whoever asks for it
        print(f"\n{options.engine} ended", flush=True)
        return 0


def _measuring(engine: Any, api_key_env: str | None) -> str:
    """The command that measures a server, to be pasted."""
    key = ["--api-key-env", api_key_env] if api_key_env else []
    return shlex.join(["servebook", "measure", "--url", engine.url, "--model", engine.model, *key])


def _run(options: argparse.Namespace) -> int:
    from ..run import pipeline

    outcome = pipeline.run(options.params, only=options.only, command=["servebook", *sys.argv[1:]])
    if outcome.report:
        _name(outcome.report)
    for line in outcome.warnings:
        print(f"servebook: warning: {line}", file=sys.stderr)
    for fault in outcome.faults:
        print(f"servebook: {fault}", file=sys.stderr)
    return EXIT_FAULT if outcome.faults else 0


def _published(options: argparse.Namespace) -> int:
    if not options.calibration:
        raise ServebookError("a page needs measured points", "--html", "Give them with --calibration CSV")
    from ..predictor import predict
    from ..report.published import write_published
    from ..run.book import Book, find_params
    from ..run_folder import published

    book, source = Book.open(options.params), find_params(options.calibration)
    measured, facts = published.read(source)
    prediction = predict.predict_published(book.params, book.shape, book.gpu, measured, facts)
    clean = None
    if any(p.cache_hit_share for p in measured):
        fresh = [replace(p, cache_hit_share=None) for p in measured]
        clean = predict.predict_published(book.params, book.shape, book.gpu, fresh, facts)
    page = write_published(options.html, prediction, measured, book.params, book.gpu, source=source, clean=clean)
    print(page)
    return 0


def _post(options: argparse.Namespace) -> int:
    from ..report.export import export_post
    from ..run.book import Book
    from ..run.replay import replay_run
    from ..run_folder.lock_and_signals import orderly_signals, single_run

    book = Book.open(options.run) if options.run.is_file() else Book.at(options.run)
    post = book.files.notebooks / "08_post.ipynb"
    if not post.exists():
        with single_run(book.dir), orderly_signals():
            replay_run(book.dir, on_step=_say)
    print(export_post(book.dir, post, options.out or book.dir / "post", front_matter=options.front_matter))
    return 0


def _compare(options: argparse.Namespace) -> int:
    from ..report.compare import compare

    out = options.out or options.run_dirs[0].resolve().parent / "compare.html"
    print(compare([d.resolve() for d in options.run_dirs], out))
    return 0


def _pack(options: argparse.Namespace) -> int:
    from ..run_folder.pack import pack

    print(pack(options.run_dir, options.into))
    return 0


def _audit(options: argparse.Namespace) -> int:
    from ..run.audit_again import audit_run

    points, changed = audit_run(options.run_dir)
    for line in changed:
        print(line)
    verdicts = f"{len(changed)} verdict{'s' * (len(changed) > 1)} changed" if changed else "no verdict changed"
    print(f"{points} points, {verdicts}")
    return 0


def _report(options: argparse.Namespace) -> int:
    from ..run import pipeline
    from ..run.book import Book
    from ..run.replay import out_of_date, replay_run
    from ..run_folder.lock_and_signals import orderly_signals, single_run

    book = Book.at(options.run_dir)
    with single_run(book.dir), orderly_signals():
        if options.again or not (book.files.notebooks).exists():
            replay_run(book.dir, on_step=_say)
        elif behind := out_of_date(book):
            _say(f"executing the notebooks again: {behind}")
            try:
                replay_run(book.dir, on_step=_say)
            except ServebookError as error:  # what was executed is a page all the same
                _say(f"servebook: {error}")
                for line in book.point_status.unfinished():
                    _say(f"servebook: {line}")
        _name(pipeline.report(book, str(book.files.params)))
    return 0


def _name(report: Path) -> None:
    """The report and its lab book, a line each."""
    from ..report.render import written

    for path in written(report):
        print(path)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
