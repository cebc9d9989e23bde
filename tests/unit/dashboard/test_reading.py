"""What the page reads of a run, against the records that it was written from, and the learner's own batch."""

from __future__ import annotations

import fcntl
import json
import sqlite3
import time
from dataclasses import replace

import numpy as np
import orjson
import pytest

from palestra.dashboard.conversation import read_call
from palestra.dashboard.episode import episode_answer, read_reading, read_tokens
from palestra.dashboard.progress import describe_run, read_columns, read_settings
from palestra.dashboard.runs import runs_of
from palestra.dashboard.steps import find_episodes, read_events_before, read_group, read_step
from palestra.disk import RUN_LOCK
from palestra.errors import InvalidRequest, NotFound, StoreError
from palestra.renderers import ByteTokenizer
from palestra.store import calls as store_calls
from palestra.store.browsing import browse
from palestra.store.calls import TrainedCall, read_trajectory
from palestra.store.lifecycle import EpisodeEnd
from palestra.store.search import EpisodeFilter
from palestra.types.calls import MEANINGS, ForkReason
from palestra.types.messages import ChatMessage, ImagePart, TextPart
from palestra.types.records import Task
from palestra.types.states import GroupState
from unit.building import FakeClock, make_train_batch, open_store
from unit.dashboard.recorded import REWARDS, VERSION, calls_of, config, nan_equal, record

pytestmark = pytest.mark.ci

MODES = ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"]


async def test_a_run_says_how_far_it_is(tmp_path):
    found = describe_run(await record(tmp_path))
    assert (found.state, found.step, found.steps, found.reward) == ("completed", 5, 8, 5 / 8)
    assert (found.seconds_per_step, found.seconds_left) == (9.0, None)
    assert found.episodes == {"train": {"completed": 9}, "validation": {"registered": 1}}
    assert found.models == {"policy": config().policies["policy"].model}


async def test_metrics_are_columns_with_units_and_the_newest_event(tmp_path):
    run = await record(tmp_path)
    found = read_columns(run, -1)
    assert found.columns["step"] == [4.0, 5.0]
    assert found.columns["train/reward_mean"] == [0.5, 0.625]
    assert found.columns["train/own_metric"] == [1.5, 1.5]
    assert found.units["train/reward_mean"] == "reward"
    assert "train/own_metric" not in found.formulas
    assert found.last_event == read_events_before(run, None, 10).events[0].event_id
    assert read_columns(run, 4).columns["step"] == [5.0]


async def test_settings_name_the_keys_that_differ_from_their_defaults(tmp_path):
    run = await record(tmp_path, policies={"writer": {"sampling": {"max_tokens": 7}}})
    found = read_settings(run)
    assert {"name", "steps", "engine.kind", "policies.writer.sampling.max_tokens"} <= set(found.changed)
    assert "policies.writer.sampling.temperature" not in found.changed
    assert "rollout.group_size" not in found.changed


async def test_a_step_has_its_groups_its_batch_and_what_was_left_out(tmp_path):
    run = await record(tmp_path)
    found = read_step(run, 5)
    assert found.versions == {"policy": "0.4"}
    assert len(found.batch) == 9
    assert [group.task_id for group in found.groups] == ["task-0", "task-1", "task-2"]
    assert {g.group_index: tuple(e.reward for e in g.episodes) for g in found.groups} == REWARDS
    assert [event.kind for event in found.events] == ["episode_untrainable"]
    assert [group.task_id for group in found.validation] == ["held-out"]
    assert read_step(run, 7).groups == []
    with pytest.raises(NotFound):
        read_step(run, 9)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
async def test_advantage_and_weight_of_each_token_are_those_that_the_learner_trains_with(tmp_path, mode):
    run = await record(tmp_path, algorithm={"loss_agg_mode": mode})
    names = read_step(run, 5).batch
    with browse(tmp_path / "run.db") as connection:
        batch = [read_trajectory(connection, name) for name in names]
    settings = config(algorithm={"loss_agg_mode": mode})
    trained = make_train_batch(batch, settings.algorithm, settings.policies["policy"].sampling.max_tokens, VERSION)
    looked_at = 0
    for name in names:
        reading = read_reading(run, name)
        rows = [row for row in trained.samples if row.episode_id == name]
        for number, row in enumerate(reading.rows):
            tokens = read_tokens(run, reading, number, 0, 1000)
            assert tokens.ids == row.ids.tolist()
            assert nan_equal(tokens.logprobs, row.logprobs)
            if not rows:
                assert set(tokens.advantages) == {None}
                continue
            (same,) = [one for one in rows if np.array_equal(one.ids, row.ids)]
            assert nan_equal(tokens.advantages, np.where(same.loss_mask, same.advantages, np.nan))
            assert nan_equal(tokens.weights, np.where(same.loss_mask, same.loss_weights, np.nan))
            looked_at += 1
    assert looked_at == len(trained.samples) == 8


