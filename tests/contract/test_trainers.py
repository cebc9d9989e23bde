"""What every trainer promises, whatever its weights are."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bases import served
from unit.building import make_sample

from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import PPOClipLoss
from palestra.config import TrainerConfig
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.embedded.engine import EmbeddedEngine
from palestra.engine.embedded.model_runner import PolicyModel
from palestra.engine.fake import FakeEngine, digits_script
from palestra.errors import CheckpointError, ConfigError, NotFound
from palestra.models.causal_lm import load_causal_lm, load_tokenizer
from palestra.trainer.base import TRAINER_METRICS, OptimParams, PolicySpec
from palestra.trainer.fake import FakeTrainer
from palestra.trainer.torch_trainer import TorchTrainer
from palestra.types.calls import GrammarSpan, PolicyVersion
from palestra_bases.base import SamplerSpec
from palestra_bases.remote import RemoteEngine, RemoteTrainer

pytestmark = pytest.mark.ci

LOSS = LossSpec.of(PPOClipLoss())
PARAMS = OptimParams(learning_rate=1e-3)


class Kit:
    """A kind of trainer: how to make one, and what its weights are."""

    def __init__(self, kind: str, folder: Path) -> None:
        torch.set_num_threads(1)
        self.kind, _, socket = kind.partition(" ")
        self.made: list = []
        self._folder = folder if socket else None  # of sockets and checkpoints
        self._stack = contextlib.AsyncExitStack()
        # What a trainer over a socket stands for, and how the names of its policies begin there.
        self._behind: dict = {}
        self._links: list = []
        self._shared_engine = None

    async def trainer(self, *policies: str):
        """A trainer with these policies, or with `policy`."""
        made = FakeTrainer(2) if self.kind == "fake" else TorchTrainer(TrainerConfig(threads=1, dtype="float32"), 2)
        self.made.append(made)
        if self._folder is not None:
            made = await self._over_socket(made)
        for policy in policies or ("policy",):
            await made.create(policy, PolicySpec(model="tiny-random"))
        return made

    async def engine(self):
        """An engine that reads the weights of the newest trainer."""
        if not self._behind:
            return self._made_engine()
        link, name = self._links[-1], "policy"
        engine = RemoteEngine(link)
        await engine.sample(name, SamplerSpec(model="tiny-random"))
        return engine.engine

    def _made_engine(self):
        if self.kind == "fake":
            made = FakeEngine(digits_script(4, 258))
        else:
            policy = PolicyModel(model=load_causal_lm("tiny-random", torch.float32), stop_ids=frozenset((258,)))
            made = EmbeddedEngine({"policy": policy}, EmbeddedEngineConfig(threads=1, dtype="float32"))
        self.made.append(made)
        return made

    async def _over_socket(self, trainer):
        """What stands for a trainer in a job's process. All servers have one engine."""
        if self._shared_engine is None:
            self._shared_engine = self._made_engine()
        number = len(self._links)
        base = await self._stack.enter_async_context(
            served(self._shared_engine, trainer, self._folder, socket=f"socket-{number}")
        )
        self._links.append(await base.link(job=f"job-{number}"))
        made = RemoteTrainer(self._links[-1], 2).trainer
        self._behind[made] = trainer, f"ada/job-{number}/"
        return made

    def sampled(self):
        """The policy of the engine that `engine` has given, as its weights by name."""
        if not self._behind:
            (engine,) = (made for made in self.made if isinstance(made, EmbeddedEngine))
            name = "policy"
        else:
            engine, name = self._shared_engine, f"ada/job-{len(self._links) - 1}/policy"
        return dict(engine._policies[name].model.named_parameters())

    async def close(self):
        await self._stack.aclose()
        for made in self.made:
            await made.close()

    def weights(self, trainer, policy: str = "policy"):
        trainer, prefix = self._behind.get(trainer, (trainer, ""))
        policy = prefix + policy
        if self.kind == "fake":
            return trainer.digest(policy)
        named = trainer._policies[policy].parameters
        return torch.cat([p.detach().flatten() for _, p in named]).numpy().tobytes()


@pytest.fixture
def folder(tmp_path):
    """A job's own, in that of its tenant."""
    return tmp_path / "job"


@pytest.fixture(params=["fake", "torch", "fake over a socket", "torch over a socket"])
async def kit(request, tmp_path):
    kit = Kit(request.param, tmp_path)
    yield kit
    await kit.close()


