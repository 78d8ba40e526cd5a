"""The strict base of every parameter, and the field types that they share. Knows nothing of the other modules."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class Strict(BaseModel):
    """Unknown keys are refused, and a value is of its type or refused: "8" is no number and 1.5 no count. A whole
    number is accepted where a float is meant."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