async def test_tokens_have_text_version_temperature_and_a_reason_in_words(tmp_path):
    run = await record(tmp_path)
    reading = read_reading(run, "train-000000-00")
    found = read_tokens(run, reading, 0, 0, 1000)
    first, second = calls_of(0, 0)
    assert found.ids == second.ids.tolist()
    assert found.texts == [ByteTokenizer().decode([token]) for token in found.ids]
    sampled = [place for place, call in enumerate(found.calls) if call >= 0]
    assert [found.calls[place] for place in sampled] == [0, 0, 1, 1, 1]
    assert [found.version_names[found.versions[place]] for place in sampled] == ["0.0", "0.0", "0.3", "0.4", "0.4"]
    assert [found.temperatures[place] for place in sampled] == [1.0] * 5
    assert found.trained == [call >= 0 for call in found.calls]
    assert "prompt" in found.fate_texts[found.fates[0]]
    assert found.fate_texts[found.fates[3]] == "trained in step 5; rewards of its group: 0, 1, 0.5"
    assert first.prompt_tokens == 3


async def test_tokens_have_their_logprob_when_they_were_trained_and_the_ratio(tmp_path):
    run = await record(tmp_path)
    first, second = calls_of(0, 0)
    moved = {0: first.logprobs + np.float32(0.25), 1: second.logprobs - np.float32(0.5)}
    moved[1][1] = np.nan  # a token that was not trained
    calls = [
        TrainedCall(episode_id=first.episode_id, index=chat.index, start=chat.prompt_tokens, logprobs=moved[chat.index])
        for chat in (first, second)
    ]
    before = read_tokens(run, read_reading(run, first.episode_id), 0, 0, 1000)
    assert set(before.trained_logprobs) == set(before.ratios) == {None}
    assert "when it was trained are not recorded" in before.notes[-1]
    with open_store(tmp_path) as store:
        await store.trained.record(5, calls)
    found = read_tokens(run, read_reading(run, first.episode_id), 0, 0, 1000)
    wanted = np.full(len(found.ids), np.nan)
    for chat in (first, second):
        wanted[chat.prompt_tokens : chat.prompt_tokens + len(chat.completion_ids)] = moved[chat.index]
    assert nan_equal(found.trained_logprobs, wanted)
    sampled = [place for place, call in enumerate(found.calls) if call >= 0]
    assert [found.calls[place] for place in sampled] == [0, 0, 1, 1, 1]
    assert [found.ratios[place] for place in sampled] == pytest.approx(
        [np.exp(0.25), np.exp(0.25), np.exp(-0.5), None, np.exp(-0.5)]
    )
    assert not [note for note in found.notes if "are not recorded" in note]


async def test_pages_of_tokens_are_the_whole(tmp_path):
    run = await record(tmp_path)
    reading = read_reading(run, "train-000000-02")
    whole = read_tokens(run, reading, 0, 0, 1000)
    pages = [read_tokens(run, reading, 0, start, 2) for start in range(0, len(whole.ids) + 4, 2)]
    for column in (
        "ids",
        "texts",
        "logprobs",
        "trained_logprobs",
        "ratios",
        "advantages",
        "weights",
        "calls",
        "trained",
    ):
        assert [value for page in pages for value in getattr(page, column) or []] == getattr(whole, column)
    with pytest.raises(NotFound, match=r"row.*1"):
        read_tokens(run, reading, 1, 0, 10)


