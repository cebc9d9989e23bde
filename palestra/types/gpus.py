"""Figures of GPUs from their driver."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field


class GpuUse(BaseModel):
    """One GPU. Figures that the driver lacks are null, for example the use of a GPU with MIG."""

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
    """The driver's answer about a machine's GPUs.

    Attributes:
        problem: why there are none; empty without a problem.
    """

    cards: tuple[GpuUse, ...] = ()
    problem: str = ""
