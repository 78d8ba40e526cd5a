"""Runs parameter files on rented machines, one machine each: `.venv/bin/python skypilot/launch.py params/a.yaml …`.

For every file: `sky launch` with the GPU that its `hardware.gpu` names (as many as its engines ask for), rsync of
outputs/<run> back when it has ended, however it did, and `sky down`. Files run at the same time; what SkyPilot says of
each goes to outputs/<run>.sky.log. Needs `sky` on the PATH (`pip install "skypilot[runpod]"` or another cloud's, in an
environment of its own) and a cloud that `sky check` accepts; it costs what the machines cost. `--dry-run` prints the
commands. `--check`, with the Python that SkyPilot is installed in, lets its own loader read the task file.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

if "--check" not in sys.argv:  # SkyPilot's Python need not have servebook
    from servebook.common.errors import ServebookError
    from servebook.config import params

ROOT = Path(__file__).resolve().parents[1]
TASK = ROOT / "skypilot" / "servebook.yaml"
# the catalog's name → SkyPilot's (`sky gpus list`), where they differ
ACCELERATORS = {
    "A100-40GB-PCIe": "A100", "A100-40GB-SXM": "A100", "A100-80GB-PCIe": "A100-80GB", "A100-80GB-SXM": "A100-80GB",
    "RTX-4090": "RTX4090", "RTX-5090": "RTX5090", "H100-PCIe": "H100", "H100-SXM": "H100",
}  # fmt: skip


def gpus_of(run: params.RunParams) -> str:
    """SkyPilot's accelerator for a run, e.g. A100-80GB:2. Raises ServebookError where the file does not name a GPU."""
    name = run.hardware.gpu
    if name in (None, "detect"):
        raise ServebookError("does not say which GPU to rent", f"{run.run}, hardware.gpu", "Name one, or give --gpus")
    count = max(
        e.tensor_parallel_size * e.pipeline_parallel_size * e.data_parallel_size if e.continuous_batching else 1
        for e in run.engines.values()
    )
    return f"{ACCELERATORS.get(str(name), name)}:{count}"


def commands(path: Path, gpus: str | None) -> list[list[str]]:
    """What is run for one parameter file, in order; the last gives the machine back, whatever the others came to."""
    run = params.read_file(path)
    try:
        inside = path.resolve().relative_to(ROOT).as_posix()
    except ValueError:
        raise ServebookError(
            "is outside of the checkout, which is all that the machine gets", str(path), "Move it into params/"
        ) from None
    machine = run.run.replace(".", "-").replace("_", "-").lower()
    return [
        ["sky", "launch", "-y", "-c", machine, str(TASK), "--gpus", gpus or gpus_of(run), "--env", f"PARAMS={inside}"],
        ["rsync", "-az", f"{machine}:sky_workdir/outputs/{run.run}/", f"{ROOT / 'outputs' / run.run}/"],
        ["sky", "down", "-y", machine],
    ]


def run_one(path: Path, gpus: str | None) -> bool:
    """Run a file's commands; whether all went well."""
    launch, fetch, down = commands(path, gpus)
    name = params.read_file(path).run
    (ROOT / "outputs" / name).mkdir(parents=True, exist_ok=True)
    log_path = ROOT / "outputs" / f"{name}.sky.log"
    with log_path.open("ab") as log:

        def call(command: list[str]) -> int:
            return subprocess.run(command, stdout=log, stderr=log, cwd=ROOT).returncode

        measured, fetched = 1, 1
        try:
            measured = call(launch)
            fetched = call(fetch)
        finally:
            ended = call(down)
    if ended:
        print(f"{name}: the machine may still be running: {shlex.join(down)}", file=sys.stderr)
    good = not (measured or fetched or ended)
    print(f"{name}: {'done' if good else 'not complete'}, see {log_path.relative_to(ROOT)}", flush=True)
    return good


def check() -> int:
    """Let SkyPilot's own loader read the task file."""
    try:
        import sky
    except ImportError:
        print("launch.py: SkyPilot is not installed here: pip install skypilot", file=sys.stderr)
        return 1
    task = sky.Task.from_yaml(str(TASK))
    task.validate()
    (resources,) = task.resources
    print(f"SkyPilot {sky.__version__} takes {TASK.relative_to(ROOT)}: {resources}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("params", nargs="*", type=Path, metavar="PARAMS")
    parser.add_argument("--gpus", help="SkyPilot's accelerator, e.g. H100:1, in place of the one in hardware.gpu")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run none")
    parser.add_argument("--check", action="store_true", help="let SkyPilot's loader read the task file")
    options = parser.parse_args()
    if options.check:
        return check()
    if not options.params:
        parser.error("give one or more parameter files")
    try:
        planned = [commands(p, options.gpus) for p in options.params]
    except ServebookError as error:
        print(f"launch.py: {error}", file=sys.stderr)
        return 1
    if options.dry_run:
        for steps in planned:
            print(*map(shlex.join, steps), sep="\n")
        return 0
    try:
        with ThreadPoolExecutor(len(planned)) as pool:  # waits, also after Ctrl-C, until every machine is given back
            return 0 if all(list(pool.map(lambda p: run_one(p, options.gpus), options.params))) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
