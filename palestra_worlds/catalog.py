"""The games, adapters and other worlds of this package, as `palestra environments` lists them."""

from __future__ import annotations

from functools import partial

from palestra.envs.catalog import CatalogEntry, needs, settings_checked
from palestra.envs.environment import Environment
from palestra.envs.tasks import seed_tasks
from palestra_worlds.gomoku import Gomoku, GomokuDuel, gomoku_tasks
from palestra_worlds.gymnasium import FrozenLake, frozen_lake_tasks
from palestra_worlds.negotiation import Negotiation
from palestra_worlds.open_spiel import OpenSpielEnvironment
from palestra_worlds.pettingzoo import PettingZooEnvironment
from palestra_worlds.poker import KuhnPoker, LeducPoker
from palestra_worlds.prisoners_dilemma import PrisonersDilemma
from palestra_worlds.reasoning_gym import ReasoningEnvironment, reasoning_tasks
from palestra_worlds.retrieval.environment import RetrievalEnvironment, retrieval_tasks
from palestra_worlds.retrieval.search import embedder_folder
from palestra_worlds.split_sum import SplitSum, split_sum_tasks
from palestra_worlds.textarena import TextArenaEnvironment


def _countdown(*, system: str = "Reply with the expression only.") -> Environment:
    return ReasoningEnvironment("countdown", system=system)


def _gsm_symbolic(*, system: str = "End with the number alone on the last line.") -> Environment:
    return ReasoningEnvironment("gsm_symbolic", system=system)


SUBAGENTS = CatalogEntry(
    summary="the sum of two products, each given to a subagent; both work at the same time",
    make=settings_checked("subagents", SplitSum, "clock"),
    generate=split_sum_tasks,
)

GOMOKU = CatalogEntry(
    summary="stones in a row, against an opponent that is part of the world",
    make=settings_checked("gomoku", Gomoku),
    generate=gomoku_tasks,
)

GOMOKU_DUEL = CatalogEntry(
    summary="stones in a row, of two agents; `roles.opponent` says which policy plays the second",
    make=settings_checked("gomoku-duel", GomokuDuel, "clock"),
    generate=gomoku_tasks,
)

KUHN_POKER = CatalogEntry(
    summary="the smallest poker, of two agents `first` and `second`; moves are held to p and b",
    make=settings_checked("kuhn-poker", KuhnPoker, "clock"),
    generate=partial(seed_tasks, "kuhn"),
)

LEDUC_POKER = CatalogEntry(
    summary="poker of six cards and two rounds, of two agents; moves are held to the legal ones of f, c and r",
    make=settings_checked("leduc-poker", LeducPoker, "clock"),
    generate=partial(seed_tasks, "leduc"),
)

PRISONERS_DILEMMA = CatalogEntry(
    summary="two agents cooperate or defect at the same time, several rounds",
    make=settings_checked("prisoners-dilemma", PrisonersDilemma, "clock"),
    generate=partial(seed_tasks, "dilemma"),
)

NEGOTIATION = CatalogEntry(
    summary="two agents divide things whose worth to the other they do not know; offers in turns",
    make=settings_checked("negotiation", Negotiation, "clock"),
    generate=partial(seed_tasks, "negotiation"),
)

OPEN_SPIEL = CatalogEntry(
    summary="any game of OpenSpiel, each player an agent; settings.game names it",
    make=settings_checked("open-spiel", OpenSpielEnvironment, "clock", "files"),
    generate=partial(seed_tasks, "spiel"),
    check_installed=needs("pyspiel", "'palestra[games]'"),
)

PETTINGZOO = CatalogEntry(
    summary="worlds of PettingZoo with discrete actions; settings.name, as classic/tictactoe_v3",
    make=settings_checked("pettingzoo", PettingZooEnvironment, "clock"),
    generate=partial(seed_tasks, "zoo"),
    check_installed=needs("pettingzoo", "'palestra[games]'"),
)

TEXTARENA = CatalogEntry(
    summary="games of TextArena, in free text; settings.id names it",
    make=settings_checked("textarena", TextArenaEnvironment, "clock"),
    generate=partial(seed_tasks, "arena"),
    check_installed=needs("textarena", "'palestra[games]'"),
)

FROZEN_LAKE = CatalogEntry(
    summary="a walk over ice with holes, on random maps (Gymnasium)",
    make=settings_checked("frozen-lake", FrozenLake, "size"),
    generate=frozen_lake_tasks,
    check_installed=needs("gymnasium", "gymnasium"),
)

COUNTDOWN = CatalogEntry(
    summary="an expression of given numbers that makes a given number (reasoning-gym)",
    make=settings_checked("countdown", _countdown),
    generate=partial(reasoning_tasks, "countdown"),
    check_installed=needs("reasoning_gym", "reasoning-gym"),
)

GSM_SYMBOLIC = CatalogEntry(
    summary="word problems of school mathematics (reasoning-gym)",
    make=settings_checked("gsm-symbolic", _gsm_symbolic),
    generate=partial(reasoning_tasks, "gsm_symbolic"),
    check_installed=needs("reasoning_gym", "reasoning-gym"),
)

RETRIEVAL = CatalogEntry(
    summary="questions answered by searching passages, with an embedding model as the tool",
    make=settings_checked("retrieval", RetrievalEnvironment, "clock"),
    generate=retrieval_tasks,
    check_installed=embedder_folder,
)