async def test_what_is_not_trained_says_why(tmp_path):
    run = await record(tmp_path)

    def why(name: str) -> str:
        return episode_answer(run, read_reading(run, name)).why

    assert "all rewards of its group are equal" in why("train-000001-00")
    assert "a logprob is not finite" in why("train-000002-02")
    assert "validation episode" in why("validation-000000-00")
    with pytest.raises(NotFound):
        read_reading(run, "train-000009-00")


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (GroupState.DROPPED, "its group was dropped and replaced"),
        (GroupState.SKIPPED, "there was nothing to compare in it"),
        (None, "it is in no batch yet"),
    ],
)
async def test_what_no_batch_will_ever_have_is_not_said_to_wait_for_one(tmp_path, state, why):
    run = await record(tmp_path)
    with open_store(tmp_path, FakeClock()) as store:
        await store.groups.register("train", 3, 6, Task(task_id="more", data={}), 2)
        first = await store.episodes.claim("w", "more0", None, "train-000003-00")
        await store.episodes.end(first.episode_id, first.fence, EpisodeEnd(rewards={"agent": 1.0}))
        second = await store.episodes.claim("w", "more1", None, "train-000003-01")
        await store.episodes.abort(second.episode_id, second.fence, "not_scored: None", True)
        if state is not None:
            await store.groups.settle("train", {3: state})
    found = {name: episode_answer(run, read_reading(run, name)).why for name in (first.episode_id, second.episode_id)}
    assert why in found[first.episode_id]
    assert found[second.episode_id] == "not trained: it was discarded (not_scored: None)"


@pytest.mark.parametrize(
    ("algorithm", "step_rewards", "learns"),
    [
        ({"credit": "step"}, [(1.0, 0.0), (0.0, 1.0), (0.5, 0.5)], True),
        ({"credit": "step"}, [(0.0, 1.0)] * 3, False),
        ({"name": "dapo", "overlong_share": 1.0}, None, False),  # equal outcomes, whatever the lengths
        ({"name": "rae"}, None, True),
        ({"entropy_coefficient": 0.1}, None, True),
        ({}, None, False),
    ],
)
async def test_equal_rewards_are_trained_where_the_learner_makes_rows_of_their_group(
    tmp_path, algorithm, step_rewards, learns
):
    run = await record(tmp_path, algorithm=algorithm, policies={"policy": {"sampling": {"max_tokens": 8}}})
    if step_rewards is not None:
        with sqlite3.connect(tmp_path / "run.db") as store:
            for sample, rewards in enumerate(step_rewards):
                changed = (json.dumps(rewards), f"train-000001-{sample:02d}")
                store.execute("UPDATE episodes SET step_rewards = ? WHERE episode_id = ?", changed)
    settings = config(algorithm=algorithm)
    with browse(tmp_path / "run.db") as connection:
        group = [read_trajectory(connection, f"train-000001-{sample:02d}") for sample in range(3)]
    assert bool(make_train_batch(group, settings.algorithm, 8, VERSION).samples) is learns  # what the learner does
    reading = read_reading(run, "train-000001-00")
    answer = episode_answer(run, reading)
    assert answer.trained is learns
    assert ("all rewards of its group are equal" in answer.why) is not learns
    tokens = read_tokens(run, reading, 0, 0, 1000)
    assert tokens.trained == [learns and call >= 0 for call in tokens.calls]
    assert {member.trained for member in read_group(run, "train", 1).members} == {learns}


async def test_calls_of_a_worker_that_left_its_seat_are_not_shown_as_trained(tmp_path):
    run = await record(tmp_path)
    with sqlite3.connect(tmp_path / "run.db") as store:
        changed = (json.dumps({"unused_calls": [0]}), "train-000000-01")
        store.execute("UPDATE episodes SET facts = ? WHERE episode_id = ?", changed)
    found = episode_answer(run, read_reading(run, "train-000000-01"))
    assert [call.trained for call in found.calls] == [False, True]
    assert "left before it acted" in found.calls[0].why


async def test_calls_of_agents_that_are_not_trained_are_shown_with_the_setting(tmp_path):
    run = await record(tmp_path, rollout={"untrained_agents": ["agent*"]})
    found = episode_answer(run, read_reading(run, "train-000000-01"))
    assert [call.trained for call in found.calls] == [False, False]
    assert "rollout.untrained_agents" in found.calls[0].why


