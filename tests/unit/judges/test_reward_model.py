"""A job whose rewards are given by a trained reward model."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest
import torch
from jinja2 import TemplateError
from safetensors.torch import load_file, save_file

import palestra
from palestra.config.judge import AuditConfig
from palestra.errors import ConfigError, ControlTokenInText, JudgeFailed
from palestra.renderers.selection import select_renderer
from palestra.trainer.checkpoint import FOLDER_OF_REWARDS
from palestra_judges import RewardModel
from palestra_judges.reader import RewardModelReader
from unit.building import make_chat
from unit.judges.test_jobs import TASKS, config, rows
from unit.trainer.networks import networks
from unit.trainer.test_reward_model import set_head

pytestmark = pytest.mark.ci


@pytest.fixture
def folder(tmp_path):
    async def saved():
        async with networks(critic="replies") as trainer:
            set_head(trainer)
            return await trainer.save("policy", tmp_path / "checkpoints", {"step": 1}, "s")

    return asyncio.run(saved()) / FOLDER_OF_REWARDS


def test_each_reply_has_the_reward_of_transformers_for_the_conversation_up_to_its_end(folder, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    done = palestra.train(reward=RewardModel(path=folder), tasks=TASKS, config=config(tmp_path / "run"), quiet=True)
    assert done.state == "completed"
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    stop = select_renderer(tokenizer).stop_ids
    said = {row["episode_id"]: row for row in palestra.load_run(tmp_path / "run").calls()}
    prompts = {task["id"]: task["prompt"] for task in TASKS}
    episodes = rows(tmp_path / "run", "SELECT * FROM episodes WHERE kind = 'train'")
    assert len(episodes) == 16
    for row in episodes:
        call = said[row["episode_id"]]
        messages = [{"role": "user", "content": prompts[row["task_id"]]}]
        messages.append({"role": "assistant", "content": call["reply"].text})
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        last = max(place for place, token in enumerate(ids) if token in stop)
        end = last + (call["finish_reason"] != "length")  # a reply that was cut has no end
        with torch.no_grad():
            wanted = float(model(torch.tensor([ids[:end]])).logits)
        assert json.loads(row["named_rewards"])["preference"] == pytest.approx(wanted, abs=1e-5)
    assert len(rows(tmp_path / "run", "SELECT * FROM verdicts")) == 16


def test_an_audit_needs_scores_with_bounds(tmp_path):
    with pytest.raises(ConfigError, match=r"scores.*0.*1"):
        AuditConfig(judge=RewardModel(path=tmp_path))


def test_what_is_no_model_of_rewards_is_one_line(folder, tmp_path):
    for change in ({"url": "http://127.0.0.1:1"}, {"wait_seconds": 3.0}):
        with pytest.raises(ConfigError, match=r"effect.*model"):
            RewardModel(path=folder, **change)
    two, headless = (shutil.copytree(folder, tmp_path / name) for name in ("two", "headless"))
    settings = json.loads((two / "config.json").read_text())
    settings |= {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}
    (two / "config.json").write_text(json.dumps(settings))
    weights = load_file(headless / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, headless / "model.safetensors", metadata={"format": "pt"})
    nothing = tmp_path / "nothing"
    for path, said in ((nothing, r"weights.*safetensors"), (two, "2 classes"), (headless, "no score.weight")):
        settings = config(tmp_path / f"run-{path.name}")
        with pytest.raises(ConfigError, match=said):
            palestra.train(reward=RewardModel(path=path), tasks=TASKS, config=settings, quiet=True)


def test_a_reply_that_the_model_is_not_shown_as_it_was_said_is_a_failure_of_the_judge(folder, monkeypatch):
    reader, chat = RewardModelReader(folder), make_chat()
    reader.score(chat)
    render = reader._renderer.render

    def fails_with(error):
        def fails(messages, tools=(), room=None):
            if len(messages) > 1:
                raise error
            return render(messages, tools, room)

        return fails

    def changes_the_prompt(messages, tools=(), room=None):
        return render(messages[1:] if len(messages) > 1 else messages, tools, room)

    refused = [fails_with(error) for error in (ControlTokenInText("a message", "<end>"), TemplateError("no"))]
    for broken in (*refused, changes_the_prompt):
        monkeypatch.setattr(reader._renderer, "render", broken)
        with pytest.raises(JudgeFailed):
            reader.score(chat)
