"""A game of many turns: a model of random weights learns Gomoku on 3 x 3, against an opponent that moves at random.

    python recipes/gomoku.py [--steps 25] [--seed 0] [--model tiny-random]

The agent begins every game, and is told which stones lie where. What it decodes is held to the free places, and the
trainer masks what the engine masked. Won 1, drawn 0.5, lost 0. 200 games that are not trained on are played greedily
before and after; perfect play would bring 0.997 a game (`bench/perfect_gomoku.py`). What it prints is in README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import palestra
from palestra import Agent, Chat, ChatMessage, JobConfig, Observation, PolicyHandle, RolloutSpec
from palestra_worlds import Gomoku

GAMES = 200


class Letters(Gomoku):  # YOURS 1: the game; `reset` and `step` return what the agent sees
    """A place is a letter, A to I row by row: `Ae` says that the agent has the corner and the opponent the middle."""

    def reset(self, task: Any) -> tuple[str, dict[str, Any]]:
        """Clear the board; the agent begins."""
        super().reset(task)
        return "-", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play a letter, then the opponent's answer."""
        row, column = divmod("ABCDEFGHI".index(action), 3)
        seen, reward, terminated, truncated, info = super().step(f"{row + 1} {column + 1}")
        places = zip("ABCDEFGHI", seen.replace("\n", ""), strict=True)
        letters = "".join(place if stone == "X" else place.lower() for place, stone in places if stone != ".")
        return letters, reward, terminated, truncated, info


class Player(Agent):  # YOURS 2: what the model is shown, and what it may answer
    """Looks at the board, and not at what was before; takes a free place."""

    async def step(self, observation: Observation, policy: PolicyHandle) -> tuple[list[Chat], ChatMessage]:
        """Ask the model for one of the free places."""
        taken = observation.content[-1].text.upper()
        free = [place for place in "ABCDEFGHI" if place not in taken]
        chat = await policy.chat(observation.content, choices=free, max_tokens=2)
        return [chat], chat.reply


def games(name: str, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return tasks: the seeds of the opponent's moves."""
    return [{"id": f"{name}{seed}", "seed": seed} for seed in seeds]


def job(seed: int, steps: int, model: str = "tiny-random") -> JobConfig:
    """Return what is trained, and how; everything else is a default."""
    optimizer = {"learning_rate": 5e-3, "schedule": "linear"}
    return JobConfig.model_validate(
        {
            "name": "gomoku",
            "seed": seed,
            "steps": steps,
            "policies": {"player": {"model": model, "max_context": 128, "optimizer": optimizer}},  # YOURS 3
            "rollout": {"groups_per_step": 16, "group_size": 16},
            "algorithm": {"loss_agg_mode": "token-mean", "epochs": 2},
            "evaluation": {"every_steps": 10},
            "engine": {"dtype": "float32", "threads": 1, "max_batch": 128},  # too small a model for more threads
            "trainer": {"dtype": "float32", "threads": 1, "micro_batch_tokens": 1024},
        }
    )


def scenario(validation_games: int = GAMES) -> dict[str, Any]:
    """Return what `palestra compare` trains: as many games as are asked for, each with moves of its own opponent."""
    return {
        "rollout": RolloutSpec(environment=Letters, agents={"agent": Player()}),
        "tasks": games("train", range(1000, 21000)),
        "validation_tasks": games("fresh", range(validation_games)),
        "concurrency": 128,
        "config": job(0, 1),
    }


def demonstrate(steps: int = 25, seed: int = 0, model: str = "tiny-random") -> palestra.TrainResult:
    """Train, and compare with the untrained model."""
    play = RolloutSpec(environment=Letters, agents={"agent": Player()})
    training, validation = games("train", range(1000, 1000 + 16 * steps)), games("fresh", range(GAMES))
    result = palestra.train(play, training, job(seed, steps, model), validation_tasks=validation, concurrency=128)
    scored = sorted(palestra.read_episodes(result.run_dir, "validation"), key=lambda episode: episode.episode_id)
    for name, episodes in (("untrained", scored[:GAMES]), ("trained", scored[-GAMES:])):
        won, drawn = (sum(episode.reward == reward for episode in episodes) / GAMES for reward in (1.0, 0.5))
        print(f"{name:>9}: {won + drawn / 2:.3f} a game; won {won:.1%}, drawn {drawn:.1%} of {GAMES} fresh games")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A tiny model learns Gomoku on 3 x 3.")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="tiny-random")
    arguments = parser.parse_args()
    demonstrate(arguments.steps, arguments.seed, arguments.model)
