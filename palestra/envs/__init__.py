"""Environments: the worlds that agents act in, the ones that ship with Palestra and the base classes for your own.

Importing this package loads neither torch nor ray, so that a rollout worker stays small.
"""

from palestra.envs.acting import ActingEnvironment, Progress
from palestra.envs.arithmetic import Arithmetic
from palestra.envs.browser import BrowserEnvironment, MiniWoB
from palestra.envs.calculator import CalculatorEnvironment
from palestra.envs.catalog import CATALOG, CatalogEntry, catalog_entry
from palestra.envs.check import check_environment
from palestra.envs.concurrent import ConcurrentEnvironment, SerialEnvironment
from palestra.envs.continuous import ContinuousEnvironment, run_virtual
from palestra.envs.coordinator import Coordinator
from palestra.envs.desktop import DesktopEnvironment
from palestra.envs.environment import Environment, TaskEnvironment
from palestra.envs.gomoku import Gomoku
from palestra.envs.gomoku_duel import GomokuDuel
from palestra.envs.gymnasium import FrozenLake, GymnasiumEnvironment
from palestra.envs.gymnasium_vector import GymnasiumVector
from palestra.envs.kuhn_poker import KuhnPoker
from palestra.envs.leduc_poker import LeducPoker
from palestra.envs.multi_agent import Fault, MultiAgentEnvironment, Outcome
from palestra.envs.negotiation import Negotiation
from palestra.envs.nemo_gym import NemoGymEnvironment
from palestra.envs.open_spiel import OpenSpielEnvironment
from palestra.envs.openenv import OpenEnvEnvironment
from palestra.envs.pettingzoo import PettingZooEnvironment
from palestra.envs.prisoners_dilemma import PrisonersDilemma
from palestra.envs.protocols import AgentProtocol, Stage, decided, free, phases, simultaneous, turns
from palestra.envs.reasoning_gym import ReasoningEnvironment
from palestra.envs.retrieval import PassageSearch, RetrievalEnvironment
from palestra.envs.rewards import reward_function
from palestra.envs.split_sum import SplitSum
from palestra.envs.subagents import DELEGATE, Subagent, SubagentEnvironment
from palestra.envs.task_splits import Split
from palestra.envs.terminal import TerminalEnvironment
from palestra.envs.textarena import TextArenaEnvironment
from palestra.envs.tool_environment import ToolEnvironment
from palestra.envs.turn_clock import TimeLimit

__all__ = [
    "CATALOG",
    "DELEGATE",
    "ActingEnvironment",
    "AgentProtocol",
    "Arithmetic",
    "BrowserEnvironment",
    "CalculatorEnvironment",
    "CatalogEntry",
    "ConcurrentEnvironment",
    "ContinuousEnvironment",
    "Coordinator",
    "DesktopEnvironment",
    "Environment",
    "Fault",
    "FrozenLake",
    "Gomoku",
    "GomokuDuel",
    "GymnasiumEnvironment",
    "GymnasiumVector",
    "KuhnPoker",
    "LeducPoker",
    "MiniWoB",
    "MultiAgentEnvironment",
    "Negotiation",
    "NemoGymEnvironment",
    "OpenEnvEnvironment",
    "OpenSpielEnvironment",
    "Outcome",
    "PassageSearch",
    "PettingZooEnvironment",
    "PrisonersDilemma",
    "Progress",
    "ReasoningEnvironment",
    "RetrievalEnvironment",
    "SerialEnvironment",
    "Split",
    "SplitSum",
    "Stage",
    "Subagent",
    "SubagentEnvironment",
    "TaskEnvironment",
    "TerminalEnvironment",
    "TextArenaEnvironment",
    "TimeLimit",
    "ToolEnvironment",
    "catalog_entry",
    "check_environment",
    "decided",
    "free",
    "phases",
    "reward_function",
    "run_virtual",
    "simultaneous",
    "turns",
]