def batch(seed: int = 0):
    return [
        make_sample([1, 2, 3, 4 + seed, 5], [3, 4], advantage=1.0, weight=0.25, name="a"),
        make_sample([1, 2, 3, 9, 8], [3, 4], advantage=-1.0, weight=0.25, name="b"),
    ]


async def step(trainer, number: int, seed: int | None = None) -> None:
    await trainer.forward_backward("policy", batch(number if seed is None else seed), LOSS, f"g{number}")
    await trainer.optim_step("policy", PARAMS, f"u{number}")
    await trainer.weights("policy")


async def test_an_update_changes_the_weights_and_counts(kit):
    trainer = await kit.trainer()
    before = kit.weights(trainer)
    assert trainer.version("policy") == PolicyVersion(0, 0)
    report = await trainer.forward_backward("policy", batch(), LOSS, "g")
    assert (report.rows, report.trained_tokens, report.flat_tokens) == (2, 4, 10)
    assert report.metrics.keys() == {metric.name for metric in (*TRAINER_METRICS, *PPOClipLoss.metrics)}
    assert kit.weights(trainer) == before
    assert trainer.version("policy") == PolicyVersion(0, 0)
    update = await trainer.optim_step("policy", PARAMS, "u")
    assert update.learning_rate == 1e-3
    assert trainer.version("policy") == PolicyVersion(0, 1)
    assert kit.weights(trainer) != before


async def test_several_updates_between_two_publications_are_one_version(kit):
    trainer = await kit.trainer()
    for number in range(3):
        await trainer.forward_backward("policy", batch(number), LOSS, f"g{number}")
        await trainer.optim_step("policy", PARAMS, f"u{number}")
    assert trainer.version("policy") == PolicyVersion(0, 1)
    for _ in range(2):
        await trainer.weights("policy")
        assert trainer.version("policy") == PolicyVersion(0, 1)
    await step(trainer, 3)
    assert trainer.version("policy") == PolicyVersion(0, 2)


async def test_the_same_samples_in_the_same_order_give_the_same_weights_and_others_others(kit):
    found = []
    for seeds in ((1, 2), (1, 2), (2, 1), (1, 3)):
        trainer = await kit.trainer()
        for number, seed in enumerate(seeds):
            await step(trainer, number, seed)
        found.append(kit.weights(trainer))
    assert found[0] == found[1]
    assert len(set(found)) == 3


async def test_a_repeated_request_gets_the_first_answer_and_does_nothing(kit):
    once, often = await kit.trainer(), await kit.trainer()
    await step(once, 0)
    for _ in range(2):
        first, again = await asyncio.gather(*(often.forward_backward("policy", batch(0), LOSS, "g0") for _ in range(2)))
        assert first == again
    updates = [await often.optim_step("policy", PARAMS, "u0") for _ in range(3)]
    assert updates[0] == updates[1] == updates[2]
    assert often.version("policy") == PolicyVersion(0, 1)
    assert kit.weights(often) == kit.weights(once)


async def test_save_and_load_go_on_as_if_nothing_had_happened(kit, folder):
    whole = await kit.trainer()
    for number in range(3):
        await step(whole, number)
    first = await kit.trainer()
    await step(first, 0)
    await step(first, 1)
    path = await first.save("policy", folder, {"step": 2, "wall_seconds": 1.5}, "s")
    assert path.parent == folder
    second = await kit.trainer()
    state = await second.load("policy", folder)
    assert (state["step"], state["wall_seconds"]) == (2, 1.5)
    assert second.version("policy") == PolicyVersion(0, 2)
    assert kit.weights(second) == kit.weights(first)
    await step(second, 2)
    assert kit.weights(second) == kit.weights(whole)


async def test_without_a_checkpoint_there_is_nothing_to_load(kit, tmp_path):
    trainer = await kit.trainer()
    before = kit.weights(trainer)
    assert await trainer.load("policy", tmp_path / "none") is None
    assert kit.weights(trainer) == before


