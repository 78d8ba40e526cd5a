"""Configurations of routers that exist, for the replicas of a choice. servebook writes them and runs none.

vLLM production stack: Helm values (helm/values.schema.json of its repository). Ray Serve: an application of
`ray.serve.llm` (its configuration reference), without data parallelism, which Ray builds from other deployments. llm-d:
the patch of the model server's Deployment in its guide `optimized-baseline`. All three as of November 2026.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ..engines.vllm import serve_flags
from ..hardware.catalog import Gpu
from ..predictor import server_flags
from ..predictor.choice import Choice
from ..predictor.set_ups import SetUp

ROUTERS = ("vLLM production stack", "Ray Serve", "llm-d")
AMD = ("cdna3", "cdna4")  # generations of AMD's cards
IMAGES = {True: "vllm/vllm-openai-rocm", False: "vllm/vllm-openai"}  # by whether the card is AMD's
# what Ray calls a card (accelerator_type); one that is not here is left to the cluster
RAY_CARDS = {
    "H200": "H200", "B200": "B200", "H20": "H20", "H100-SXM": "H100", "H100-PCIe": "H100", "H100-NVL": "H100",
    "A100-80GB-SXM": "A100-80G", "A100-80GB-PCIe": "A100-80G", "A100-40GB-SXM": "A100-40G",
    "A100-40GB-PCIe": "A100-40G", "A10G": "A10G", "L40S": "L40S", "L4": "L4", "T4": "T4",
    "V100-16GB-SXM": "V100", "V100-32GB-SXM": "V100", "MI300X": "AMD-Instinct-MI300X-OAM",
    "MI325X": "AMD-Instinct-MI325X-OAM", "MI355X": "AMD-Instinct-MI355X-OAM",
}  # fmt: skip
# flags of vLLM's API server, which Ray's ingress replaces
OF_THE_API_SERVER = {"served-model-name", "disable-uvicorn-access-log", "host", "port", "api-key"}
SECRET = "a gated model needs a Hugging Face token"


def router_configs(choice: Choice, model: str) -> dict[str, str]:
    """{file: content} for each router that can run the choice. model: the argument for vLLM: Hub id or folder."""
    c = choice.chosen
    s, count, given = c.set_up, c.replicas or 1, choice.workshop.params.model
    name = re.sub(r"[^a-z0-9]+", "-", Path(model).name.lower()).strip("-")  # it names services, too
    flags = serve_flags(s.model(given).model_copy(update={"weights": "real"}), s.engine)
    head = f"# {count} replica{'s' * (count > 1)} of {s.name}. Made by servebook choose, not run by it.\n"
    if Path(model).is_absolute():
        head += f"# The folder {model} must exist in every container.\n"
    found = {
        "router-production-stack.yaml": head
        + f"# requestCPU and requestMemory are guesses; {SECRET}: modelSpec.hf_token.\n"
        + "# helm repo add vllm https://vllm-project.github.io/production-stack\n"
        + "# helm install vllm vllm/vllm-stack -f router-production-stack.yaml\n"
        + _yaml(_production_stack(s, count, name, model, flags)),
        "router-llm-d.yaml": head
        + f"# limits of CPU and memory are the guide's; {SECRET}: secret llm-d-hf-token.\n"
        + f"# Put it in the place of guides/optimized-baseline/modelserver/{'amd' if _amd(s.gpu) else 'gpu'}/vllm/base/"
        + "patch-vllm.yaml\n# of github.com/llm-d/llm-d, then follow that guide: router first, then kubectl apply -k.\n"
        + _yaml(_llm_d(s, count, model, flags)),
    }
    if s.engine.data_parallel_size == 1:
        ray, card = _ray(s, count, name, model, flags), s.gpu.name in RAY_CARDS
        unknown = (
            "" if card else f"# Ray has no accelerator_type for {s.gpu.name}: the cluster must hold no other card.\n"
        )
        found["router-ray-serve.yaml"] = head + unknown + "# serve run router-ray-serve.yaml\n" + _yaml(ray)
    return found


def _yaml(data: Any) -> str:
    return yaml.safe_dump(data, sort_keys=False, width=120)


def _amd(gpu: Gpu) -> bool:
    return gpu.generation in AMD


def _resource(gpu: Gpu) -> str:
    return "amd.com/gpu" if _amd(gpu) else "nvidia.com/gpu"


def _production_stack(s: SetUp, count: int, name: str, model: str, flags: Sequence[str]) -> dict[str, Any]:
    values = dict(server_flags.pairs(flags))
    keyed = {
        "dtype": "dtype", "max-model-len": "maxModelLen", "max-num-seqs": "maxNumSeqs",
        "gpu-memory-utilization": "gpuMemoryUtilization",
    }  # fmt: skip
    config = {key: yaml.safe_load(values[flag] or "") for flag, key in keyed.items() if flag in values}
    config |= {"tensorParallelSize": s.engine.tensor_parallel_size, "enablePrefixCaching": s.engine.prefix_caching}
    without = {*keyed, "served-model-name", "tensor-parallel-size", "enable-prefix-caching", "no-enable-prefix-caching"}
    spec = {
        "name": name, "repository": IMAGES[_amd(s.gpu)], "tag": "latest", "modelURL": model, "replicaCount": count,
        "requestCPU": 8, "requestMemory": "32Gi", "requestGPU": s.gpus,
        **({"requestGPUType": _resource(s.gpu)} if _amd(s.gpu) else {}),
        "vllmConfig": {**config, "extraArgs": _without(flags, without)},
    }  # fmt: skip
    return {
        "servingEngineSpec": {"modelSpec": [spec]},
        "routerSpec": {"enableRouter": True, "routingLogic": "roundrobin"},
    }


def _llm_d(s: SetUp, count: int, model: str, flags: Sequence[str]) -> dict[str, Any]:
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "llm-d-hf-token", "key": "HF_TOKEN"}}}
    caches = {
        "shm": ("/dev/shm", {"medium": "Memory", "sizeLimit": "20Gi"}), "torch-compile-cache": ("/.cache", {}),
        "triton-cache": ("/.triton", {}), "vllm-config": ("/.config", {}),
    }  # fmt: skip
    container = {
        "name": "modelserver", "command": ["vllm", "serve"], "args": [model, *_without(flags, {"served-model-name"})],
        "env": [token],
        "resources": {
            "limits": {"cpu": "20", "memory": "40Gi", _resource(s.gpu): s.gpus},
            "requests": {"cpu": "10", "memory": "20Gi", _resource(s.gpu): s.gpus},
        },
        "volumeMounts": [{"mountPath": path, "name": name} for name, (path, _) in caches.items()],
        "startupProbe": {"initialDelaySeconds": 15, "periodSeconds": 30, "timeoutSeconds": 5, "failureThreshold": 120},
        "livenessProbe": {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 3},
        "readinessProbe": {"periodSeconds": 5, "timeoutSeconds": 2, "failureThreshold": 3},
    }  # fmt: skip
    volumes = [{"name": name, "emptyDir": kind} for name, (_, kind) in caches.items()]
    pod = {"spec": {"containers": [container], "volumes": volumes}}
    return {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "decode"},
        "spec": {"replicas": count, "template": pod},
    }  # fmt: skip


def _ray(s: SetUp, count: int, name: str, model: str, flags: Sequence[str]) -> dict[str, Any]:
    """engine_kwargs are vLLM's flags with their values; --no-x is x: false."""
    kwargs: dict[str, Any] = {}
    for flag, value in server_flags.pairs(flags):
        if flag in OF_THE_API_SERVER:
            continue
        off = value is None and flag.startswith("no-")
        kwargs[flag.removeprefix("no-" * off).replace("-", "_")] = not off if value is None else yaml.safe_load(value)
    config: dict[str, Any] = {"model_loading_config": {"model_id": name, "model_source": model}}
    if card := RAY_CARDS.get(s.gpu.name):
        config["accelerator_type"] = card
    config |= {"engine_kwargs": kwargs, "deployment_config": {"num_replicas": count}}
    return {
        "applications": [{
            "name": "llm", "route_prefix": "/", "import_path": "ray.serve.llm:build_openai_app",
            "args": {"llm_configs": [config]},
        }],
    }  # fmt: skip


def _without(flags: Sequence[str], names: set[str]) -> list[str]:
    """Flags as typed, one word each, without those of these names and their values."""
    kept, skip = [], False
    for word in flags:
        if word.startswith("-"):
            skip = word.lstrip("-").partition("=")[0].replace("_", "-") in names
        if not skip:
            kept.append(word)
    return kept
