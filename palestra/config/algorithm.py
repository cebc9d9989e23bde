"""The `[algorithm]` table: each algorithm has keys and defaults of its own, and refuses the keys of others."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, ClassVar, Final, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag

from palestra.config.imitation import DistillConfig, DPOConfig, RewardModelConfig, SFTConfig
from palestra.config.policy_gradient import (
    A2CConfig,
    CISPOConfig,
    ClippedConfig,
    DAPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    PPOConfig,
    RAEConfig,
    ReinforcePPConfig,
    RLOOConfig,
    SACConfig,
)
from palestra.config.section import Section
from palestra.extensions import extensions

OWN = "package.module:Class"
GROUP = "palestra.algorithms"


class OwnAlgorithmConfig(ClippedConfig):
    """A class of an installed package, by its name there; or your own, if you call `palestra.train` yourself.

    A server never imports its users' code.
    """

    form_of_name: ClassVar[str] = OWN

    name: str = Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,127}(:[A-Za-z_][A-Za-z0-9_]{0,63})?$",
        description="`package.module:Class`, a subclass of `palestra.Algorithm`; or the name of one that an installed "
        "package brings (entry points of the group `palestra.algorithms`).",
    )
    advantage_scale: Literal["std", "none"] = Field(
        "std", description="`std`: divide by the group's deviation (GRPO); `none`: do not (Dr. GRPO)."
    )
    settings: dict[str, bool | int | float | str] = Field(
        {}, description="Settings of your own, which your class reads from `self.config.settings`."
    )


def _name_of(value: Any) -> Any:
    """Return the tag of an algorithm, given as a table or as a section; a table without a name is `grpo`."""
    name = value.get("name", "grpo") if isinstance(value, dict) else getattr(value, "name", None)
    if not isinstance(name, str) or name in ALGORITHM_NAMES:
        return name
    return OWN if ":" in name or name in extensions(GROUP) else name


def _known_name(value: Any) -> Any:
    """Raise ValueError for an unknown algorithm with the nearest name: pydantic's union error names no key."""
    name = _name_of(value)
    if not isinstance(value, dict | Section):
        raise ValueError(f"it is a table, such as {{name = 'grpo'}}, and not {value!r}")
    if name not in (*ALGORITHM_NAMES, OWN):
        # Of equally near ones the first: the list begins with those that are used most.
        likeness = {known: difflib.SequenceMatcher(None, str(name), known).ratio() for known in ALGORITHM_NAMES}
        near = max(ALGORITHM_NAMES, key=lambda known: likeness[known])
        hint = f"; did you mean {near!r}?" if likeness[near] >= 0.5 else ""
        known = ", ".join([*ALGORITHM_NAMES, *extensions(GROUP)])
        raise ValueError(f"name is {name!r}, which is no algorithm{hint} (known: {known})")
    return value


AnyAlgorithmConfig = Annotated[
    Annotated[GRPOConfig, Tag("grpo")]
    | Annotated[DrGRPOConfig, Tag("dr_grpo")]
    | Annotated[DAPOConfig, Tag("dapo")]
    | Annotated[GSPOConfig, Tag("gspo")]
    | Annotated[CISPOConfig, Tag("cispo")]
    | Annotated[RLOOConfig, Tag("rloo")]
    | Annotated[ReinforcePPConfig, Tag("reinforce_pp")]
    | Annotated[RAEConfig, Tag("rae")]
    | Annotated[PPOConfig, Tag("ppo")]
    | Annotated[A2CConfig, Tag("a2c")]
    | Annotated[SACConfig, Tag("sac")]
    | Annotated[SFTConfig, Tag("sft")]
    | Annotated[DPOConfig, Tag("dpo")]
    | Annotated[RewardModelConfig, Tag("reward_model")]
    | Annotated[DistillConfig, Tag("distill")]
    | Annotated[OwnAlgorithmConfig, Tag(OWN)],
    Discriminator(_name_of),
    BeforeValidator(_known_name),
]
ALGORITHM_NAMES: Final = tuple(
    get_args(part)[1].tag for part in get_args(get_args(AnyAlgorithmConfig)[0]) if get_args(part)[1].tag != OWN
)
"""The algorithms that Palestra ships, in the order of the documentation."""
