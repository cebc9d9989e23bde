"""Two policies with tokenizers of their own in one episode: neither goes on from what the other said."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from palestra.config import PolicyConfig, Roles
from palestra.errors import ContextOverflow, NotFound, UnsupportedField
from palestra.renderers import ByteTokenizer, ChatMLRenderer
from palestra.session import PolicyRuntime, PolicySet, SessionContext
from palestra.session.registry import CallRegistry, call_seed, prompt_digest
from palestra.trainer.quarantine import Quarantine
from palestra.types.calls import ForkReason
from unit.building import ids
from unit.session.conftest import Bench, call, says

ROLES = Roles(default="policy", named={"opponent": "old"}, frozen=frozenset({"old"}))


class Shifted(ByteTokenizer):
    """Bytes as ids that mean other bytes to the first tokenizer; control tokens are as there."""

    def encode(self, text, add_special_tokens=False):
        return [id if id >= 256 else (id + 1) % 256 for id in super().encode(text, add_special_tokens)]

    def decode(self, ids, skip_special_tokens=False):
        return super().decode([id if id >= 256 else (id - 1) % 256 for id in ids], skip_special_tokens)


class TwoPolicies(Bench):
    """A bench whose second policy is frozen, and has a tokenizer of its own if `tokenizer` says so."""

    tokenizer: type[ByteTokenizer] = ByteTokenizer

    def new_context(self) -> SessionContext:
        first = super().new_context().policies.runtime("policy")
        old = PolicyRuntime(
            name="old",
            config=PolicyConfig.model_validate(
                {"frozen": True, "max_context": 300, "sampling": {"max_tokens": 20, "temperature": 0.5}}
            ),
            renderer=ChatMLRenderer(self.tokenizer()),
            engine=self.engine,
            grammars=self.grammars,
        )
        policies = PolicySet(runtimes={"policy": first, "old": old}, roles=ROLES)
        return SessionContext(store=self.store, policies=policies, seed=11)


@pytest.fixture(params=[ByteTokenizer, Shifted])
def bench(tmp_path, clock, request):
    kind = type("Made", (TwoPolicies,), {"tokenizer": request.param})
    made = kind(tmp_path, clock)
    yield made
    made.grammars.close()
    made.store.close()


async def test_a_call_goes_on_from_calls_of_its_own_policy_only(bench):
    session = await bench.session()
    bench.script = says("a")
    first = await session.generate_one(call("hi"))
    theirs = await session.generate_one(call("hi", "a", "more", policy="old", agent="opponent"))
    mine = await session.generate_one(call("hi", "a", "more"))
    said = theirs.reply.text
    again = await session.generate_one(call("hi", "a", "more", said, "and", policy="old", agent="opponent"))
    assert (theirs.parent, theirs.shared, theirs.fork) == (None, 0, None)
    assert mine.extends is first
    assert again.extends is theirs
    raw = await session.generate_one(call(policy="old", messages=(), prompt=tuple(mine.ids.tolist())))
    assert raw.parent is not mine
    assert raw.parent is None or raw.parent.policy == "old"


async def test_what_one_policy_said_is_text_to_another_that_is_shown_it(bench):
    """A judge gets new questions with replies of the other: none of its own tokens is lost, also in a strict job."""
    bench.context = replace(bench.context, strict_history=True)
    session = await bench.session()
    for number in range(3):
        bench.script = says(chr(ord("a") + number))
        said = (await session.generate_one(call(f"question {number}"))).reply.text
        verdict = await session.generate_one(call(f"question {number}", said, "right?", policy="old", agent="judge"))
        assert verdict.fork is None or verdict.fork.reason is ForkReason.NEW_CONVERSATION
        assert verdict.extends is None


async def test_a_lease_that_is_opened_again_goes_on_for_each_policy(bench):
    session = await bench.session()
    first = await session.generate_one(call("hi"))
    theirs = await session.generate_one(call("hi", policy="old", agent="opponent"))
    session = await bench.reopened(session)
    for policy, before in (("policy", first), ("old", theirs)):
        chat = await session.generate_one(call("hi", before.reply.text, "more", policy=policy))
        assert chat.extends is not None
        assert (chat.extends.index, chat.policy, chat.fork) == (before.index, policy, None)
        assert chat.ids.tolist()[: before.tokens] == before.ids.tolist()


async def test_each_policy_has_its_own_context_limits_and_versions(bench):
    session = await bench.session()
    long = "x" * 300
    assert (await session.generate_one(call(long))).prompt_tokens > 300
    with pytest.raises(ContextOverflow):
        await session.generate_one(call(long, policy="old"))
    await bench.engine.sync_weights("policy", (0, 3), None)
    mine = await session.generate_one(call("a"))
    theirs = await session.generate_one(call("a", policy="old"))
    assert (mine.versions[-1].version, theirs.versions[-1].version) == ((0, 3), (0, 0))
    assert (mine.sampling.temperature, theirs.sampling.temperature) == (1.0, 0.5)
    assert (mine.sampling.max_tokens, theirs.sampling.max_tokens) == (50, 20)


async def test_only_what_is_trained_on_has_to_be_sampled_as_the_trainer_computes_it(bench):
    session = await bench.session()
    with pytest.raises(UnsupportedField, match="top_p"):
        await session.generate_one(call("a", top_p=0.5))
    assert (await session.generate_one(call("a", policy="old", top_p=0.5))).sampling.top_p == 0.5


def test_which_of_two_policies_is_asked_first_makes_no_difference():
    prompt, seeds = ids(1, 2, 3), []
    for order in (("", "old", "old"), ("old", "", "old"), ("old", "old", "")):
        registry = CallRegistry(11, "e", ())
        seeds.append([(policy, registry.reserve(prompt_digest(prompt, policy))[1]) for policy in order])
    assert sorted(seeds[0]) == sorted(seeds[1]) == sorted(seeds[2])
    assert len({seed for _, seed in seeds[0]}) == 3
    assert dict(seeds[0])[""] == call_seed(11, "e", prompt_digest(prompt), 0)  # as in a job with one policy


async def test_two_policies_are_asked_at_the_same_time(bench):
    session = await bench.session()
    both = await asyncio.gather(*(session.generate_one(call("same", policy=name)) for name in ("policy", "old")))
    assert [chat.policy for chat in both] == ["policy", "old"]
    assert [chat.fork and chat.fork.reason for chat in both] in ([None, None], [ForkReason.NEW_CONVERSATION, None])
    assert both[0].sampling.seed != both[1].sampling.seed


def test_a_request_is_answered_by_the_policy_that_it_names_or_by_that_of_its_agents_role(bench):
    policies = bench.context.policies
    assert (policies.names, policies.trained) == (("policy", "old"), ("policy",))
    for model, agent, answers in (
        ("policy", "agent", "policy"),
        ("policy", "opponent", "old"),
        ("policy", "opponent/helper-2", "old"),
        ("old", "agent", "old"),
        ("old", "opponent", "old"),
    ):
        assert policies.asked(model, agent).name == answers
    with pytest.raises(NotFound, match=r"'gpt'.*'policy'.*'old'"):
        policies.asked("gpt", "opponent")
    assert {name: str(version) for name, version in policies.versions.items()} == {"policy": "0.0", "old": "0.0"}


def test_versions_are_held_from_a_step_on_and_so_are_checkpoints_of_the_playground(bench):
    policies = bench.new_context().policies
    policies.held["policy"] = Quarantine(since=4, step=6, reason="gamed")
    asked = ["policy", "policy@3", "policy@4", "policy@step-3", "policy@step-20", "old", "old@9"]
    assert [name for name in asked if policies.why_held(name)] == ["policy", "policy@4", "policy@step-20"]
