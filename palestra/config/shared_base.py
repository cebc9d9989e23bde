"""Jobs on a base server's model: which settings they may have, and which the server has set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from palestra.config.engine import default_engine

if TYPE_CHECKING:
    from palestra.config.job import JobConfig

PLACED = "shared"  # a service chooses the base server
_SCHEMES = ("unix:", "ws://", "wss://")


def check_address(base: str) -> str:
    """Raise ValueError unless a text is `shared` or the address of a base server."""
    if base != PLACED and not base.startswith(_SCHEMES):
        raise ValueError(f"it is {PLACED!r}, or an address that begins with {', '.join(_SCHEMES)}, and not {base!r}")
    return base


def check_bases(config: JobConfig) -> None:
    """Raise ValueError for a job that is only partly on a base server, or sets what the server has
    set, naming the key.
    """
    bases = {name: policy.base for name, policy in config.policies.items()}
    if not any(bases.values()):
        return
    first = next(name for name, base in bases.items() if base)
    for name, base in bases.items():
        if base != bases[first]:
            raise ValueError(
                f"policies.{first}.base is {bases[first]!r} and policies.{name}.base is {base!r}: all policies of a "
                "job are on the same base server, or none is"
            )
        if config.kind == "training" and not config.policies[name].frozen and config.policies[name].adapter is None:
            raise ValueError(
                f"policies.{name} is on a shared base, whose weights never change; give it an adapter, or frozen = true"
            )
    for key, given, default in (
        ("engine", config.engine, default_engine()),
        ("trainer", config.trainer, type(config.trainer)()),
    ):
        if given != default and config.engine.has_model:
            kept = default.model_dump()
            changed = next(name for name, value in given.model_dump().items() if value != kept.get(name))
            raise ValueError(
                f"{key}.{changed} is set, and the policies are on a base server, which has its own; leave out {key}"
            )
