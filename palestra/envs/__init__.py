"""Environments: base classes for your own, the catalogue, and two that need no further packages.

Importing this package loads neither torch nor ray, so that a rollout worker stays small.
"""

from palestra.envs.acting import ActingEnvironment, Progress
from palestra.envs.arithmetic import Arithmetic, CalculatorEnvironment
from palestra.envs.catalog import CATALOG, CatalogEntry, catalog_entry
from palestra.envs.concurrent import ConcurrentEnvironment, SerialEnvironment
from palestra.envs.continuous import ContinuousEnvironment, run_virtual
from palestra.envs.coordinator import Coordinator, TimeLimit
from palestra.envs.environment import Environment, TaskEnvironment
from palestra.envs.multi_agent import Fault, MultiAgentEnvironment, Outcome
from palestra.envs.protocols import AgentProtocol, Stage, decided, free, phases, simultaneous, turns
from palestra.envs.rewards import reward_function
from palestra.envs.tasks import Split
from palestra.envs.tool_environment import ToolEnvironment

__all__ = [
    "CATALOG",
    "ActingEnvironment",
    "AgentProtocol",
    "Arithmetic",
    "CalculatorEnvironment",
    "CatalogEntry",
    "ConcurrentEnvironment",
    "ContinuousEnvironment",
    "Coordinator",
    "Environment",
    "Fault",
    "MultiAgentEnvironment",
    "Outcome",
    "Progress",
    "SerialEnvironment",
    "Split",
    "Stage",
    "TaskEnvironment",
    "TimeLimit",
    "ToolEnvironment",
    "catalog_entry",
    "decided",
    "free",
    "phases",
    "reward_function",
    "run_virtual",
    "simultaneous",
    "turns",
]
