"""Detects keys in a parameter file. They must not be there: the file is copied into the run's folder and the report."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from ..common.errors import ServebookError
from ..config.params import BatchingEngine, Engine, OpenAIEngine

WORDS = {"TOKEN", "KEY", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "CREDENTIALS", "PAT"}


def key_of(variable: str | None, where: str) -> str | None:
    """The key in an environment variable, without the trailing line feed of a file or `echo`; None if no variable is
    named.

    Raises ServebookError if the variable is not set or cannot be sent in a header.
    """
    if not variable:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ServebookError(f"the environment variable {variable} is not set", where, "Set it to the key")
    if not key.isascii() or not key.isprintable():
        raise ServebookError(f"the key in {variable} has characters that no header can hold", where, "Set it again")
    return key


def is_secret(variable: str) -> bool:
    """Whether an environment variable has the name of a secret."""
    return bool(WORDS & set(variable.upper().split("_")))


def _of_argument(argument: str) -> str | None:
    """The name of the secret in an argument: --api-key, --hf_token=…, HF_TOKEN=…, a bearer header; None without one."""
    name, _, value = argument.partition("=")
    if name.startswith("-"):
        # only the last word counts: --api-key is a secret, --long-prefill-token-threshold is not
        return name if name.upper().replace("_", "-").split("-")[-1] in WORDS else None
    if value and is_secret(name):
        return name
    return "a bearer token" if "bearer " in argument.lower() else None


def in_params(engine: Engine) -> tuple[str, str] | None:
    """(the key and what is wrong, the fix) for a secret in an engine's parameters, None without one."""
    if isinstance(engine, OpenAIEngine) and engine.url:
        parts = urlsplit(engine.url)
        if parts.username or parts.password or parts.query:
            return "url holds more than an address", "Give a key by its environment variable's name, in api_key_env"
    if isinstance(engine, BatchingEngine):
        for name in engine.env:
            if is_secret(name):
                return f"env sets {name}, which would be stored with the run", "Export it in the shell instead"
    for key in ("extra_args", "command"):
        for argument in getattr(engine, key, None) or []:
            if found := _of_argument(argument):
                return f"{key} has {found}, which would be stored with the run", "Leave it out"
    return None
