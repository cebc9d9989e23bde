"""Episodes of the past as episodes of a job: copied exactly, from a run or conversations, once, whatever crashes."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest

from palestra.config import JobConfig
from palestra.errors import ConfigError
from palestra.renderers import ByteTokenizer, ChatMLRenderer
from palestra.store.browsing import browse, list_episodes, read_episode
from palestra.tokens import TokenTrie, rows_of
from palestra.types.calls import PolicyVersion
from palestra.types.messages import ChatMessage
from palestra.types.records import Task, Trajectory
from unit.building import open_store
from unit.learner.scripted_job import Crash, ScriptedJob, config

pytestmark = pytest.mark.ci


def of(folder: Path, kind: str = "train") -> list[Trajectory]:
    """All completed episodes of a run, in canonical order."""
    with browse(folder / "run.db") as connection:
        return [
            read_episode(connection, each.episode_id).trajectory
            for each in list_episodes(connection, kind, "completed", 10**6)
        ]


def tokens(trajectory: Trajectory) -> list[tuple[list[int], list[bool], list[float]]]:
    """What is trained of an episode: ids, which of them are targets, and their recorded logprobs."""
    trie = TokenTrie(trajectory.chats)
    return [
        (row.ids.tolist(), row.loss_mask.tolist(), row.logprobs[row.loss_mask].tolist())
        for row in rows_of(trie, frozenset(chat.index for chat in trajectory.chats))
    ]


def sft(source: Path | None = None, **more) -> JobConfig:
    algorithm = {"name": "sft"} | ({} if source is None else {"from_run": str(source)}) | more
    return config(algorithm=algorithm, steps=2)


@pytest.fixture
async def source(tmp_path) -> Path:
    await ScriptedJob(tmp_path / "source", config()).run()
    return tmp_path / "source"


async def test_the_good_episodes_of_a_run_are_trained_token_by_token_as_they_were_sampled(tmp_path, source):
    job = ScriptedJob(tmp_path / "job", sft(source, min_reward=1.0))
    await job.run()
    recorded = {t.episode.episode_id: t for t in of(source)}
    good = {name for name, t in recorded.items() if t.episode.reward >= 1}
    assert 0 < len(good) < len(recorded)
    copied = of(tmp_path / "job")
    assert len(copied) == 2 * 2  # two steps of two groups, of one episode each
    for trajectory in copied:
        name = trajectory.episode.metadata["recorded"].rpartition("/")[2]
        assert name in good
        original = recorded[name]
        assert tokens(trajectory) == tokens(original)
        assert trajectory.episode.rewards == original.episode.rewards
        assert trajectory.episode.task == original.episode.task
        assert [chat.messages for chat in trajectory.chats] == [chat.messages for chat in original.chats]
    rows = [json.loads(line) for line in (tmp_path / "job/metrics.jsonl").read_text().splitlines()]
    for row in rows[1:]:
        assert row["rollout/staleness_max"] == 0
        assert row["train/reward_mean"] >= 1
        assert row["train/trained_tokens"] == row["rollout/completion_tokens"] > 0
    assert "validation/reward_mean" in rows[-1]  # validation is played by the agents, with the trained policy


@pytest.mark.slow
async def test_all_episodes_are_taken_before_one_is_taken_again(tmp_path, source):
    settings = config(algorithm={"name": "sft", "from_run": str(source)}, steps=8)
    await ScriptedJob(tmp_path / "job", settings).run()
    names = [t.episode.metadata["recorded"].rpartition("/")[2] for t in of(tmp_path / "job")]
    known = [t.episode.episode_id for t in of(source)]
    assert len(known) == 12
    assert sorted(names[:12]) == sorted(known)
    assert names[:12] != known  # shuffled


@pytest.mark.slow
async def test_a_job_that_crashed_anywhere_ends_with_the_same_weights(tmp_path, source):
    settings = sft(source)
    weights = await ScriptedJob(tmp_path / "whole", settings).run()
    crashes = 0
    for number in range(3, 40, 3):
        folder = tmp_path / str(number)
        with contextlib.suppress(Crash):
            assert await ScriptedJob(folder, settings, crash_at=number).run() == weights
            continue
        crashes += 1
        assert await ScriptedJob(folder, settings).run() == weights
        assert list(map(tokens, of(folder))) == list(map(tokens, of(tmp_path / "whole")))
    assert crashes > 5


@pytest.mark.slow
async def test_a_resumed_job_keeps_the_episodes_of_its_first_start(tmp_path, source):
    first = ScriptedJob(tmp_path / "job", sft(source))
    first.on_event = lambda kind, data: first.learner.stop() if kind == "step" and data["step"] == 1 else None
    await first.run()
    await ScriptedJob(source, config(steps=5)).run()  # the source has more episodes now
    await ScriptedJob(tmp_path / "job", sft(source)).run()
    with open_store(tmp_path / "job") as store:
        assert len(json.loads(await store.log.fact("recorded_episodes"))) == 12
    assert len(of(source)) == 20


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"min_reward": 99.0}, r"99.0.*2"),
        ({"from_run": "/nowhere"}, "/nowhere"),
    ],
)
async def test_a_source_without_what_is_asked_for_is_refused(tmp_path, source, changes, said):
    with pytest.raises(ConfigError, match=said):
        await run_until_refused(ScriptedJob(tmp_path / "job", sft(source, **changes)))


@pytest.fixture
async def source_of_two(tmp_path) -> Path:
    both = {"white": {}, "black": {}}
    await ScriptedJob(tmp_path / "two", config(policies=both, roles={"opponent": "black"})).run()
    return tmp_path / "two"


@pytest.mark.parametrize(("policy", "agent", "least"), [("white", "agent", 2.0), ("black", "opponent", 1.0)])
async def test_of_several_trained_policies_the_calls_and_rewards_of_one_are_learned(
    tmp_path, source_of_two, policy, agent, least
):
    one = {policy: sft().policies["policy"]}
    settings = sft(source_of_two, min_reward=least).model_copy(update={"policies": one})
    job = ScriptedJob(tmp_path / "job", settings)
    await job.run()
    recorded = {t.episode.episode_id: t for t in of(source_of_two)}
    good = {name for name, t in recorded.items() if t.episode.rewards[agent] >= least}
    assert 0 < len(good) < len(recorded)
    for trajectory in of(tmp_path / "job"):
        original = recorded[trajectory.episode.metadata["recorded"].rpartition("/")[2]]
        assert original.episode.episode_id in good
        assert trajectory.episode.rewards == {agent: original.episode.rewards[agent]}
        own = [chat for chat in original.chats if chat.policy == policy]
        assert [chat.completion_ids.tolist() for chat in trajectory.chats] == [c.completion_ids.tolist() for c in own]


@pytest.mark.slow
async def test_of_several_that_of_the_same_name_is_learned(tmp_path, source_of_two):
    black = sft(source_of_two).model_copy(update={"policies": {"black": sft().policies["policy"]}})
    await ScriptedJob(tmp_path / "same", black).run()
    counts = {len(trajectory.chats) for trajectory in of(tmp_path / "same")}
    assert counts == {1}  # the opponent calls once an episode, and the agent twice
    with pytest.raises(ConfigError, match=r"from_run.*'white'.*'black'.*'policy'"):
        await run_until_refused(ScriptedJob(tmp_path / "none", sft(source_of_two)))


async def run_until_refused(job: ScriptedJob) -> None:
    try:
        await job.run()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def test_a_source_with_another_tokenizer_is_refused(tmp_path, source, monkeypatch):
    saved = source / "config.toml"
    text = saved.read_text().replace('kind = "fake"', 'kind = "embedded"').replace("SmolLM2-135M-Instruct", "other")
    saved.write_text("\n".join(line for line in text.splitlines() if not line.startswith(("delay_s", "reply_t"))))
    monkeypatch.setattr("palestra.learner.recordings._same_tokens", lambda model, runtime: False)
    with pytest.raises(ConfigError, match=r"'other'.*'SmolLM2"):
        await run_until_refused(ScriptedJob(tmp_path / "job", sft(source)))


TALK = Task(
    task_id="talk",
    data={
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "Sure? <|im_end|>"},
            {"role": "assistant", "content": "Yes."},
        ]
    },
)


async def test_of_a_conversation_the_replies_are_trained_with_their_end_and_nothing_else(tmp_path):
    job = ScriptedJob(tmp_path, sft(), tasks=[TALK])
    await job.run()
    (trajectory, *_) = of(tmp_path)
    tokenizer = ByteTokenizer()
    shown = [
        (tokenizer.decode(chat.prompt_ids.tolist()), tokenizer.decode(chat.completion_ids.tolist()))
        for chat in trajectory.chats
    ]
    before = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    between = "4<|im_end|>\n<|im_start|>user\nSure? <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert shown == [(before, "4<|im_end|>"), (before + between, "Yes.<|im_end|>")]
    # The reader's text that spells the end of a turn is text: the second call goes on to the real end.
    assert trajectory.chats[1].prompt_ids.tolist().count(258) == 4
    ((ids, targets, logprobs),) = tokens(trajectory)  # both replies lie in one row
    assert (
        tokenizer.decode([i for i, target in zip(ids, targets, strict=True) if target]) == "4<|im_end|>Yes.<|im_end|>"
    )
    assert set(logprobs) == {0.0}
    assert trajectory.episode.rewards == {"agent": 1.0}
    assert {span.version for chat in trajectory.chats for span in chat.versions} == {PolicyVersion(0, 0)}


class WholeTemplate(ChatMLRenderer):
    """A template that drops the reasoning of a reply before a user's turn, so that a later prompt may show it again."""

    independent_turns = False

    def render(self, messages, tools=(), room=None):
        following = [message.role for message in messages[1:]] + ["none"]
        shown = [
            message.model_copy(update={"reasoning_content": None}) if role == "user" else message
            for message, role in zip(messages, following, strict=True)
        ]
        return super().render(shown, tools, room)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
