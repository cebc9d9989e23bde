"""What graphics cards do, as their driver says."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field


class GpuUse(BaseModel):
    """One graphics card. A figure that the driver has none of is null: the use of a card that is cut up by MIG, say."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    index: int = Field(description="Among the cards of its machine, as its driver counts them, from 0.")
    name: str = ""
    utilisation: float | None = Field(
        None, description="Part of the driver's last sample, of a second or less, in which something was computed."
    )
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    problem: str = Field("", description="Why the driver says nothing of this card; empty: it does.")


class GpuReading(NamedTuple):
    """What the driver of a machine's cards said.

    Attributes:
        cards: those that were asked for.
        problem: why there are none; empty: there are, or none were asked for.
    """

    cards: tuple[GpuUse, ...] = ()
    problem: str = ""
