"""A recorded run in a folder: a batch of three groups, what was left out of it, and what it was made of."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from palestra.config import JobConfig, dump_config, parse_config
from palestra.dashboard.runs import Run
from palestra.renderers.model_layouts import FixedLayout, PatchLayout
from palestra.renderers.picture_layout import TiledLayout, layout_fact, write_layout
from palestra.store import RunStore
from palestra.store.lifecycle import EpisodeEnd
from palestra.types.calls import Chat, Fork, ForkReason, PolicyVersion, VersionSpan
from palestra.types.messages import text_message
from palestra.types.records import BatchManifest, Task
from unit.building import FakeClock, make_chat, open_store

REWARDS = {0: (0.0, 1.0, 0.5), 1: (1.0, 1.0, 1.0), 2: (0.25, 2.0, -1.0)}
VERSION = PolicyVersion(0, 4)


def config(**changes: Any) -> JobConfig:
    base: dict[str, Any] = {"name": "recorded", "steps": 8, "engine": {"kind": "fake"}}
    return parse_config(base | changes)


def logprobs(group: int, sample: int, count: int) -> list[float]:
    """Numbers that differ from token to token, and are exact in float32."""
    return [-(group + 1) / 4 - sample / 8 - place / 16 for place in range(count)]


def calls_of(group: int, sample: int) -> list[Chat]:
    """Two calls: the second goes on from the first, or has forked from it."""
    name = f"train-{group:06d}-{sample:02d}"
    count = 2 + sample
    first = make_chat(
        name, prompt=(97, 98, 99 + group), completion=range(110, 110 + count), logprobs=logprobs(group, sample, count)
    )
    versions = (VersionSpan(PolicyVersion(0, 3), 1), VersionSpan(PolicyVersion(0, 4), 2))
    more = {
        "logprobs": [-0.5, -0.25, -2.0],
        "versions": versions,
        "index": 1,
        "messages": (text_message("user", "go on"),),
    }
    if sample != 1:
        return [first, make_chat(name, parent=first, prompt=(33,), completion=(65, 66, 67), reply="ABC", **more)]
    fork = Fork(reason=ForkReason.EDITED_MESSAGE, call=0, message=1, position=2)
    return [first, make_chat(name, prompt=(97, 98, 50), completion=(65, 66, 67), reply="<b>B&C</b>", fork=fork, **more)]


PICTURE = bytes.fromhex(  # one red pixel
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8cfc0000003010100c9fe92ef"
    "0000000049454e44ae426082"
)
PICTURE_DIGEST = hashlib.sha256(PICTURE).hexdigest()
LAYOUTS = {
    "policy": TiledLayout(tokens=4, tile=32, longest=64, splits=True),
    "llava": FixedLayout(tokens=16, side=32, patch=8, shorter=32),
    "qwen": PatchLayout(side=28, least=56 * 56, most=1_003_520),
    # The first brings every picture to many pixels and cuts 32 x 32 of them out
    "narrowing": FixedLayout(tokens=16, side=32, patch=8, shorter=5000),
    "enlarging": PatchLayout(side=28, least=1 << 40, most=1 << 41),
}


async def record(folder: Path, **changes: Any) -> Run:
    """Write the run, as a learner and its workers would."""
    (folder / "config.toml").write_text(dump_config(config(**changes)))
    with open_store(folder, FakeClock()) as store:
        await _record(store)
        assert store.pictures.keep(PICTURE) == PICTURE_DIGEST
        for policy, layout in LAYOUTS.items():
            noted = write_layout(layout)
            assert noted is not None
            await store.log.set_fact(layout_fact(policy), noted)
    return Run(name="recorded", folder=folder)


async def _record(store: RunStore) -> None:
    for group, rewards in REWARDS.items():
        task = Task(task_id=f"task-{group}", data={"question": f"what is {group} + {group}"})
        await store.groups.register("train", group, 5, task, len(rewards))
        for sample, reward in enumerate(rewards):
            name = f"train-{group:06d}-{sample:02d}"
            claimed = await store.episodes.claim("w", f"r{group}{sample}", None)
            assert claimed is not None
            assert claimed.episode_id == name
            for chat in calls_of(group, sample):
                await store.calls.append(chat)
            facts = {"termination": "max_steps" if sample == 2 else "done"}
            await store.episodes.end(name, 1, EpisodeEnd(rewards={"agent": reward}, facts=facts))
    await store.groups.register("validation", 0, 5, Task(task_id="held-out", data={}), 1)
    await store.log.commit_manifest(
        BatchManifest(
            step=5,
            versions={"policy": VERSION},
            episode_ids=tuple(f"train-{g:06d}-{s:02d}" for g, rewards in REWARDS.items() for s in range(len(rewards))),
            seed=0,
            config_digest="d",
        )
    )
    for step in (4, 5):
        row = {"step": float(step), "train/reward_mean": step / 8, "time/step_seconds": 2.0 * step}
        await store.log.put_metrics(step, row | {"wall_seconds": 10.0 * step, "train/own_metric": 1.5})
    reason = "a logprob is not finite"
    await store.log.add_event("episode_untrainable", {"step": 5, "episode_id": "train-000002-02", "reason": reason})
    await store.log.add_event("completed", {"step": 5})


def nan_equal(found: list[float | None], wanted: np.ndarray) -> bool:
    """Whether numbers of an answer are those of an array, with None for NaN, to the digits of a float32."""
    numbers = [np.nan if value is None else value for value in found]
    return bool(np.allclose(numbers, wanted, rtol=1e-6, atol=0.0, equal_nan=True))


async def allowed() -> None:
    """The check of a key that stays good."""