async def test_a_damaged_checkpoint_gives_way_and_where_all_are_damaged_it_is_an_error(kit, folder):
    trainer = await kit.trainer()
    paths = []
    for number in range(2):
        await step(trainer, number)
        paths.append(await trainer.save("policy", folder, {"step": number + 1}, f"s{number}"))
    for expected, path in ((1, paths[1]), (None, paths[0])):
        victim = max((p for p in path.iterdir() if p.name != "checkpoint.json"), key=lambda p: p.stat().st_size)
        content = bytearray(victim.read_bytes())
        content[-1] ^= 1
        victim.write_bytes(bytes(content))
        other = await kit.trainer()
        if expected is None:
            with pytest.raises(CheckpointError):
                await other.load("policy", folder)
        else:
            assert (await other.load("policy", folder))["step"] == expected


async def test_the_checkpoint_of_one_step_is_loaded_or_that_it_is_damaged_is_said(kit, folder):
    trainer = await kit.trainer()
    await step(trainer, 0)
    wanted = kit.weights(trainer)
    await trainer.save("policy", folder, {"step": 1}, "s1")
    await step(trainer, 1)
    newest = await trainer.save("policy", folder, {"step": 2}, "s2")
    other = await kit.trainer()
    assert (await other.load("policy", folder, 2))["step"] == 2
    assert (await other.load("policy", folder, 1))["step"] == 1
    assert kit.weights(other) == wanted
    assert other.version("policy") == PolicyVersion(0, 1)
    assert await other.load("policy", folder, 3) is None
    assert kit.weights(other) == wanted
    victim = next(path for path in newest.iterdir() if path.name != "checkpoint.json")
    victim.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"step-000002.*damaged"):
        await other.load("policy", folder, 2)
    assert kit.weights(other) == wanted


async def test_weights_are_those_of_the_present_version_for_an_engine_to_read(kit):
    trainer = await kit.trainer()
    engine = await kit.engine()
    await step(trainer, 0)
    source = await trainer.weights("policy")
    await engine.sync_weights("policy", trainer.version("policy"), source)
    assert engine.version("policy") == PolicyVersion(0, 1)
    if kit.kind == "torch":
        own = kit.weights(trainer)
        assert torch.cat([p.detach().flatten() for p in kit.sampled().values()]).numpy().tobytes() == own


async def test_a_new_incarnation_is_said_by_all_later_versions(kit, folder):
    trainer = await kit.trainer()
    await step(trainer, 0)
    trainer.begin_incarnation("policy", 2)
    assert trainer.version("policy") == PolicyVersion(2, 1)
    await step(trainer, 1)
    await trainer.save("policy", folder, {"step": 2}, "s")
    other = await kit.trainer()
    await other.load("policy", folder)
    assert other.version("policy") == PolicyVersion(2, 2)


async def test_rows_that_can_not_be_trained_are_named_with_a_reason_and_change_nothing(kit):
    trainer = await kit.trainer()
    before = kit.weights(trainer)
    good = batch()
    assert await trainer.untrainable("policy", good, "c1") == {}
    odd = replace(make_sample([1, 2, 3, 4], [2, 3], logprobs=[-1.0, float("nan")], name="c"))
    assert await trainer.untrainable("policy", [*good, odd], "c2") == {
        "c": "the log-probability of the token at 3 is not finite"
    }
    assert kit.weights(trainer) == before
    await trainer.forward_backward("policy", good, LOSS, "g")


async def test_a_model_names_tokens_that_it_does_not_have_and_replies_that_leave_their_grammar(tmp_path):
    kit = Kit("torch", tmp_path)
    trainer = await kit.trainer()
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


# Several policies


async def test_what_is_done_to_one_policy_leaves_the_other_as_it_is_bit_by_bit(kit, tmp_path):
    alone, trainer = await kit.trainer("a"), await kit.trainer("a", "b")
    untouched = kit.weights(trainer, "b")
    await trainer.forward_backward("b", batch(9), LOSS, "g")  # a gradient that is never applied
    for number in range(2):
        for one in (alone, trainer):
            await one.forward_backward("a", batch(number), LOSS, f"g{number}")
            await one.optim_step("a", PARAMS, f"u{number}")
            await one.weights("a")
        await trainer.save("a", tmp_path / "a", {"step": number + 1}, f"s{number}")
    assert kit.weights(trainer, "b") == untouched
    assert (trainer.version("a"), trainer.version("b")) == (PolicyVersion(0, 2), PolicyVersion(0, 0))
    assert kit.weights(trainer, "a") == kit.weights(alone, "a")
    await trainer.optim_step("b", PARAMS, "u")
    other = await kit.trainer("b")
    await other.forward_backward("b", batch(9), LOSS, "g")
    await other.optim_step("b", PARAMS, "u")
    assert kit.weights(trainer, "b") == kit.weights(other, "b") != untouched
    assert kit.weights(trainer, "a") == kit.weights(alone, "a")
    assert await trainer.load("b", tmp_path / "a") is not None  # a checkpoint may become another policy
    assert kit.weights(trainer, "b") == kit.weights(trainer, "a")


