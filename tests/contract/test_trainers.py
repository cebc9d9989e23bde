"""What every trainer promises, whatever its weights are."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from unit.building import make_sample

from palestra.algorithms.grpo import ClippedSurrogate
from palestra.config import CheckpointConfig, EngineConfig, OptimizerConfig, TrainerConfig
from palestra.errors import CheckpointError
from palestra.inference.embedded import EmbeddedEngine
from palestra.inference.scripted import ScriptedEngine, digits_script
from palestra.models.causal_lm import load_causal_lm, load_tokenizer
from palestra.schemas.records import GrammarSpan, PolicyVersion
from palestra.trainer.recording import RecordingTrainer
from palestra.trainer.torch_trainer import TorchTrainer

LOSS = ClippedSurrogate(0.2, 0.2)


class Kit:
    """A kind of trainer: how to make one, and what its weights are."""

    def __init__(self, kind: str) -> None:
        torch.set_num_threads(1)
        self.kind = kind
        self.made: list = []

    def trainer(self):
        if self.kind == "recording":
            made = RecordingTrainer(2)
        else:
            made = TorchTrainer(
                load_causal_lm("tiny-random", torch.float32),
                load_tokenizer("tiny-random"),
                "policy",
                OptimizerConfig(),
                TrainerConfig(threads=1, dtype="float32"),
                CheckpointConfig(),
            )
        self.made.append(made)
        return made

    def engine(self):
        if self.kind == "recording":
            made = ScriptedEngine(digits_script(4, 258))
        else:
            made = EmbeddedEngine(
                load_causal_lm("tiny-random", torch.float32), "policy", [258], EngineConfig(threads=1, dtype="float32")
            )
        self.made.append(made)
        return made

    def weights(self, trainer):
        if self.kind == "recording":
            return trainer.weights
        return torch.cat([p.detach().flatten() for _, p in trainer._model.named_parameters()]).numpy().tobytes()


@pytest.fixture(params=["recording", "torch"])
async def kit(request):
    kit = Kit(request.param)
    yield kit
    for made in kit.made:
        await made.close()


def batch(seed: int = 0):
    return [
        make_sample([1, 2, 3, 4 + seed, 5], [3, 4], advantage=1.0, weight=0.25, name="a"),
        make_sample([1, 2, 3, 9, 8], [3, 4], advantage=-1.0, weight=0.25, name="b"),
    ]


class Taker:
    """An engine that takes any weights."""

    async def update_weights(self, policy, version, weights) -> None: ...


async def step(trainer, number: int, seed: int | None = None) -> None:
    await trainer.forward_backward("policy", batch(number if seed is None else seed), LOSS, f"g{number}")
    await trainer.optim_step("policy", 1e-3, f"u{number}")
    await trainer.publish("policy", Taker(), f"p{number}")


async def test_an_update_changes_the_weights_and_counts(kit):
    trainer = kit.trainer()
    before = kit.weights(trainer)
    assert trainer.version("policy") == PolicyVersion(0, 0)
    report = await trainer.forward_backward("policy", batch(), LOSS, "g")
    assert (report.rows, report.trained_tokens, report.flat_tokens) == (2, 4, 10)
    assert {"loss", "entropy", "ratio", "clipped", "gap", "gap_max"} <= report.metrics.keys()
    assert kit.weights(trainer) == before
    assert trainer.version("policy") == PolicyVersion(0, 0)
    update = await trainer.optim_step("policy", 1e-3, "u")
    assert update.learning_rate == 1e-3
    assert trainer.version("policy") == PolicyVersion(0, 1)
    assert kit.weights(trainer) != before


async def test_several_updates_between_two_publications_are_one_version(kit):
    trainer = kit.trainer()
    for number in range(3):
        await trainer.forward_backward("policy", batch(number), LOSS, f"g{number}")
        await trainer.optim_step("policy", 1e-3, f"u{number}")
    assert trainer.version("policy") == PolicyVersion(0, 1)
    assert await trainer.publish("policy", Taker(), "p") == PolicyVersion(0, 1)
    assert await trainer.publish("policy", Taker(), "again") == PolicyVersion(0, 1)
    await step(trainer, 3)
    assert trainer.version("policy") == PolicyVersion(0, 2)


async def test_the_same_samples_in_the_same_order_give_the_same_weights_and_others_others(kit):
    found = []
    for seeds in ((1, 2), (1, 2), (2, 1), (1, 3)):
        trainer = kit.trainer()
        for number, seed in enumerate(seeds):
            await step(trainer, number, seed)
        found.append(kit.weights(trainer))
    assert found[0] == found[1]
    assert len(set(found)) == 3


async def test_a_repeated_request_gets_the_first_answer_and_does_nothing(kit):
    once, often = kit.trainer(), kit.trainer()
    await step(once, 0)
    for _ in range(2):
        first, again = await asyncio.gather(*(often.forward_backward("policy", batch(0), LOSS, "g0") for _ in range(2)))
        assert first == again
    updates = [await often.optim_step("policy", 1e-3, "u0") for _ in range(3)]
    assert updates[0] == updates[1] == updates[2]
    assert often.version("policy") == PolicyVersion(0, 1)
    assert kit.weights(often) == kit.weights(once)


async def test_save_and_load_go_on_as_if_nothing_had_happened(kit, tmp_path):
    whole = kit.trainer()
    for number in range(3):
        await step(whole, number)
    first = kit.trainer()
    await step(first, 0)
    await step(first, 1)
    path = await first.save(tmp_path, {"step": 2, "wall_seconds": 1.5}, "s")
    assert path.parent == tmp_path
    second = kit.trainer()
    state = await second.load(tmp_path)
    assert (state["step"], state["wall_seconds"]) == (2, 1.5)
    assert second.version("policy") == PolicyVersion(0, 2)
    assert kit.weights(second) == kit.weights(first)
    await step(second, 2)
    assert kit.weights(second) == kit.weights(whole)


async def test_without_a_checkpoint_there_is_nothing_to_load(kit, tmp_path):
    trainer = kit.trainer()
    before = kit.weights(trainer)
    assert await trainer.load(tmp_path / "none") is None
    assert kit.weights(trainer) == before


async def test_a_damaged_checkpoint_gives_way_and_where_all_are_damaged_it_is_an_error(kit, tmp_path):
    trainer = kit.trainer()
    paths = []
    for number in range(2):
        await step(trainer, number)
        paths.append(await trainer.save(tmp_path, {"step": number + 1}, f"s{number}"))
    for expected, path in ((1, paths[1]), (None, paths[0])):
        victim = max((p for p in path.iterdir() if p.name != "checkpoint.json"), key=lambda p: p.stat().st_size)
        content = bytearray(victim.read_bytes())
        content[-1] ^= 1
        victim.write_bytes(bytes(content))
        other = kit.trainer()
        if expected is None:
            with pytest.raises(CheckpointError):
                await other.load(tmp_path)
        else:
            assert (await other.load(tmp_path))["step"] == expected


async def test_publishing_hands_over_the_present_version_once(kit):
    trainer, engine = kit.trainer(), kit.engine()
    await step(trainer, 0)
    assert await trainer.publish("policy", engine, "p") == PolicyVersion(0, 1)
    assert engine.version("policy") == PolicyVersion(0, 1)
    if kit.kind == "torch":
        own = dict(trainer._model.named_parameters())
        assert all(torch.equal(p, own[name]) for name, p in engine._model.named_parameters())


async def test_a_new_incarnation_is_said_by_all_later_versions(kit, tmp_path):
    trainer = kit.trainer()
    await step(trainer, 0)
    trainer.begin_incarnation(2)
    assert trainer.version("policy") == PolicyVersion(2, 1)
    await step(trainer, 1)
    await trainer.save(tmp_path, {"step": 2}, "s")
    other = kit.trainer()
    await other.load(tmp_path)
    assert other.version("policy") == PolicyVersion(2, 2)


async def test_rows_that_can_not_be_trained_are_named_with_a_reason_and_change_nothing(kit):
    trainer = kit.trainer()
    before = kit.weights(trainer)
    good = batch()
    assert await trainer.untrainable("policy", good, "c1") == {}
    odd = replace(make_sample([1, 2, 3, 4], [2, 3], logprobs=[-1.0, float("nan")], name="c"))
    assert await trainer.untrainable("policy", [*good, odd], "c2") == {
        "c": "the log-probability of the token at 3 is not finite"
    }
    assert kit.weights(trainer) == before
    await trainer.forward_backward("policy", good, LOSS, "g")


async def test_a_model_names_tokens_that_it_does_not_have_and_replies_that_leave_their_grammar():
    kit = Kit("torch")
    trainer = kit.trainer()
    tokens = load_tokenizer("tiny-random").encode
    inside = GrammarSpan(2, 2, 'start: "ab" | "cd"\n')
    rows = [
        replace(make_sample([7, 8, *tokens("ab"), 9], [2, 3], name="fits"), grammars=(inside,)),
        replace(make_sample([7, 8, *tokens("ac"), 9], [2, 3], name="leaves"), grammars=(inside,)),
        replace(
            make_sample([7, 8, *tokens("cd"), 9], [2, 3], name="no grammar"),
            grammars=(GrammarSpan(2, 2, "start: x\n"),),
        ),
        make_sample([7, 8, 100_000], [2], name="no token"),
    ]
    try:
        found = await trainer.untrainable("policy", rows, "c")
        assert sorted(found) == ["leaves", "no grammar", "no token"]
        assert "satisfy the grammar" in found["leaves"]
        assert "token 100000 is none of the model's" in found["no token"]
        assert await trainer.untrainable("policy", rows, "again") == found
        report = await trainer.forward_backward("policy", rows[:1], LOSS, "g")
        assert report.trained_tokens == 2
    finally:
        await trainer.close()
