"""Self-play: a model of random weights learns Gomoku on 3 x 3 against its own past, which gets better as it does.

    python recipes/gomoku_self_play.py [--steps 20] [--seed 0] [--model tiny-random]

One policy plays the agent with its newest weights, and the opponent with those of a past step, drawn from a pool. Only
the agent's moves are trained. Then all versions and a player who draws its moves play each other, in both seats; the
matrix of rewards with Elo ratings is printed, and drawn in matrix.png. What it prints is in README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import palestra
import palestra_lab
from palestra import Agent, Chat, ChatMessage, ConcurrentEnvironment, JobConfig, Observation, PolicyHandle, RolloutSpec

PLACES = "ABCDEFGHI"
LINES = ("ABC", "DEF", "GHI", "ADG", "BEH", "CFI", "AEI", "CEG")


class Duel(ConcurrentEnvironment):  # YOURS 1: a game of two roles
    """A place is a letter, A to I row by row; each sees its own stones as capitals: `Ae`. Won 1, drawn 0.5, lost 0."""

    reusable = True
    roles = ("agent", "opponent")

    async def start(self, task: Mapping[str, Any]) -> None:
        """Clear the board, and show it to the role that begins."""
        self._stones: dict[str, str] = {}  # by place: the role whose stone it is
        self._seen: dict[str, str] = {}  # by role: the observation that it has answered last, or is to answer
        self._show(task["first"])

    async def on_action(self, observation: Observation, action: ChatMessage) -> None:
        """Put a stone, and show the board to the other role, or end the game."""
        role = observation.agent
        other = self.roles[self.roles[0] == role]
        self._stones[action.text] = role
        if any(all(self._stones.get(place) == role for place in line) for line in LINES):
            self._end({role: 1.0, other: 0.0})
        elif len(self._stones) == len(PLACES):
            self._end({role: 0.5, other: 0.5})
        else:
            self._show(other)

    def _show(self, role: str) -> None:
        letters = (place if mine == role else place.lower() for place, mine in sorted(self._stones.items()))
        parents = (self._seen[role],) if role in self._seen else ()
        self._seen[role] = self.emit(
            role, (palestra.text_message("user", "".join(letters) or "-"),), parents=parents
        ).id

    def _end(self, rewards: Mapping[str, float]) -> None:
        for role, reward in rewards.items():
            self.emit(role, (), parents=(self._seen[role],), reward=reward, terminated=True)


def free(observation: Observation) -> list[str]:
    """Return the places without a stone."""
    taken = observation.content[-1].text.upper()
    return [place for place in PLACES if place not in taken]


class Player(Agent):  # YOURS 2: what the model is shown, and what it may answer
    """Looks at the board, and not at what was before; takes a free place."""

    async def step(self, observation: Observation, policy: PolicyHandle) -> tuple[list[Chat], ChatMessage]:
        """Ask the model of the role for one of the free places."""
        chat = await policy.chat(observation.content, choices=free(observation), max_tokens=2)
        return [chat], chat.reply


def job(seed: int, steps: int, model: str = "tiny-random") -> JobConfig:
    """Return what is trained, and against whom; everything else is a default."""
    optimizer = {"learning_rate": 5e-3, "schedule": "linear"}
    pool = {"every_steps": 4 if steps > 4 else 1, "size": 4, "choice": "prioritized"}
    past = {"opponent": {"policy": "player", "pool": pool}}
    return JobConfig.model_validate(
        {
            "name": "gomoku-self-play",
            "seed": seed,
            "steps": steps,
            "policies": {"player": {"model": model, "max_context": 128, "optimizer": optimizer}},  # YOURS 3
            "roles": past if steps > 1 else {},  # in one step there is no past to play against
            "rollout": {"groups_per_step": 12, "group_size": 16},
            "algorithm": {"loss_agg_mode": "token-mean", "epochs": 2},
            "evaluation": {"every_steps": 0},
            "engine": {"dtype": "float32", "threads": 1, "max_batch": 128},  # too small a model for more threads
            "trainer": {"dtype": "float32", "threads": 1, "micro_batch_tokens": 1024},
        }
    )


def demonstrate(steps: int = 20, seed: int = 0, model: str = "tiny-random", games: int = 30) -> palestra_lab.Matrix:
    """Train, and let the versions play each other."""
    play = RolloutSpec(environment=Duel, agents={"": Player()})
    tasks = [{"id": f"game{n}", "first": Duel.roles[n % 2]} for n in range(12 * steps)]  # so that it learns both sides
    result = palestra.train(play, tasks, job(seed, steps, model), concurrency=128)
    players = {"untrained": model} | palestra_lab.versions_of(result.run_dir)
    matrix = palestra_lab.play_matrix(
        players,
        Duel,
        job(seed, steps, model),
        agent=Player(),
        moves=free,
        tasks=[{"first": role} for role in Duel.roles],
        games=games,
        concurrency=128,
    )
    print(f"\n{matrix.text()}")
    palestra_lab.draw_matrix(matrix, "Gomoku 3 x 3: versions of one policy", result.run_dir / "matrix.png")
    print(f"\nthe picture is {result.run_dir / 'matrix.png'}")
    return matrix


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A tiny model learns Gomoku on 3 x 3 against its own past.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="tiny-random")
    arguments = parser.parse_args()
    demonstrate(arguments.steps, arguments.seed, arguments.model)
