"""A model made on the spot learns Gomoku on 3 x 3, against an opponent that moves at random: many turns, one reward.

    python examples/gomoku.py [--steps 25] [--seed 0]

The model has random weights and reads bytes. It begins every game, and is told which stones lie where; what is decoded
is held to the free places, and the trainer masks what the engine masked. Won 1, drawn 0.5, lost 0. 200 games that it is
not trained on are played greedily before and after; `perfect` computes the most that can be expected of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import palestra
from palestra import Agent, Chat, ChatMessage, Gomoku, JobConfig, Observation, PolicyHandle, RolloutSpec

GAMES = 200
LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


class Letters(Gomoku):
    """A place is a letter, A to I row by row: `Ae` says that the agent has the corner and the opponent the middle."""

    def reset(self, task: Any) -> tuple[str, dict[str, Any]]:
        """See `Gomoku`."""
        super().reset(task)
        return "-", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """See `Gomoku`."""
        row, column = divmod("ABCDEFGHI".index(action), 3)
        seen, reward, terminated, truncated, info = super().step(f"{row + 1} {column + 1}")
        places = zip("ABCDEFGHI", seen.replace("\n", ""), strict=True)
        letters = "".join(place if stone == "X" else place.lower() for place, stone in places if stone != ".")
        return letters, reward, terminated, truncated, info


class Player(Agent):
    """Looks at the board, and not at what was before; takes a free place."""

    async def step(self, observation: Observation, policy: PolicyHandle) -> tuple[list[Chat], ChatMessage]:
        """See `Agent`."""
        taken = observation.content[-1].text.upper()
        free = [place for place in "ABCDEFGHI" if place not in taken]
        chat = await policy.chat(observation.content, choices=free, max_tokens=2)
        return [chat], chat.reply


def games(name: str, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Tasks: the seeds of the opponent's moves."""
    return [{"id": f"{name}{seed}", "seed": seed} for seed in seeds]


def job(seed: int, steps: int) -> JobConfig:
    """What is trained, and how; everything else is a default."""
    return JobConfig.model_validate(
        {
            "name": "gomoku",
            "seed": seed,
            "steps": steps,
            "policies": {
                "player": {
                    "model": "tiny-random",
                    "max_context": 128,
                    "optimizer": {"learning_rate": 5e-3, "schedule": "linear"},
                }
            },
            "rollout": {"groups_per_step": 16, "group_size": 16},
            "algorithm": {"loss_agg_mode": "token-mean", "epochs": 2},
            "evaluation": {"every_steps": 10},
            "engine": {"dtype": "float32", "threads": 1, "max_batch": 128},  # too small a model for more threads
            "trainer": {"dtype": "float32", "threads": 1, "micro_batch_tokens": 1024},
        }
    )


def demonstrate(steps: int = 25, seed: int = 0) -> palestra.TrainResult:
    """Train, and compare with the untrained model and with perfect play."""
    play = RolloutSpec(environment=Letters, agents={"agent": Player()})
    training, validation = games("train", range(1000, 1000 + 16 * steps)), games("fresh", range(GAMES))
    result = palestra.train(play, training, job(seed, steps), validation_tasks=validation, concurrency=128)
    before, after = outcomes(result.run_dir)
    for name, rewards in (("untrained", before), ("trained", after)):
        won, drawn = rewards.count(1.0) / GAMES, rewards.count(0.5) / GAMES
        print(f"{name:>10}: {fmean(rewards):.3f} a game; won {won:.1%}, drawn {drawn:.1%} of {GAMES} fresh games")
    print(f"   perfect: {perfect('.' * 9):.3f} a game")
    return result


def outcomes(run_dir: Path) -> tuple[list[float], list[float]]:
    """Rewards of the first and of the last validation."""
    scored = sorted(palestra.read_episodes(run_dir, "validation"), key=lambda episode: episode.episode_id)
    rewards = [float(episode.reward or 0.0) for episode in scored]
    return rewards[:GAMES], rewards[-GAMES:]


@cache
def perfect(board: str) -> float:
    """The reward that the best move of X brings on average (expectimax)."""
    return max(_after(board[:i] + "X" + board[i + 1 :]) for i in range(9) if board[i] == ".")


def _after(board: str) -> float:
    """The same after a move of X."""
    if _has_row(board, "X"):
        return 1.0
    answers = [board[:i] + "O" + board[i + 1 :] for i in range(9) if board[i] == "."]
    if not answers:
        return 0.5
    return fmean(0.0 if _has_row(a, "O") else perfect(a) if "." in a else 0.5 for a in answers)


def _has_row(board: str, stone: str) -> bool:
    return any(all(board[place] == stone for place in line) for line in LINES)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A tiny model learns Gomoku on 3 x 3.")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    demonstrate(arguments.steps, arguments.seed)
