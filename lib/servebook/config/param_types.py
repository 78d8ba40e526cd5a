"""The strict base class of all parameter sections, and shared value types."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from ..common.urls import is_server_url

CALIBRATION = "calibration"  # the sweep that the C = 1 points belong to


def unfit(what: str, fix: str) -> PydanticCustomError:
    """The exception of a validator: the fault and its fix, which strict_yaml appends to its line."""
    return PydanticCustomError("unfit", "{what}", {"what": what, "fix": fix})


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", text):  # used in file and folder names
        fix = "Use letters, digits, '.', '_' and '-', the first a letter or a digit, at most 100"
        raise unfit(f"{text[:120]!r} is not a valid name", fix)
    return text


def _run_name(text: str) -> str:
    if text.lower() in ("reference", "published"):
        raise unfit(f"{text!r} is a folder of outputs/ that holds other runs", "Choose another name")
    return text


def _sweep_name(text: str) -> str:
    if text == CALIBRATION:
        raise unfit(f"a sweep named {text} would mix with the C = 1 points", "Choose another name")
    return text


def _once(values: list[Any]) -> list[Any]:
    # rates rounded to the digits of a point's name, so that two points cannot have the same name
    keys = [round(v, 3) if isinstance(v, float) else v for v in values]
    if again := [v for i, v in enumerate(values) if keys[i] in keys[:i]]:
        raise unfit(f"{again[0]} is given twice", "Keep one of them")
    return values


def _url(text: str) -> str:
    if not is_server_url(text):  # not repeated in the message, because it may contain a key
        raise unfit("this is not a server's URL", "Write http://HOST:PORT, the port at most 65535")
    return text


Count = Annotated[int, Field(gt=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Generation = Literal["volta", "turing", "ampere", "ada", "hopper", "blackwell", "blackwell_rtx", "cdna3", "cdna4"]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seconds = Positive
Share = Annotated[float, Field(gt=0, le=1)]
Port = Annotated[int, Field(gt=0, le=65535)]
Url = Annotated[str, AfterValidator(_url)]
# the range in which the client was measured and a point is simulated within seconds
Clients = Annotated[int, Field(gt=0, le=20_000)]
Requests = Annotated[int, Field(ge=0, le=20_000)]
Rate = Annotated[float, Field(gt=0, le=10_000)]  # requests/s
Once = AfterValidator(_once)  # for a list whose values name points
Name = Annotated[str, AfterValidator(_name)]
RunName = Annotated[Name, AfterValidator(_run_name)]
SweepName = Annotated[Name, AfterValidator(_sweep_name)]


class Strict(BaseModel):
    """Rejects unknown keys and values of the wrong type: "8" is not a number and 1.5 not a count. An integer is
    accepted as a float."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
