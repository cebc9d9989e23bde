"""Pictures in prompts of the real vLLM: its scores, and transformers', before and after the tower has changed."""

from __future__ import annotations

import json

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForImageTextToText
from unit.building import engine_request
from unit.vision.seeing import noise, user, write_llava

import palestra
from engines.models import job_of, require_torchvision, started
from palestra import Environment, ModelAgent, RolloutSpec
from palestra.config import JobConfig
from palestra.models.causal_lm import load_tokenizer
from palestra.models.vision.processor import PictureProcessor
from palestra.models.vision.tiny import make_tiny_vision
from palestra.models.weights import LocalWeights
from palestra.pictures.blobs import Blobs, StoredPictures
from palestra.pictures.pixels import encode_picture
from palestra.renderers import PictureTokens, select_renderer
from palestra.types.calls import PolicyVersion, SamplingParams, TokenSequence
from palestra.types.messages import ImagePart

pytestmark = [pytest.mark.engines, pytest.mark.timeout(560)]
TRAINED = {"vision": "trained"}


@pytest.fixture(scope="module", params=["idefics3", "llava"])
def model(request, tmp_path_factory):
    """A model whose heads are wide enough for vLLM's attention on CPUs."""
    folder = tmp_path_factory.mktemp("model")
    if request.param == "llava":
        require_torchvision()
        write_llava(folder, width=128, heads=4)
    else:
        make_tiny_vision(folder, width=128)
    return folder


@pytest.fixture(scope="module")
def reference(model):
    return AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> StoredPictures:
    return StoredPictures(Blobs(tmp_path_factory.mktemp("pictures")))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(model, pictures, tmp_path_factory):
    async with started(model, tmp_path_factory.mktemp("run"), TRAINED, pictures) as found:
        yield found


def prompt_of(model, pictures, images) -> TokenSequence:
    tokenizer = load_tokenizer(str(model))
    tokens = PictureTokens(tokenizer, PictureProcessor(model).layout, pictures)
    parts = [ImagePart(digest=Blobs(pictures.folder).put(encode_picture(image))) for image in images]
    return select_renderer(tokenizer, pictures=tokens).render([user("what is it?", *parts, "well?")])


def expected(reference, model, prompt, images, completion) -> list[float]:
    """The log-probability of each sampled token, by one pass of transformers."""
    pixels = PictureProcessor(model)._processor(images=[images], return_tensors="pt")
    ids = torch.tensor([[*prompt.ids.tolist(), *completion]])
    with torch.no_grad():
        scores = reference(input_ids=ids, **pixels).logits[0, len(prompt.ids) - 1 : -1].double().log_softmax(-1)
    return scores[range(len(completion)), completion].tolist()


async def reply(engine, prompt) -> tuple[list[int], list[float]]:
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=1)
    pieces = [piece async for piece in engine.generate(engine_request(prompt.ids, params, media=prompt.media))]
    return [t for piece in pieces for t in piece.ids], [x for piece in pieces for x in piece.logprobs]


@pytest.mark.asyncio(loop_scope="module")
async def test_scores_are_those_of_transformers_before_and_after_the_tower_has_changed(
    engine, model, reference, pictures
):
    images = [noise(64, 64), noise(30, 70, seed=1), noise(64, 64)]  # of many tiles; the last one is the first again
    prompt = prompt_of(model, pictures, images)
    before = await reply(engine, prompt)
    own = dict(reference.named_parameters())
    assert before[1] == pytest.approx(expected(reference, model, prompt, images, before[0]), abs=1e-4)
    with torch.no_grad():
        for number, (name, weight) in enumerate(own.items()):
            if any(part in name for part in ("vision", "connector", "projector")):
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)) * 0.2)
    changed = LocalWeights([(name, weight.detach().clone()) for name, weight in own.items()])
    await engine.sync_weights("policy", PolicyVersion(0, 1), changed)
    after = await reply(engine, prompt)
    assert after[1] == pytest.approx(expected(reference, model, prompt, images, after[0]), abs=1e-4)
    assert before != after


class Shade(Environment):
    """A picture, and a reward for words about it."""

    max_steps = 1

    def reset(self, task):
        return [noise(48, 48, seed=task["seed"]), "how bright?"], {}

    def step(self, action):
        return "", float(sum(letter in "aeiou" for letter in action)), True, False, {}


def test_a_job_with_pictures_learns_from_what_was_sampled(model, tmp_path):
    base = job_of(model, tmp_path / "run")
    policy = {"model": str(model), "max_context": 512, "vision": "trained", "sampling": {"max_tokens": 24}}
    config = JobConfig.model_validate(
        base.model_dump(exclude={"policies"})
        | {
            "steps": 3,
            "policies": {"policy": policy | {"optimizer": {"learning_rate": 3e-3}}},
            "trainer": {"threads": 1, "dtype": "float32"},
            "rollout": {"group_size": 4, "groups_per_step": 2, "max_staleness": 0},
            "evaluation": {"every_steps": 0},
        }
    )
    play = RolloutSpec(environment=Shade, agents={"agent": ModelAgent()})
    palestra.train(play, [{"id": f"t{seed}", "seed": seed} for seed in range(6)], config, quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [int(row["step"]) for row in rows] == [1, 2, 3]
    assert all(row["train/logprob_gap_max"] < 1e-4 for row in rows), [row["train/logprob_gap_max"] for row in rows]
