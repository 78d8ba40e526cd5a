"""The environment of a server process: this process's, without secrets that the server does not need."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ..config.params import ModelParams
from .secrets import is_secret

HUB_TOKENS = {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}


def server_environment(m: ModelParams) -> dict[str, str]:
    """This process's environment for a child server: of the secrets only the Hub's, if needed; offline mode where
    possible."""
    env = without_secrets(os.environ, keep=HUB_TOKENS if m.hub else set())
    env["PYTHONUNBUFFERED"] = "1"
    # kernels compiled at start need ninja; it is next to the interpreter, even if the venv is not activated
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    if not m.hub:
        env["HF_HUB_OFFLINE"] = "1"
    return env


def without_secrets(env: os._Environ[str] | dict[str, str], keep: set[str]) -> dict[str, str]:
    """A copy of an environment without variables named like secrets, except those in `keep`."""
    return {k: v for k, v in env.items() if k in keep or not is_secret(k)}