async def test_calls_that_a_final_branch_leaves_out_are_shown_with_the_reason(tmp_path):
    run = await record(tmp_path, algorithm={"train_on": "final-branch"})
    reading = read_reading(run, "train-000000-01")
    found = episode_answer(run, reading)
    assert [(call.index, call.trained) for call in found.calls] == [(0, False), (1, True)]
    assert "final-branch" in found.calls[0].why
    assert [(row.trained, row.sampled) for row in found.rows] == [(True, 3), (False, 3)]
    assert any("loss weight" in note for note in found.notes)


async def test_the_tree_of_calls_has_forks_with_their_reason(tmp_path):
    run = await record(tmp_path)
    straight = episode_answer(run, read_reading(run, "train-000000-00")).calls
    forked = episode_answer(run, read_reading(run, "train-000000-01")).calls
    assert [(call.after, call.reused) for call in straight] == [(None, 0), (0, 5)]
    assert [call.after for call in forked] == [None, None]
    assert forked[1].fork is not None
    assert forked[1].fork.text == MEANINGS[ForkReason.EDITED_MESSAGE]
    assert [part.text for part in forked[1].reply.content] == ["<b>B&C</b>"]


async def test_texts_and_images_of_a_message_are_in_order_and_its_texts_bounded_together(tmp_path):
    first, second = ImagePart(digest="ab" * 32), ImagePart(digest="cd" * 32)
    texts = [TextPart(text=text) for text in ("seen", "😀", "then", "at last")]
    content = (first, texts[0], texts[1], second, second, texts[2], first, texts[3])
    run = await record(tmp_path)
    with sqlite3.connect(tmp_path / "run.db") as store:
        stored = json.dumps([ChatMessage(role="user", content=content).model_dump(mode="json")])
        store.execute("UPDATE chats SET messages = ? WHERE episode_id = 'train-000000-00' AND idx = 0", (stored,))
    (message,) = episode_answer(run, read_reading(run, "train-000000-00"), 10).calls[0].messages
    assert [part.image or (part.text, part.cut) for part in message.content] == [
        first.digest,
        ("seen😀", 0),
        second.digest,
        second.digest,
        ("then", 0),
        first.digest,
        ("a", 6),
    ]


async def test_a_group_stands_side_by_side_with_advantages_that_add_up_to_nothing(tmp_path):
    run = await record(tmp_path)
    found = read_group(run, "train", 0)
    assert (found.step, found.task) == (5, {"question": "what is 0 + 0"})
    advantages = [member.advantage for member in found.members]
    assert sum(least for least, _ in advantages) == pytest.approx(0.0, abs=1e-5)
    assert advantages[1][0] > advantages[2][1] > -1e-6 > advantages[0][0]
    assert [member.reply for member in found.members] == ["ABC", "<b>B&C</b>", "ABC"]
    assert [member.advantage for member in read_group(run, "train", 1).members] == [(0.0, 0.0)] * 3


async def test_an_algorithm_of_the_users_own_is_not_run(tmp_path):
    run = await record(tmp_path, algorithm={"name": "mine:Own"})
    reading = read_reading(run, "train-000000-00")
    assert set(read_tokens(run, reading, 0, 0, 99).advantages) == {None}
    assert "not run here" in episode_answer(run, reading).notes[0]


@pytest.mark.parametrize(
    ("name", "why"), [("ppo", "more than the episodes of the group"), ("reinforce_pp", "more than")]
)
async def test_advantages_that_the_group_alone_does_not_give_are_not_shown(tmp_path, name, why):
    run = await record(tmp_path, algorithm={"name": name})
    reading = read_reading(run, "train-000001-00")
    assert reading.fates.episode.trained, "equal rewards are no reason against training here"
    assert set(read_tokens(run, reading, 0, 0, 99).advantages) == {None}
    assert why in episode_answer(run, reading).notes[0]


# Searches


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ({"least_reward": 1.0}, ["02-01", "01-02", "01-01", "01-00", "00-01"]),
        ({"least_reward": -2.0, "most_reward": 0.25}, ["02-02", "02-00", "00-00"]),
        ({"least_tokens": 7}, ["02-02", "01-02", "00-02"]),
        ({"termination": "max_steps"}, ["02-02", "01-02", "00-02"]),
        ({"text": "WHAT IS 1"}, ["01-02", "01-01", "01-00"]),
        ({"text": "<b>B&C", "group": 0}, ["00-01"]),
        ({"text": "%"}, []),
        ({"forked": True}, ["02-01", "01-01", "00-01"]),
        ({"step": 5, "most_tokens": 5}, ["02-00", "01-00", "00-00"]),
        ({"step": 6}, []),
        ({"tool": "search"}, []),
        ({"state": "discarded"}, []),
    ],
)
async def test_a_search_finds_what_fits_newest_first(tmp_path, wanted, names):
    run = await record(tmp_path)
    found = find_episodes(run, EpisodeFilter(**wanted), None, 50)
    assert [line.episode_id[-5:] for line in found.episodes] == names
    assert found.following is None


