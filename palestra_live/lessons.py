"""What users give besides scores: an edited reply is imitated (SFT), and one of two replies is preferred (DPO).

Both become episodes of the algorithm `live`, whose baseline makes the advantage that its policy gradient needs. A given
reply has the logprobs of the weights before the step, as if it had been sampled now, so its gradient is that of the
loss itself: of -log pi for an edit; for a pair, that of `palestra.algorithms.preference.DPO`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jinja2 import TemplateError

from palestra.learner import OpenRun
from palestra.renderers import shown_reply
from palestra.tokens import TokenTrie, rows_of
from palestra.types.calls import Chat, Floats, Ids, PolicyVersion, SamplingParams, VersionSpan
from palestra.types.messages import text_message
from palestra.types.records import SOLE_AGENT, RecordedEpisode, Task
from palestra_live.feedback import Lessons
from palestra_live.learning import BASELINE

log = logging.getLogger("palestra.live")
BETA = 0.1  # of DPO


def session_episode(row: Mapping[str, Any], reward: float, baseline: float, calls: Sequence[Chat]) -> RecordedEpisode:
    """Return an episode of a session (`row` of the store) that is trained; its advantage is reward minus baseline."""
    data = {"session": row["session_id"], "cluster": row["cluster"], BASELINE: baseline}
    return RecordedEpisode(
        task=Task(task_id=row["session_id"], data=data),
        rewards={SOLE_AGENT: reward},
        metadata={"session": row["session_id"]},
        calls=tuple(calls),
    )


async def lesson_episodes(
    run: OpenRun, policy: str, version: PolicyVersion, row: Mapping[str, Any], chats: Sequence[Chat], lessons: Lessons
) -> list[RecordedEpisode]:
    """Return the episodes of a session's edits and comparisons: one for an edit, and two for a comparison.

    `version` is that of the trainer's weights. Left out are edits that do not fit, and pairs of different prompts.
    """
    calls, runtime = {chat.index: chat for chat in chats}, run.policies.runtime(policy)
    edited: list[Chat] = []
    for number, text in lessons.edits.items():
        chat = chats[-1] if number is None else calls.get(number)
        ids = None if chat is None or chat.is_raw else _shown(runtime.renderer, text)
        if chat is None or ids is None or chat.prompt_tokens + len(ids) > runtime.config.max_context:
            log.warning("an edit of session %s is not trained: no reply can have its tokens", row["session_id"])
            continue
        sampling = SamplingParams(temperature=1.0, max_tokens=len(ids), seed=0)
        said = replace(chat, reply=text_message("assistant", text), completion_ids=ids, sampling=sampling)
        edited.append(_given(said, policy, version))
    pairs = [
        (_given(calls[better], policy, version), _given(calls[worse], policy, version))
        for better, worse in lessons.pairs
        if {better, worse} <= calls.keys() and np.array_equal(calls[better].prompt_ids, calls[worse].prompt_ids)
    ]
    given = [*edited, *(chat for pair in pairs for chat in pair)]
    if not given:
        return []
    now = await _logprobs(run, policy, given)
    found = [
        session_episode(row, 1.0, 0.0, [replace(chat, logprobs=own)]) for chat, own in zip(edited, now, strict=False)
    ]
    for place, pair in enumerate(pairs):
        owns = now[len(edited) + 2 * place :][:2]
        # The reference is what sampled the replies. DPO has sums over tokens, and a mean over pairs, not replies.
        better, worse = (float((own - chat.logprobs).sum()) for chat, own in zip(pair, owns, strict=True))
        weight = BETA / (1.0 + math.exp(min(BETA * (better - worse), 700.0)))
        for reward, chat, own in zip((1.0, 0.0), pair, owns, strict=True):
            advantage = (4 * reward - 2) * weight * len(own)
            found.append(session_episode(row, reward, reward - advantage, [replace(chat, logprobs=own)]))
    return found


def _shown(renderer: Any, text: str) -> Ids | None:
    """Return the ids of a reply as the format shows it; None: it can't."""
    asked = (text_message("user", "x"),)  # what comes before does not change them
    try:
        return shown_reply(renderer, renderer.render(asked).ids, asked, text_message("assistant", text), ())
    except (ValueError, KeyError, TemplateError):
        return None


def _given(chat: Chat, policy: str, version: PolicyVersion) -> Chat:
    """Return a call by itself, as if these weights had made it."""
    prompt: dict[str, Any] = {"new_messages": chat.messages, "prompt_tail": chat.prompt_ids, "media": chat.all_media}
    spans = (VersionSpan(version, len(chat.completion_ids)),)
    return replace(chat, policy=policy, versions=spans, **prompt, **_ALONE)


_ALONE: dict[str, Any] = dict.fromkeys(("fence", "index", "time_step", "shared", "shared_messages"), 0)
_ALONE |= {"parent": None, "fork": None, "stop": None, "finish_reason": "stop"}


async def _logprobs(run: OpenRun, policy: str, chats: Sequence[Chat]) -> list[Floats]:
    """Return the logprobs of replies under the trainer's weights."""
    assert run.trainer is not None
    rows = [
        rows_of(TokenTrie([replace(chat, logprobs=np.zeros(len(chat.completion_ids), np.float32))]))[0]
        for chat in chats
    ]
    found = (await run.trainer.forward(policy, rows, {"old_logprobs"}))["old_logprobs"]
    return [column[row.loss_mask].astype(np.float32) for row, column in zip(rows, found, strict=True)]
