"""Algorithms by name: shipped ones, those of installed packages, and a user's own classes."""

from __future__ import annotations

import importlib
from typing import Final

from palestra.algorithms.actor_critic import A2C, PPO
from palestra.algorithms.base import Algorithm, StepOrder
from palestra.algorithms.batch_baselines import RAE, ReinforcePP
from palestra.algorithms.group_relative import CISPO, DAPO, GRPO, GSPO, RLOO, DrGRPO
from palestra.algorithms.imitation import SFT, Distill
from palestra.algorithms.preference import DPO, RewardModeling
from palestra.algorithms.sac import SAC
from palestra.config import AlgorithmConfig
from palestra.config.algorithm import GROUP
from palestra.errors import ConfigError
from palestra.extensions import extensions, load_extension

ALGORITHMS: Final[dict[str, type[Algorithm]]] = {
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "rloo": RLOO,
    "reinforce_pp": ReinforcePP,
    "rae": RAE,
    "ppo": PPO,
    "a2c": A2C,
    "sac": SAC,
    "sft": SFT,
    "dpo": DPO,
    "reward_model": RewardModeling,
    "distill": Distill,
}


def create_algorithm(
    config: AlgorithmConfig, step_order: StepOrder = "observed", *, own_code: bool = False
) -> Algorithm:
    """Create the algorithm that a job names. `own_code`: `package.module:Class` may be imported. True only if the
    user's own process calls `palestra.train`: importing executes code, and a server must not execute a tenant's code.
    """
    algorithm = _class_of(config, own_code)(config, step_order)
    # At sampling the divergence of a conversation is that of placeholders, and that of another run's episodes is of
    # the policy that has sampled them: no coefficient brings it to a target, so it would grow or shrink for ever.
    if algorithm.recorded is not None and config.kl is not None and config.kl.target is not None:
        raise ConfigError(
            f"algorithm.name is {config.name!r}, which trains recorded episodes; kl.target adapts the coefficient to "
            "the divergence of tokens that the policy samples, and it samples none: leave kl.target out, and the "
            "coefficient is fixed"
        )
    return algorithm


def _class_of(config: AlgorithmConfig, own_code: bool) -> type[Algorithm]:
    """Return the class of an algorithm; see `create_algorithm`."""
    if config.name in ALGORITHMS:
        return ALGORITHMS[config.name]
    if ":" not in config.name:
        return _checked(config.name, load_extension(extensions(GROUP)[config.name]))
    if not own_code:
        raise ConfigError(
            f"algorithm.name is {config.name!r}, a class of your own, which runs only where you call palestra.train "
            f"yourself; here it is one of: {', '.join(ALGORITHMS)}"
        )
    return _imported(config.name)


def _imported(name: str) -> type[Algorithm]:
    """Import and return the class `package.module:Class`."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"algorithm.name is {name!r}, which can't be imported: {error}") from error
    return _checked(name, found)


def _checked(name: str, found: object) -> type[Algorithm]:
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise ConfigError(f"algorithm.name is {name!r}, which is no subclass of palestra.algorithms.base.Algorithm")
    return found