async def test_a_search_in_a_long_line_of_one_character_takes_no_longer_than_reading_it(tmp_path):
    run = await record(tmp_path)
    long = orjson.dumps([{"role": "user", "content": "A" * 4_000_000}]).decode()
    with sqlite3.connect(tmp_path / "run.db") as connection:
        connection.execute("UPDATE chats SET messages = ? WHERE episode_id = 'train-000000-00' AND idx = 0", (long,))
    began = time.process_time()
    assert find_episodes(run, EpisodeFilter(text="a" * 400 + "b"), None, 50).episodes == []
    assert time.process_time() - began < 2.0, "LIKE takes about five seconds"
    (found,) = find_episodes(run, EpisodeFilter(text="a" * 400), None, 50).episodes
    assert found.episode_id == "train-000000-00"


@pytest.mark.parametrize("text", ["100%", "a_b", "Äpfel", "\\", '"', "\n", "\0"])
async def test_a_search_takes_every_character_as_it_is(tmp_path, text):
    run = await record(tmp_path)
    for name, content in (("train-000000-00", f"x{text}y"), ("train-000000-01", "100 axb apfel n 0")):
        messages = orjson.dumps([{"role": "user", "content": content}]).decode()
        with sqlite3.connect(tmp_path / "run.db") as connection:
            connection.execute("UPDATE chats SET messages = ? WHERE episode_id = ? AND idx = 0", (messages, name))
    found = find_episodes(run, EpisodeFilter(text=text), None, 50).episodes
    assert [one.episode_id for one in found] == ["train-000000-00"]


async def test_pages_of_a_search_are_the_whole_without_doubles(tmp_path):
    run = await record(tmp_path)
    seen, before = [], None
    while True:
        page = find_episodes(run, EpisodeFilter(), before, 2)
        seen += [line.episode_id for line in page.episodes]
        if (before := page.following) is None:
            break
    assert seen == sorted(seen, reverse=True)
    assert len(seen) == len(set(seen)) == 9
    with pytest.raises(InvalidRequest):
        find_episodes(run, EpisodeFilter(), "x", 2)


# Bad input


async def test_a_folder_that_is_no_run_is_refused_in_one_line(tmp_path):
    with pytest.raises(NotFound, match=r"no run\.db"):
        runs_of([tmp_path])


async def test_runs_have_names_of_their_own_for_addresses(tmp_path):
    folders = [tmp_path / "a" / "ré n/../run", tmp_path / "b" / "run"]
    for folder in (tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "a" / "ré n"):
        folder.mkdir(parents=True)
    for folder in folders:
        await record(folder)
    runs = runs_of([*folders, folders[0]])
    assert [run.name for run in runs] == ["run", "run-2"]


def change(folder, statement: str) -> None:
    with sqlite3.connect(folder / "run.db") as connection:
        connection.execute(statement)
    connection.close()


