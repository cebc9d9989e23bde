"""A training job whose engine is the real vLLM: what was recorded, against the weights of each checkpoint."""

from __future__ import annotations

import json

import pytest
import sqlalchemy as sa
import torch
from transformers import AutoModelForCausalLM

import palestra
from engines.models import job_of, write_model
from palestra.config import JobConfig
from palestra.store.calls import read_trajectory

pytestmark = [pytest.mark.engines, pytest.mark.timeout(560)]
TASKS = [{"id": f"t{number}", "prompt": f"say {number}"} for number in range(12)]


def reward(task, answer: str) -> float:
    return float(sum(letter in "aeiou" for letter in answer))


@pytest.mark.parametrize(("transfer", "devices"), [("file", 1), ("gloo", 2)])
def test_every_token_has_the_logprob_of_the_version_that_it_names(tmp_path, transfer, devices):
    """Replies go on while weights are replaced, so that some are of two versions."""
    model = write_model(tmp_path / "model")
    base = job_of(model, tmp_path / "run", weight_transfer=transfer)
    config = JobConfig.model_validate(
        base.model_dump(exclude={"policies"})
        | {
            "steps": 5,
            "policies": {
                "policy": {
                    "model": str(model),
                    "max_context": 256,
                    "sampling": {"max_tokens": 48},
                    "optimizer": {"learning_rate": 5e-3},
                }
            },
            "trainer": {"threads": 1, "dtype": "float32", "devices": devices},
            "rollout": {"group_size": 4, "groups_per_step": 2, "max_staleness": 1},
            "evaluation": {"every_steps": 0},
            "checkpoint": {"every_steps": 1, "keep": 10},
        }
    )
    palestra.train(None, TASKS, config, reward=reward, quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5]
    assert rows[0]["train/logprob_gap_max"] < 5e-3  # nothing is stale yet: rounding alone
    checkpoints = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(checkpoints) == 5
    store = sa.create_engine(f"sqlite:///{tmp_path / 'run' / 'run.db'}")
    with store.connect() as connection:
        names = [
            name for (name,) in connection.execute(sa.text("SELECT episode_id FROM episodes WHERE state='completed'"))
        ]
        chats = [chat for name in names for chat in read_trajectory(connection, name).chats]
    store.dispose()
    checked = dict.fromkeys(range(6), 0)
    for number, folder in enumerate([model, *checkpoints]):
        weights = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for chat in chats:
            # Keys and values of a reply that went on under new weights are those of the older ones, so that only its
            # first span is a plain function of one version.
            version, tokens = chat.versions[0]
            if version.n != number:
                continue
            ids = torch.tensor([[*chat.prompt_ids.tolist(), *chat.completion_ids[:tokens].tolist()]])
            with torch.inference_mode():
                scores = weights(ids).logits[0, len(chat.prompt_ids) - 1 : -1].log_softmax(-1)
            wanted = scores[range(tokens), chat.completion_ids[:tokens].tolist()]
            assert chat.logprobs[:tokens] == pytest.approx(wanted.numpy(), abs=5e-3)
            checked[number] += 1
    assert sum(checked.values()) == len(chats) >= 40
    assert sum(count > 0 for count in checked.values()) >= 3
