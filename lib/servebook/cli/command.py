"""The `servebook` command: parses, calls one package, prints. User errors are one line and exit status 1.

One module: a short function for each command.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..common.errors import ServebookError
from . import parser

EXIT_FAULT, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: list[str] | None = None) -> int:
    """Run the command; its exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):  # print what the terminal cannot encode as an escape sequence
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if empty := next((i for i, a in enumerate(arguments) if not a.strip() or re.fullmatch(r"--[\w-]+=\s*", a)), None):
        # "$MODEL" of a variable that is not set: what was meant is not known
        where = arguments[empty] or arguments[empty - 1]
        print(f"servebook: {where}: an argument is empty. Give it, or leave it out with its option", file=sys.stderr)
        return EXIT_USAGE
    if arguments[:1] == ["measure"]:  # its own parser, so that the first request is sent within a second
        return _guarded(_measure, argparse.Namespace(debug="--debug" in arguments, rest=arguments[1:]))
    options = parser.build(CALLS).parse_args(arguments)
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
        for stream in (sys.stdout, sys.stderr):  # or Python would fail to flush them at exit
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return EXIT_FAULT
    except RuntimeError as error:  # Path.resolve, until Python 3.13
        if options.debug or not str(error).startswith("Symlink loop"):
            raise
        print(f"servebook: {error}", file=sys.stderr)
        return EXIT_FAULT
    except OSError as error:  # disk full, no permission
        if options.debug:
            raise
        print(f"servebook: {error.filename or 'system'}: {error.strerror or error}", file=sys.stderr)
        return EXIT_FAULT


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
        # raises where the model cannot be split over so many GPUs; notes name flags that are not modelled
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
        on_point=_prediction_progress(),
    )
    print(json.dumps(plan, indent=1) if options.json else planning.plan_text(plan))
    return 0


def _prediction_progress() -> Callable[[int, int], None]:
    """A callback that prints the progress of long predictions every few seconds."""
    printed_at = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal printed_at
        if time.monotonic() - printed_at > 3.0:
            printed_at = time.monotonic()
            _print_progress(f"predicted {done} of {total} points")

    return show


def _preflight(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from ..config import params
    from ..run import preflight
    from ..run.book import find_params, outputs_folder

    if options.params:  # not through Book: a model that cannot be loaded is one of the findings
        path = find_params(options.params)
        run = params.read_file(path)
        checks = preflight.run(run, path.resolve().parent, outputs_folder() / run.run)
    else:
        checks = preflight.run(None, None, None)
    print(json.dumps([asdict(c) for c in checks], indent=1) if options.json else preflight.text(checks))
    return EXIT_FAULT if any(c.status == "fail" for c in checks) else 0


def _predict(options: argparse.Namespace) -> int:
    from . import predict as predict_cli

    _writable(options.html)
    if options.html:
        return predict_cli.write_page(options.params, options.calibration, options.html)
    return predict_cli.main(options.params, options.calibration, as_json=options.json)


def _writable(page: Path | None) -> None:
    """Raises ServebookError where a page cannot be written, before anything is computed for it."""
    from ..common import files

    if page is not None:
        files.check_file(page)


def _score(options: argparse.Namespace) -> int:
    from . import score as score_cli

    _writable(options.html)
    return score_cli.main(
        options.params, options.measured, engine=options.engine, workload=options.workload, html=options.html,
        as_json=options.json,
    )  # fmt: skip


def _capacity(options: argparse.Namespace) -> int:
    from . import capacity as capacity_cli

    return capacity_cli.main(
        options.params, options.workload, options.prompt_tokens, options.output_tokens, options.gpu,
        as_json=options.json,
    )  # fmt: skip


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
    except KeyboardInterrupt:  # the normal way to end
        print(f"\n{options.engine} ended", flush=True)
        return 0


def _measuring(engine: Any, api_key_env: str | None) -> str:
    """The command line that measures a server, for copying."""
    key = ["--api-key-env", api_key_env] if api_key_env else []
    return shlex.join(["servebook", "measure", "--url", engine.url, "--model", engine.model, *key])


def _run(options: argparse.Namespace) -> int:
    from ..run import pipeline

    outcome = pipeline.run(options.params, only=options.only, command=["servebook", *sys.argv[1:]])
    if outcome.report:
        _print_paths(outcome.report)
    for line in outcome.warnings:
        print(f"servebook: warning: {line}", file=sys.stderr)
    for fault in outcome.faults:
        print(f"servebook: {fault}", file=sys.stderr)
    return EXIT_FAULT if outcome.faults else 0


def _post(options: argparse.Namespace) -> int:
    from ..report.export import export_post, known_generator
    from ..run.book import Book
    from ..run.replay import replay_run
    from ..run_folder.lock_and_signals import orderly_signals, single_run

    known_generator(options.front_matter)
    book = Book.open(options.run) if options.run.is_file() else Book.at(options.run)
    post = book.files.notebooks / "08_post.ipynb"
    if not post.exists():
        with single_run(book.dir), orderly_signals():
            replay_run(book.dir, on_step=_print_progress)
    print(export_post(book.dir, post, options.out or book.dir / "post", front_matter=options.front_matter))
    return 0


def _compare(options: argparse.Namespace) -> int:
    from ..report.compare import compare

    out = options.out or options.run_dirs[0].resolve().parent / "compare.html"
    _writable(out)
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
            replay_run(book.dir, on_step=_print_progress)
        elif behind := out_of_date(book):
            _print_progress(f"executing the notebooks again: {behind}")
            try:
                replay_run(book.dir, on_step=_print_progress)
            except ServebookError as error:  # render the notebooks that were executed
                _print_progress(f"servebook: {error}")
                for line in book.point_status.unfinished():
                    _print_progress(f"servebook: {line}")
        _print_paths(pipeline.report(book, str(book.files.params), url=options.url))
    return 0


def _print_paths(report: Path) -> None:
    """Print the paths of the report and its lab book."""
    from ..report.render import written

    for path in written(report):
        print(path)


def _print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


CALLS = {
    "check": _check,
    "model": _model,
    "plan": _plan,
    "preflight": _preflight,
    "predict": _predict,
    "score": _score,
    "capacity": _capacity,
    "choose": _choose,
    "serve": _serve,
    "grid": _grid,
    "run": _run,
    "post": _post,
    "compare": _compare,
    "pack": _pack,
    "audit": _audit,
    "report": _report,
}
