"""Records what Stable-Baselines3 estimates, for test_gae.py; run where it is installed, which is not here.

    python -m venv sb3 && sb3/bin/pip install stable-baselines3==2.9.2
    sb3/bin/python tests/unit/algorithms/oracles/sb3_gae.py > tests/unit/algorithms/oracles/sb3_gae.json

Each case is one environment of a `RolloutBuffer`: episodes one after another, of which some end (terminated) and some
are cut off (truncated). `OnPolicyAlgorithm.collect_rollouts` adds gamma x V(last observation) to the last reward of an
episode that was cut off; the same is done here.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import gymnasium
import numpy as np
import stable_baselines3
import torch
from stable_baselines3.common.buffers import RolloutBuffer


def case(seed: int, gamma: float, decay: float, episodes: list[tuple[int, bool]]) -> dict[str, Any]:
    """One buffer, and what it computes; `episodes` are (actions, whether it was cut off)."""
    draw = np.random.default_rng(seed)
    size = sum(length for length, _ in episodes)
    space = gymnasium.spaces.Box(-1, 1, (1,))
    buffer = RolloutBuffer(size, space, gymnasium.spaces.Discrete(2), gae_lambda=decay, gamma=gamma)
    inputs = []
    for length, truncated in episodes:
        rewards, values = draw.normal(size=length), draw.normal(size=length)
        after = float(draw.normal())
        inputs.append(
            {"rewards": rewards.tolist(), "values": values.tolist(), "truncated": truncated, "value_after": after}
        )
        for t in range(length):
            last = t == length - 1
            reward = rewards[t] + gamma * after if last and truncated else rewards[t]
            buffer.add(
                np.zeros((1, 1)),
                np.zeros((1, 1)),
                np.array([reward]),
                np.array([t == 0]),
                torch.tensor([values[t]]),
                torch.zeros(1),
            )
    buffer.compute_returns_and_advantage(torch.zeros(1), np.array([True]))
    return {
        "gamma": gamma,
        "lambda": decay,
        "episodes": inputs,
        "advantages": buffer.advantages[:, 0].tolist(),
        "returns": buffer.returns[:, 0].tolist(),
    }


def main() -> None:
    """Print all cases as JSON."""
    episodes = [(5, False), (1, True), (7, True), (1, False), (12, False), (3, True)]
    cases = [
        case(number, gamma, decay, episodes)
        for number, (gamma, decay) in enumerate([(1.0, 1.0), (1.0, 0.95), (0.99, 0.95), (0.9, 0.0), (0.5, 0.3)])
    ]
    json.dump({"stable_baselines3": stable_baselines3.__version__, "cases": cases}, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
