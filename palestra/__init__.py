"""Palestra: reinforcement learning for LLM agents, as a service.

    from palestra import train, evaluate            # train a model on episodes that your own agent plays with it
    from palestra import Client                     # or play the episodes of a job that runs elsewhere
    from palestra import ControlClient              # or submit jobs to a team's server

A name is imported when it is first used, so that importing the client loads neither torch nor ray.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 11):  # noqa: UP036 - a checkout may be imported by any
    raise ImportError("Palestra needs Python 3.11 or newer; this is " + sys.version.split()[0])

from palestra.extras import missing_extra
from palestra.version import __version__ as __version__

# Type checkers and editors can't follow `__getattr__` below, so they get the imports here.
if TYPE_CHECKING:
    from palestra.agents import Agent as Agent
    from palestra.agents import Chat as Chat
    from palestra.agents import ChatMessage as ChatMessage
    from palestra.agents import ModelAgent as ModelAgent
    from palestra.agents import Observation as Observation
    from palestra.agents import PolicyHandle as PolicyHandle
    from palestra.agents import RandomAgent as RandomAgent
    from palestra.agents import ToolAgent as ToolAgent
    from palestra.algorithms.base import Algorithm as Algorithm
    from palestra.algorithms.base import Group as Group
    from palestra.algorithms.base import TokenAdvantages as TokenAdvantages
    from palestra.algorithms.loss import Loss as Loss
    from palestra.algorithms.loss import LossInputs as LossInputs
    from palestra.algorithms.loss import LossMetric as LossMetric
    from palestra.algorithms.loss import LossOutput as LossOutput
    from palestra.algorithms.loss import LossSpec as LossSpec
    from palestra.algorithms.loss import Max as Max
    from palestra.algorithms.loss import Mean as Mean
    from palestra.algorithms.loss import Sum as Sum
    from palestra.algorithms.loss import register_loss as register_loss
    from palestra.client import AsyncClient as AsyncClient
    from palestra.client import Client as Client
    from palestra.client import Episode as Episode
    from palestra.client import ModelEndpoint as ModelEndpoint
    from palestra.client import RolloutResult as RolloutResult
    from palestra.config import JobConfig as JobConfig
    from palestra.config import OptimizerConfig as OptimizerConfig
    from palestra.config import PolicyConfig as PolicyConfig
    from palestra.config import RolloutConfig as RolloutConfig
    from palestra.config import dump_config as dump_config
    from palestra.config import load_config as load_config
    from palestra.envs import ActingEnvironment as ActingEnvironment
    from palestra.envs import AgentProtocol as AgentProtocol
    from palestra.envs import Arithmetic as Arithmetic
    from palestra.envs import CalculatorEnvironment as CalculatorEnvironment
    from palestra.envs import ConcurrentEnvironment as ConcurrentEnvironment
    from palestra.envs import ContinuousEnvironment as ContinuousEnvironment
    from palestra.envs import Coordinator as Coordinator
    from palestra.envs import Environment as Environment
    from palestra.envs import Fault as Fault
    from palestra.envs import MultiAgentEnvironment as MultiAgentEnvironment
    from palestra.envs import Outcome as Outcome
    from palestra.envs import Progress as Progress
    from palestra.envs import Stage as Stage
    from palestra.envs import TaskEnvironment as TaskEnvironment
    from palestra.envs import TimeLimit as TimeLimit
    from palestra.envs import ToolEnvironment as ToolEnvironment
    from palestra.envs import catalog_entry as catalog_entry
    from palestra.envs import decided as decided
    from palestra.envs import free as free
    from palestra.envs import phases as phases
    from palestra.envs import run_virtual as run_virtual
    from palestra.envs import simultaneous as simultaneous
    from palestra.envs import turns as turns
    from palestra.envs.arithmetic import last_number as last_number
    from palestra.envs.arithmetic import right_number as right_number
    from palestra.learner.samplers import History as History
    from palestra.learner.samplers import PlayedGroup as PlayedGroup
    from palestra.learner.samplers import TaskPool as TaskPool
    from palestra.learner.samplers import TaskSampler as TaskSampler
    from palestra.learner.samplers import check_sampler as check_sampler
    from palestra.models.catalog import model_folder as model_folder
    from palestra.rollout import RolloutSpec as RolloutSpec
    from palestra.runtime.evaluating import evaluate as evaluate
    from palestra.runtime.evaluating import play_episode as play_episode
    from palestra.runtime.job_thread import TrainResult as TrainResult
    from palestra.runtime.scores import Evaluation as Evaluation
    from palestra.runtime.scores import TaskOutcome as TaskOutcome
    from palestra.runtime.training import train as train
    from palestra.sandbox import SandboxLimits as SandboxLimits
    from palestra.sandbox import SandboxSpec as SandboxSpec
    from palestra.store.browsing import read_episodes as read_episodes
    from palestra.tools import Tool as Tool
    from palestra.tools import tool as tool
    from palestra.types.messages import text_message as text_message
    from palestra_control.control import ControlClient as ControlClient
    from palestra_inspect.algorithm_check import check_algorithm as check_algorithm
    from palestra_inspect.environment_check import check_environment as check_environment
    from palestra_inspect.loaded_run import LoadedRun as LoadedRun
    from palestra_inspect.loaded_run import load_run as load_run
    from palestra_inspect.probabilities import ChoiceQuestion as ChoiceQuestion
    from palestra_inspect.probabilities import choice_probabilities as choice_probabilities
    from palestra_mcp import McpServer as McpServer
    from palestra_remote import RemoteEnvironment as RemoteEnvironment
    from palestra_remote import SeatEnvironment as SeatEnvironment
    from palestra_worlds.subagents import Subagent as Subagent
    from palestra_worlds.subagents import SubagentEnvironment as SubagentEnvironment
    from palestra_worlds.verifiers import VerifiersRollout as VerifiersRollout


_EXPORTS: dict[str, tuple[str, ...]] = {
    "palestra.agents": (
        "Agent",
        "Chat",
        "ChatMessage",
        "ModelAgent",
        "Observation",
        "PolicyHandle",
        "RandomAgent",
        "ToolAgent",
    ),
    "palestra.algorithms.base": (
        "Algorithm",
        "Group",
        "TokenAdvantages",
    ),
    "palestra.algorithms.loss": (
        "Loss",
        "LossInputs",
        "LossMetric",
        "LossOutput",
        "LossSpec",
        "Max",
        "Mean",
        "Sum",
        "register_loss",
    ),
    "palestra.client": ("AsyncClient", "Client", "Episode", "ModelEndpoint", "RolloutResult"),
    "palestra.runtime.evaluating": ("evaluate", "play_episode"),
    "palestra.runtime.scores": ("Evaluation", "TaskOutcome"),
    "palestra.runtime.job_thread": ("TrainResult",),
    "palestra.types.messages": ("text_message",),
    "palestra.models.catalog": ("model_folder",),
    "palestra.runtime.training": ("train",),
    "palestra.config": ("JobConfig", "OptimizerConfig", "PolicyConfig", "RolloutConfig", "dump_config", "load_config"),
    "palestra.envs": (
        "ActingEnvironment",
        "AgentProtocol",
        "Arithmetic",
        "CalculatorEnvironment",
        "ConcurrentEnvironment",
        "ContinuousEnvironment",
        "Coordinator",
        "Environment",
        "Fault",
        "MultiAgentEnvironment",
        "Outcome",
        "Progress",
        "Stage",
        "TaskEnvironment",
        "TimeLimit",
        "ToolEnvironment",
        "catalog_entry",
        "decided",
        "free",
        "phases",
        "run_virtual",
        "simultaneous",
        "turns",
    ),
    "palestra.envs.arithmetic": (
        "last_number",
        "right_number",
    ),
    "palestra.learner.samplers": ("History", "PlayedGroup", "TaskPool", "TaskSampler", "check_sampler"),
    "palestra.store.browsing": ("read_episodes",),
    "palestra.rollout": ("RolloutSpec",),
    "palestra.sandbox": ("SandboxLimits", "SandboxSpec"),
    "palestra.tools": ("Tool", "tool"),
}
_HOMES = {name: home for home, names in _EXPORTS.items() for name in names}
# Of packages beside the core: entry points of the group `palestra.names`.
_BESIDE = (
    "ChoiceQuestion",
    "ControlClient",
    "LoadedRun",
    "McpServer",
    "RemoteEnvironment",
    "SeatEnvironment",
    "Subagent",
    "SubagentEnvironment",
    "VerifiersRollout",
    "check_algorithm",
    "check_environment",
    "choice_probabilities",
    "load_run",
)
__all__ = sorted((*_HOMES, *_BESIDE))


if not TYPE_CHECKING:  # so that a type checker finds misspelled names

    def __getattr__(name: str) -> Any:
        if name not in _HOMES and name not in _BESIDE:
            raise AttributeError(f"module 'palestra' has no attribute {name!r}")
        try:
            return getattr(import_module(_HOMES[name]), name) if name in _HOMES else _of_package(name)
        except ModuleNotFoundError as error:
            # The client alone has no torch, for instance: name the extra to install instead of the missing module.
            if (said := missing_extra(error)) is None:
                raise
            raise ModuleNotFoundError(f"palestra.{name}: {said}", name=error.name) from error


def _of_package(name: str) -> Any:
    """Return a name that a package beside the core has."""
    from palestra.extensions import extensions, load_extension

    point = extensions("palestra.names").get(name)
    if point is None:
        raise ImportError(f"palestra.{name} is of a package that is not installed")
    return load_extension(point)


def __dir__() -> list[str]:
    return __all__
