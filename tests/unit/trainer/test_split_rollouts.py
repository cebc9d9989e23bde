"""However a rollout is cut into calls and rows, the real trainer's gradient is the same (promise 2)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from palestra.config import GRPOConfig
from palestra.types.calls import Chat, PolicyVersion
from palestra.types.records import TrainSample
from unit.building import make_chat, make_train_batch, make_trajectory
from unit.trainer.test_torch_trainer import LOSS, close, gradients, training

VERSION = PolicyVersion(0, 0)
Turn = tuple[list[int], list[int], list[float]]  # what was read, what was sampled, its logprobs


def draw_turns(seed: int, lengths: list[int]) -> list[Turn]:
    draw = np.random.default_rng(seed)
    return [
        (draw.integers(0, 259, 3).tolist(), draw.integers(0, 259, n).tolist(), (-draw.exponential(5.5, n)).tolist())
        for n in lengths
    ]


def conversation(turns: list[Turn], cut: int = 99, agents: tuple[str, ...] = ("agent",)) -> list[Chat]:
    """Each turn one call, or several that sampled `cut` tokens each and went on from one another."""
    chats: list[Chat] = []
    for prompt, completion, logprobs in turns:
        for start in range(0, len(completion), cut):
            chats.append(
                make_chat(
                    index=len(chats),
                    parent=chats[-1] if chats else None,
                    prompt=() if start else prompt,
                    completion=completion[start : start + cut],
                    logprobs=logprobs[start : start + cut],
                    agent=agents[len(chats) % len(agents)],
                    time_step=len(chats) % 2,
                )
            )
    return chats


def orphans(chats: list[Chat], numbers: list[int]) -> list[Chat]:
    """The same with other indices, and nothing known of what they go on from."""
    return [
        replace(c, index=n, parent=None, shared=0, shared_messages=0, prompt_tail=c.prompt_ids)
        for n, c in zip(numbers, chats, strict=True)
    ]


def a_row_each(samples: list[TrainSample], chats: list[Chat]) -> list[TrainSample]:
    """The same terms in one row a call: what a trainer gets from systems that do not merge."""
    (row,) = samples
    rows = []
    for chat in chats:
        here = np.zeros(chat.tokens, np.bool_)
        here[chat.prompt_tokens :] = True
        begin = {
            name: getattr(row, name)[: chat.tokens]
            for name in ("ids", "logprobs", "versions", "advantages", "loss_weights", "temperatures")
        }
        rows.append(replace(row, loss_mask=here, **begin))
    return rows


def batch(chats: list[Chat], other: list[Chat]) -> list[TrainSample]:
    trajectories = [make_trajectory(0, 0, 1.0, chats), make_trajectory(0, 1, 0.0, other)]
    return make_train_batch(trajectories, GRPOConfig(), 64, VERSION).samples


async def gradient(samples: list[TrainSample]) -> dict[str, torch.Tensor]:
    async with training() as trainer:
        report = await trainer.forward_backward("policy", samples, LOSS, "1")
        assert report.trained_tokens == 15 + 9
        return gradients(trainer)


async def test_a_rollout_that_is_cut_in_any_way_has_the_same_gradient():
    turns, other = draw_turns(0, [4, 6, 5]), conversation(draw_turns(1, [9]))
    plain = conversation(turns)
    samples = batch(plain, other)
    assert len(samples) == 2
    wanted = await gradient(samples)
    pieces = conversation(turns, cut=2, agents=("planner", "planner/search", "critic"))
    for chats in (pieces, orphans(plain, [0, 1, 2]), orphans(pieces, list(range(len(pieces)))[::-1])):
        close(await gradient(batch(chats, other)), wanted, 3e-6)
    for chats in (plain, pieces):
        close(await gradient([*a_row_each(samples[:1], chats), samples[1]]), wanted, 3e-6)
