"""Public list prices of cards, each with its provider, date and source. A user's own price takes precedence."""

from __future__ import annotations

from datetime import date
from functools import cache
from pathlib import Path

from pydantic import RootModel

from ..common.errors import ServebookError
from ..config import strict_yaml
from ..config.param_types import Positive, Strict
from .catalog import Gpu, catalog

PRICES = Path(__file__).with_name("prices.yaml")


class ListPrice(Strict):
    """On-demand price of one card per hour in US dollars; list: the provider's page, via: who recorded it."""

    usd_per_hour: Positive
    provider: str
    read: date
    list: str
    via: str

    def origin(self) -> str:
        """Where the price is from."""
        return f"list price, {self.provider}, read {self.read.isoformat()}"


class _Prices(RootModel[dict[str, ListPrice]]):
    pass


def read_prices(text: str, where: str) -> dict[str, ListPrice]:
    """{card: its list price}. Raises ServebookError for a fault in the text, and for a card missing from the
    catalog."""
    prices = strict_yaml.validate(text, _Prices, where, example="the entries beside it").root
    if unknown := [name for name in prices if name not in catalog()]:
        raise ServebookError(f"{unknown[0]} is not in the catalog", where, f"There are: {', '.join(catalog())}")
    return prices


@cache
def list_prices() -> dict[str, ListPrice]:
    """Every card's list price by its catalog name."""
    return read_prices(PRICES.read_text(encoding="utf-8"), PRICES.name)


def price_of(gpu: Gpu, given: float | None, where: str) -> tuple[float, str]:
    """(price of one card per hour, its source). Raises ServebookError if there is not a price."""
    if given is not None:
        return given, "given"
    known = list_prices().get(gpu.name)
    if known is None:
        raise ServebookError(f"no price is known for {gpu.name}", where, f"Write --gpu {gpu.name}=PRICE per hour")
    return known.usd_per_hour, known.origin()
