"""Checks of what this run needs from outside: ports, model, engines."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from pathlib import Path

from ... import model as models
from ...common.errors import ServebookError
from ...config import params
from .machine import NO_PARAMS, Finding, Machine, Status

HUB_TIMEOUT_S = 4.0


def ports(m: Machine) -> Finding:
    if m.params is None:
        return NO_PARAMS
    from ...engines import ports

    asked = {name: getattr(e, "port", None) for name, e in m.params.engines.items()}
    given = {name: int(port) for name, port in asked.items() if port}
    taken = [f"{port} ({name})" for name, port in given.items() if not ports.is_free(port)]
    if taken:
        return "fail", f"in use: {', '.join(taken)}", "Give another port, or leave `port` out: a free one is chosen"
    if not given:
        return "ok", "none given, a free one was found" if ports.is_free(ports.free_port()) else "none given"
    return "ok", f"{', '.join(map(str, given.values()))} free"


def model(m: Machine) -> Finding:
    if m.params is None:
        return NO_PARAMS
    wanted = m.params.model
    name = models.model_name(wanted)
    if wanted.hub and not cached(wanted):
        if why := hub_refusal(wanted):
            return "fail", f"{name} is not in the cache, and {why[0]}", why[1]
        return "ok", f"{name}: the Hub has it and grants access"
    try:
        models.read_shape(wanted, m.base)
    except ServebookError as error:
        return "fail", f"{error.where}: {error.what}", error.fix
    if wanted.path and wanted.weights == "real" and not has_weights(models.local_folder(wanted.path, m.base)):
        return "fail", f"{name} has no weight files", "Put the *.safetensors there, or set model.weights: dummy"
    if wanted.path:
        folder = models.local_folder(wanted.path, m.base)
        outside = not folder.is_relative_to(m.base.resolve().parent)
        return "ok", f"{name} is there" + (f", outside the project: {folder}" if outside else "")
    return "ok", f"{name}, {wanted.weights} weights"


def engines(m: Machine) -> Finding:
    if m.params is None:
        return NO_PARAMS
    from ... import engines

    cannot = {name: why for name in m.params.engines if (why := engines.check(m.params, name))}
    if cannot:
        status: Status = "fail" if len(cannot) == len(m.params.engines) else "warn"
        reasons = "; ".join(f"{name}: {why}" for name, why in cannot.items())
        return status, reasons, "The run goes on with the other engines" if status == "warn" else "Use another engine"
    if dies := _dies_on_this_cpu(m):
        return (
            "warn",
            f"{dies}: vLLM's attention in bfloat16 may end with an illegal instruction",
            "Set model.dtype: float32",
        )
    return "ok", ", ".join(m.params.engines)


def _dies_on_this_cpu(m: Machine) -> str:
    """Why vLLM may end at its first requests: with bfloat16, vLLM 0.32 on a Xeon with AMX (model 207) ended in
    cpu_attention_with_kv_cache within a few requests of nearly every start, with float32 never."""
    if m.params is None or m.gpu is not None or m.params.model.dtype != "bfloat16" or "amx_tile" not in m.cpu_flags:
        return ""
    vllm = any(isinstance(e, params.VllmEngine) for e in m.params.engines.values())
    return "this processor has AMX" if vllm else ""


def hub_folder(hub: str) -> Path:
    """Where the Hub's cache keeps a model."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{hub.replace('/', '--')}"


def cached(wanted: params.ModelParams) -> bool:
    """Whether the Hub's cache holds what the run needs of this revision: config.json, and the weights unless dummy."""
    folder, revision = hub_folder(str(wanted.hub)), wanted.revision or "main"
    try:
        commit = (folder / "refs" / revision).read_text().strip()
    except OSError:
        commit = revision  # a commit, or a branch never fetched
    snapshot = folder / "snapshots" / commit
    return (snapshot / "config.json").exists() and (wanted.weights == "dummy" or has_weights(snapshot))


def to_fetch(wanted: params.ModelParams) -> bool:
    """Whether a Hub model has to be downloaded and can be: it is not cached, and the Hub does not refuse it."""
    return not cached(wanted) and hub_refusal(wanted) is None


def has_weights(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in ("*.safetensors", "*.bin", "*.pt"))


def hub_refusal(wanted: params.ModelParams) -> tuple[str, str] | None:
    """(why the Hub refuses the model's config.json, how to fix it), None if it does not."""
    fetch = f"Check the network, or download it first: hf download {wanted.hub}"
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes"):
        return "the Hub may not be contacted (HF_HUB_OFFLINE is set)", fetch
    from huggingface_hub import get_token

    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    revision = wanted.revision or "main"
    request = urllib.request.Request(f"{endpoint}/{wanted.hub}/resolve/{revision}/config.json", method="HEAD")
    if token := get_token():
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S):
            return None
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return f"the Hub refuses it ({error.code})", "Accept the model's terms on its page, then `hf auth login`"
        if error.code == 404:
            return f"the Hub has no {wanted.hub} at {revision}", "Correct model.hub or model.revision"
        return f"the Hub answers {error.code}", fetch
    except (OSError, ValueError) as error:
        return f"the Hub does not answer ({getattr(error, 'reason', error)})", fetch