LONG_TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": None, "reasoning_content": "a tool", "tool_calls": [
        {"id": "1", "function": {"name": "add", "arguments": "{}"}},
        {"id": "2", "function": {"name": "add", "arguments": "x"}},
    ]},
    {"role": "tool", "content": "4", "tool_call_id": "1"},
    {"role": "tool", "content": "5", "tool_call_id": "2"},
    {"role": "assistant", "content": "4 <|im_end|>", "reasoning_content": "so"},
    {"role": "assistant", "content": "or 5"},
    {"role": "user", "content": ""},
    {"role": "system", "content": "again"},
    {"role": "user", "content": "é"},
    {"role": "assistant", "content": "", "reasoning_content": "hm"},
    {"role": "user", "content": "the end"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "extends"), [(ChatMLRenderer, [True, True, True]), (WholeTemplate, [False, False, True])]
)
async def test_each_call_of_a_conversation_is_what_the_template_shows_and_stores_only_what_is_new(
    tmp_path, kind, extends
):
    task = Task(task_id="t", data={"messages": LONG_TALK, "tools": TOOLS})
    job = ScriptedJob(tmp_path, sft(), tasks=[task])
    renderer = kind(ByteTokenizer())
    runtime = job.policies.runtime("policy")
    object.__setattr__(runtime, "renderer", renderer)
    await job.run()
    (trajectory, *_) = of(tmp_path)
    messages = [ChatMessage.model_validate(message) for message in LONG_TALK]
    places = [place for place, message in enumerate(messages) if message.role == "assistant"]
    assert len(trajectory.chats) == len(places) == 4
    for chat, place in zip(trajectory.chats, places, strict=True):
        prompt = renderer.render(messages[:place], TOOLS).ids
        assert np.array_equal(chat.prompt_ids, prompt)
        whole = renderer.render([*messages[: place + 1], ChatMessage(role="user", content="x")], TOOLS).ids
        assert np.array_equal(chat.ids, whole[: len(chat.ids)])
        assert chat.completion_ids[-1] == 258
        assert chat.messages == tuple(messages[:place])
        assert (chat.reply, list(chat.tools)) == (messages[place], TOOLS)
    assert [chat.parent and chat.parent.index for chat in trajectory.chats] == [None, 0, 1, 2]
    assert [chat.extends is chat.parent for chat in trajectory.chats[1:]] == extends
    assert [len(chat.new_messages) for chat in trajectory.chats] == [2, 2, 0, 3]