async def test_a_run_of_another_version_and_a_damaged_file_say_so_in_their_line(tmp_path):
    run = await record(tmp_path)
    change(tmp_path, "PRAGMA user_version = 99")
    found = describe_run(run)
    assert found.state == "unreadable"
    assert "another version" in (found.reason or "")
    (tmp_path / "run.db").write_bytes(b"rubbish " * 1000)
    for name in ("run.db-wal", "run.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    assert "damaged" in (describe_run(run).reason or "")


async def test_a_damaged_episode_shows_as_damaged_and_the_rest_is_there(tmp_path):
    run = await record(tmp_path)
    change(tmp_path, "UPDATE episodes SET rewards = '{rubbish' WHERE episode_id = 'train-000000-01'")
    change(tmp_path, "UPDATE chats SET completion = x'00' WHERE episode_id = 'train-000002-00'")
    lines = {line.episode_id[-5:]: line for line in find_episodes(run, EpisodeFilter(), None, 50).episodes}
    assert len(lines) == 9
    assert lines["00-01"].damaged is not None
    assert (lines["00-02"].damaged, lines["00-02"].reward) == (None, 0.5)
    assert [line.damaged is not None for line in read_step(run, 5).groups[0].episodes] == [False, True, False]
    members = read_group(run, "train", 2).members
    assert "can't be read" in members[0].why
    assert members[1].reply == "<b>B&C</b>"
    with pytest.raises(StoreError, match="damaged"):
        read_reading(run, "train-000002-00")


async def test_of_a_reply_with_very_many_tool_calls_the_first_are_sent_and_the_rest_is_counted(tmp_path):
    run = await record(tmp_path)
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in range(1000)]
    reply = orjson.dumps({"role": "assistant", "content": "", "tool_calls": calls}).decode()
    with sqlite3.connect(tmp_path / "run.db") as connection:
        connection.execute("UPDATE chats SET reply = ? WHERE episode_id = 'train-000000-00' AND idx = 1", (reply,))
    found = episode_answer(run, read_reading(run, "train-000000-00")).calls[1].reply
    assert [len(found.tool_calls), found.tool_calls_cut] == [200, 800]
    again = read_call(run, "train-000000-00", 1)
    assert len(again.messages[-1]["tool_calls"]) == 200
    assert "800 of its tool calls are left out" in again.notes[0]


async def test_of_very_long_metadata_and_tasks_the_values_that_fit_are_sent_and_the_rest_is_counted(tmp_path):
    run = await record(tmp_path)
    long = {"termination": "done", "log": "x" * 10**6, "score": 2}
    with sqlite3.connect(tmp_path / "run.db") as connection:
        connection.execute("UPDATE episodes SET metadata = ?, task_data = ?", (orjson.dumps(long).decode(),) * 2)
    found = episode_answer(run, read_reading(run, "train-000000-00"))
    group = read_group(run, "train", 0)
    assert found.metadata == found.task == group.task == {"termination": "done", "score": 2}
    assert found.metadata_cut == found.task_cut == group.task_cut == len(orjson.dumps({"log": long["log"]}))
    assert len(found.model_dump_json()) < 30_000


async def test_the_calls_of_a_group_are_read_once(tmp_path, monkeypatch):
    run = await record(tmp_path)
    reads = []
    real = store_calls.chat_of
    monkeypatch.setattr(store_calls, "chat_of", lambda row, before: reads.append(row) or real(row, before))
    assert len(read_group(run, "train", 0).members) == 3
    assert len(reads) == 6


async def test_an_episode_with_tools_of_another_form_is_shown(tmp_path):
    run = await record(tmp_path)
    with sqlite3.connect(run.folder / "run.db") as connection:  # a run of before could record such tools
        name = connection.execute("SELECT episode_id FROM chats").fetchone()[0]
        tools = '[{"type": "function", "function": "x"}, {"function": {"name": {"a": 1}}}, {"name": "plain"}]'
        connection.execute("UPDATE chats SET tools = ? WHERE episode_id = ?", (tools, name))
    found = episode_answer(run, read_reading(run, name))
    assert found.calls[0].tools == ["?", "{'a': 1}", "plain"]


@pytest.mark.parametrize(("changes", "left"), [({}, 3 * 10.0), ({"token_budget": 600}, 1 * 10.0)])
async def test_the_time_left_of_a_run_in_another_process_has_its_evaluations_and_its_token_budget(
    tmp_path, changes, left
):
    run = await record(tmp_path, **changes)
    with open_store(tmp_path) as store:
        await store.log.add_event("running", {"step": 5})
        for step in (4, 5):  # 2 seconds of each ten are the step's own
            row = {"step": float(step), "time/step_seconds": 2.0, "wall_seconds": 10.0 * step}
            await store.log.put_metrics(step, row | {"rollout/sampled_tokens": 100.0 * step})
    assert describe_run(run).seconds_left is None  # no process runs it
    with (tmp_path / RUN_LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = describe_run(replace(run))  # which has not asked for the lock yet
    assert (found.state, found.seconds_per_step) == ("running", 2.0)
    assert found.seconds_left == pytest.approx(left)
