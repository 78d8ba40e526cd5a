"""Executes one notebook with papermill, and reports a failure on one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..common.errors import ServebookError
from ..common.notebook_format import quick_import

KERNEL = "python3"


def execute(
    source: Path, target: Path, parameters: dict[str, Any], *, on_retry: Callable[[str], None] = lambda _: None
) -> None:
    """Run one notebook with papermill. A failure keeps the partial copy as NAME.failed.ipynb and raises ServebookError.

    The finished copy appears under its name only if every cell ran, so a failed notebook is never published. A notebook
    whose kernel died is run once more; its measured points are kept.
    """
    with quick_import():
        import papermill
    from jupyter_client.kernelspec import NoSuchKernel
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillException

    from .kernels import Kernel

    if not source.exists():
        raise ServebookError("no such notebook", str(source), "Restore notebooks/ from the repository")
    unknown = set(parameters) - set(papermill.inspect_notebook(_literal(source)))
    if unknown:  # papermill only warns, and uses the defaults
        raise ServebookError(
            f"has no parameter {', '.join(sorted(unknown))}", source.name, "Add it to the cell tagged parameters"
        )
    partial = target.with_name(target.name.replace(".ipynb", ".failed.ipynb"))
    for attempt in (1, 2):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            # the kernel's own log: it warns of loopback sockets at every start, and of every interruption
            papermill.execute_notebook(
                _literal(source), _literal(partial), parameters, kernel_name=KERNEL, progress_bar=False,
                cwd=str(source.parent), extra_arguments=["--IPKernelApp.log_level=CRITICAL"],
                kernel_manager_class=Kernel,
            )  # fmt: skip
            break
        except RuntimeError as error:
            if not isinstance(error, DeadKernelError) and "Kernel died" not in str(error):  # the latter: at its start,
                raise _notebook_fault(source, partial, error) from error  # where another took a port meant for it
            if attempt == 2:
                raise ServebookError(
                    "its kernel died twice", source.name,
                    "Look for the system's out-of-memory killer (dmesg), then run again: what is measured is kept",
                ) from error  # fmt: skip
            on_retry(f"the kernel of {source.name} died; running it again")
        except NoSuchKernel as error:
            raise ServebookError(
                f"there is no Jupyter kernel {KERNEL!r}", source.name, "Install ipykernel in this Python"
            ) from error
        except OSError as error:
            raise ServebookError(
                f"cannot write the executed copy ({error.strerror or error})", str(partial),
                "Free space or permissions there, then run again: what is measured is kept",
            ) from error  # fmt: skip
        except (PapermillException, ValueError) as error:
            raise _notebook_fault(source, partial, error) from error
    cells = json.loads(partial.read_text())["cells"]
    unrun = [
        i for i, c in enumerate(cells) if c["cell_type"] == "code" and c["source"] and c.get("execution_count") is None
    ]
    if unrun:  # papermill reports success if a cell calls sys.exit(0) or the kernel died
        raise ServebookError(
            f"stopped before cell {unrun[0]} without an error", source.name, f"Open {partial} to see how far it came"
        )
    partial.replace(target)


def _literal(path: Path) -> str:
    """A path that papermill leaves unchanged: it fills in text in braces."""
    return str(path).replace("{", "{{").replace("}", "}}")


def _notebook_fault(source: Path, partial: Path, error: Exception) -> ServebookError:
    name, value = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", str(error))
    first_line = str(value).strip().splitlines()[0] if str(value).strip() else name
    what = first_line if name == "ServebookError" else f"{name}: {first_line}"
    return ServebookError(
        what.rstrip("."),
        _failed_cell(source, partial),
        f"The copy up to there is {partial}; correct it and run again; measured points are kept",
    )


def _failed_cell(source: Path, partial: Path) -> str:
    """The notebook and the failed cell, counted from 1, with the heading above it."""
    try:
        ran = json.loads(partial.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError):
        return source.name
    failed = next((c for c in ran if any(o["output_type"] == "error" for o in c.get("outputs", []))), None)
    cells = json.loads(source.read_text(encoding="utf-8"))["cells"]
    index = next((i for i, c in enumerate(cells) if failed and c.get("id") == failed.get("id")), None)
    if index is None:
        return source.name
    above = [
        line
        for c in cells[:index]
        if c["cell_type"] == "markdown"
        for line in "".join(c["source"]).splitlines()
        if line.startswith("#")
    ]
    return f"{source.name}, cell {index + 1}" + (f" (under {above[-1].lstrip('# ')!r})" if above else "")
