"""Importance correction of whole replies in an asynchronous job that is played over HTTP, against naive arithmetic.

The oracle knows transformers and autograd only: each call is a sequence of its own, and the loss is written out from
the recorded tokens, logprobs and rewards. The gradient that the job had is Adam's first moment, with a decay rate of 0.
"""

from __future__ import annotations

import math
from itertools import groupby

import pytest
import safetensors.torch
import sqlalchemy as sa
import torch
from servers import TINY, Job
from transformers import AutoModelForCausalLM

from palestra.models.catalog import model_folder
from palestra.store.calls import read_trajectory

LIMIT = 1.05
POLICY = TINY["policies"]["policy"]
ASYNCHRONOUS = TINY | {
    "steps": 4,
    "deterministic": False,
    "policies": {
        "policy": POLICY | {"optimizer": {"learning_rate": 2e-3, "betas": [0.0, 0.999], "max_grad_norm": 1e9}}
    },
    "engine": {"threads": 1, "dtype": "float32"},
    "trainer": {"threads": 1, "dtype": "float32"},
    "rollout": {"group_size": 3, "groups_per_step": 2, "max_staleness": 2},
    "evaluation": {"every_steps": 0},
    "checkpoint": {"every_steps": 1, "keep": 10},
}


def logprobs_of(model, chat) -> torch.Tensor:
    """[C] logprobs of a call's reply, with gradient."""
    ids = torch.tensor([*chat.prompt_ids.tolist(), *chat.completion_ids.tolist()])
    scores = model(ids[None]).logits[0].log_softmax(-1)
    places = torch.arange(len(chat.prompt_ids), len(ids))
    return scores[places - 1, ids[places]]


def naive_step(model, episodes, mode: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Gradients of the step's loss at the weights before it, and what its metrics should be."""
    losses, ratios = [], []
    for _, members in groupby(episodes, key=lambda one: one.episode.group_index):
        group = list(members)
        rewards = torch.tensor([one.episode.rewards["agent"] for one in group], dtype=torch.float64)
        for one, reward in zip(group, rewards, strict=True):
            advantage = float((reward - rewards.mean()) / (rewards.std() + 1e-4))
            tokens = sum(len(chat.completion_ids) for chat in one.chats)
            for chat in one.chats:
                now = logprobs_of(model, chat)
                w = math.exp(float((now.detach().double() - torch.tensor(chat.logprobs).double()).sum()))
                ratios += [w] * len(now)
                if mode == "sequence-truncate":
                    w = min(w, LIMIT)
                elif not 1 / LIMIT <= w <= LIMIT:
                    w = 0.0
                surrogate = (now - now.detach()).exp()  # 1, and its gradient
                losses.append((-w * advantage * surrogate).sum() / (tokens * len(episodes)))
    total = torch.stack(losses).sum()
    model.zero_grad()
    total.backward()
    outside = [w > LIMIT or (mode.endswith("mask") and w < 1 / LIMIT) for w in ratios]
    metrics = {
        "train/loss": float(total.detach()),
        "train/importance_mean": sum(ratios) / len(ratios),
        "train/importance_limited": sum(outside) / len(ratios),
    }
    return {name: p.grad.clone() for name, p in model.named_parameters()}, metrics


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sequence-truncate", "sequence-mask"])
def test_stale_replies_are_weighed_as_a_whole(tmp_path, mode):
    settings = ASYNCHRONOUS | {"algorithm": {"importance_sampling": mode, "importance_limit": LIMIT}}
    with Job(tmp_path, settings, validation=()) as job:
        job.start()
        job.work("--threads", "4")
        job.finish()
        rows = {int(row["step"]): row for row in job.metrics()}
        limited = 0.0
        store = sa.create_engine(f"sqlite:///{job.run_dir / 'run.db'}")
        for step, ids in job.manifests().items():
            before = model_folder("tiny-random") if step == 1 else job.checkpoints()[step - 2]
            model = AutoModelForCausalLM.from_pretrained(before, dtype=torch.float32).eval()
            with store.connect() as connection:
                wanted, metrics = naive_step(model, [read_trajectory(connection, name) for name in ids], mode)
            moments = safetensors.torch.load_file(job.checkpoints()[step - 1] / "optimizer-0.safetensors")
            found = {name: moments[f"exp_avg.{name}"] for name in wanted}
            error = sum(float((found[name] - g).norm() ** 2) for name, g in wanted.items()) ** 0.5
            norm = sum(float(g.norm() ** 2) for g in wanted.values()) ** 0.5
            # float32 on both sides: where masks leave few tokens, the gradient is small beside the terms that add up to
            # it. A wrong weight would be off by parts in a hundred.
            assert error <= 1e-5 * norm  # both are 0 where every reply of a step is masked
            for name, value in metrics.items():
                assert rows[step][name] == pytest.approx(value, rel=1e-4, abs=1e-5), (step, name)
            limited += metrics["train/importance_limited"]
        store.dispose()
        assert max(row["rollout/staleness_max"] for row in rows.values()) in (1, 2)
        assert 0 < limited < len(rows)  # some replies were bounded, and others were not
