"""Games, adapters to the environments of other projects, and other worlds, as environments of Palestra."""

from palestra_worlds.gomoku import Gomoku, GomokuDuel
from palestra_worlds.gymnasium import FrozenLake, GymnasiumEnvironment
from palestra_worlds.gymnasium_vector import GymnasiumVector
from palestra_worlds.negotiation import Negotiation
from palestra_worlds.nemo_gym import NemoGymEnvironment
from palestra_worlds.open_spiel import OpenSpielEnvironment
from palestra_worlds.openenv import OpenEnvEnvironment
from palestra_worlds.pettingzoo import PettingZooEnvironment
from palestra_worlds.poker import KuhnPoker, KuhnPolicy, LeducPoker
from palestra_worlds.prisoners_dilemma import PrisonersDilemma
from palestra_worlds.reasoning_gym import ReasoningEnvironment
from palestra_worlds.retrieval import PassageSearch, RetrievalEnvironment
from palestra_worlds.split_sum import SplitSum
from palestra_worlds.textarena import TextArenaEnvironment

__all__ = [
    "FrozenLake",
    "Gomoku",
    "GomokuDuel",
    "GymnasiumEnvironment",
    "GymnasiumVector",
    "KuhnPoker",
    "KuhnPolicy",
    "LeducPoker",
    "Negotiation",
    "NemoGymEnvironment",
    "OpenEnvEnvironment",
    "OpenSpielEnvironment",
    "PassageSearch",
    "PettingZooEnvironment",
    "PrisonersDilemma",
    "ReasoningEnvironment",
    "RetrievalEnvironment",
    "SplitSum",
    "TextArenaEnvironment",
]