async def test_equal_request_ids_of_two_policies_are_two_requests(kit):
    trainer = await kit.trainer("a", "b")
    for policy in ("a", "b"):
        await trainer.forward_backward(policy, batch(), LOSS, "g")
        await trainer.optim_step(policy, PARAMS, "u")
    assert kit.weights(trainer, "a") == kit.weights(trainer, "b")
    assert trainer.version("b") == PolicyVersion(0, 1)


async def test_a_policy_has_to_be_there_and_a_name_is_given_once(kit):
    trainer = await kit.trainer("a")
    with pytest.raises(ConfigError, match=r"'a'.*already"):
        await trainer.create("a", PolicySpec(model="tiny-random"))
    for missing in (
        lambda: trainer.forward_backward("b", batch(), LOSS, "g"),
        lambda: trainer.forward("b", batch(), {"old_logprobs"}),
        lambda: trainer.optim_step("b", PARAMS, "u"),
        lambda: trainer.weights("b"),
        lambda: trainer.remove("b"),
    ):
        with pytest.raises(NotFound, match=r"policy.*'b'"):
            await missing()
    with pytest.raises(NotFound):
        trainer.version("b")


async def test_a_policy_that_was_removed_and_made_again_begins_anew(kit):
    trainer = await kit.trainer("a")
    before = kit.weights(trainer, "a")
    await trainer.forward_backward("a", batch(), LOSS, "g")
    await trainer.optim_step("a", PARAMS, "u")
    after = kit.weights(trainer, "a")
    await trainer.remove("a")
    with pytest.raises(NotFound):
        trainer.version("a")
    await trainer.create("a", PolicySpec(model="tiny-random"))
    assert (kit.weights(trainer, "a"), trainer.version("a")) == (before, PolicyVersion(0, 0))
    await trainer.forward_backward("a", batch(), LOSS, "g")  # the ids of the one before are not remembered
    await trainer.optim_step("a", PARAMS, "u")
    assert kit.weights(trainer, "a") == after


# Forward, and losses by name


async def test_old_logprobs_are_those_of_the_policy_as_it_is_and_change_nothing(kit):
    trainer = await kit.trainer()
    before = kit.weights(trainer)
    assert await trainer.forward("policy", batch(), ()) == {}
    found = await trainer.forward("policy", batch(), {"old_logprobs"})
    assert found.keys() == {"old_logprobs"}
    for row, logprobs in zip(batch(), found["old_logprobs"], strict=True):
        assert (logprobs.shape, logprobs.dtype) == (row.ids.shape, np.float32)
        assert np.array_equal(np.isnan(logprobs), ~row.loss_mask)
    assert kit.weights(trainer) == before
    with_them = [replace(row, logprobs=now) for row, now in zip(batch(), found["old_logprobs"], strict=True)]
    report = await trainer.forward_backward("policy", with_them, LOSS, "g")
    assert report.metrics["logprob_gap_max"] == 0.0  # the loss sees the same numbers, bit for bit


async def test_an_output_that_a_trainer_does_not_have_is_refused(kit):
    trainer = await kit.trainer()
    with pytest.raises(ConfigError, match="compute values"):
        await trainer.forward("policy", batch(), {"values", "old_logprobs"})


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (LossSpec(name="nothing"), r"loss.*'nothing'"),
        (
            LossSpec(name="ppo", parameters={"clip": 0.2}),
            r"\['clip_high_threshold'.*'clip_low_threshold'\].*\['clip'\]",
        ),
    ],
)
async def test_a_loss_that_does_not_exist_is_refused(kit, spec, said):
    trainer = await kit.trainer()
    with pytest.raises(ConfigError, match=said):
        await trainer.forward_backward("policy", batch(), spec, "g")
    await trainer.forward_backward("policy", batch(), LOSS, "g")
