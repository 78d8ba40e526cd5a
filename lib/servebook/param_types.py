"""The strict base of every part of the parameters, and the types that their values share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]
Seconds = Positive
Share = Annotated[float, Field(gt=0, le=1)]


class Strict(BaseModel):
    """Unknown keys are refused, and a value is of its type or refused: "8" is no number and 1.5 no count. A whole
    number is accepted where a float is meant."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