async def test_what_a_long_conversation_costs_grows_with_its_length_and_not_with_its_square(tmp_path):
    rendered = 0

    class Counting(ChatMLRenderer):
        def _ids(self, turns, ids, room):
            nonlocal rendered
            found = super()._ids(turns, ids, room)
            rendered += len(found)
            return found

    talk = [{"role": role, "content": f"{role} {n}"} for n in range(300) for role in ("user", "assistant")]
    settings = config(
        algorithm={"name": "sft"}, steps=1, rollout={"groups_per_step": 1}, policies={"policy": {"max_context": 65_536}}
    )
    job = ScriptedJob(tmp_path, settings, tasks=[Task(task_id="t", data={"messages": talk})])
    object.__setattr__(job.policies.runtime("policy"), "renderer", Counting(ByteTokenizer()))
    await job.run()
    (trajectory,) = of(tmp_path)
    tokens_of_all = trajectory.chats[-1].tokens
    assert len(trajectory.chats) == 300
    assert sum(len(chat.prompt_tail) + len(chat.completion_ids) for chat in trajectory.chats) == tokens_of_all
    assert sum(len(chat.new_messages) for chat in trajectory.chats) == 300
    assert rendered < 6 * tokens_of_all


async def test_a_conversation_may_have_a_reward_of_its_own(tmp_path):
    task = Task(task_id="t", data=TALK.data | {"reward": 0.25})
    await ScriptedJob(tmp_path, sft(), tasks=[task]).run()
    assert {t.episode.reward for t in of(tmp_path)} == {0.25}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"text": "say 1"}, "from_run: it"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"'t' is.*conversation"),
        ({"messages": [{"role": "user", "content": "x"}]}, "role assistant"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * 9000}]},
         r"1.*1.*4,096.*.max_context"),
    ],
)  # fmt: skip
async def test_a_task_that_is_no_conversation_is_named(tmp_path, data, said):
    with pytest.raises(ConfigError, match=said):
        await run_until_refused(ScriptedJob(tmp_path, sft(), tasks=[Task(task_id="t", data=data)]))


@pytest.mark.parametrize("pairs", [False, True])
async def test_tasks_that_are_too_long_are_left_out_and_counted(tmp_path, pairs):
    def task(name: str, text: str) -> Task:
        if pairs:
            return Task(task_id=name, data={"prompt": "x", "chosen": "fine", "rejected": text})
        return Task(task_id=name, data={"messages": [{"role": "user", "content": text}, TALK.data["messages"][-1]]})

    settings = config(
        algorithm={"name": "dpo" if pairs else "sft"}, steps=3, rollout={"groups_per_step": 2, "max_staleness": 0}
    )
    tasks = [task("short", "a"), task("long", "é" * 9000), task("fits", "b" * 3900), task("longer", "c" * 20_000)]
    job = ScriptedJob(tmp_path, settings, tasks=tasks)
    await job.run()
    assert {t.episode.task.task_id for t in of(tmp_path)} == {"short", "fits"}
    assert [facts["tasks"] for kind, facts in job.events if kind == "tasks_left_out"] == [2]


def test_min_reward_needs_a_run():
    with pytest.raises(ConfigError, match=r"min_reward.*`from_run`"):
        JobConfig(algorithm={"name": "sft", "min_reward": 1.0})
