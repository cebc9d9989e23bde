"""The verifier: runs a task's tests when the agent has ended, and reads the rewards that they write."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from palestra.envs.rewards import checked_names
from palestra.errors import InvalidEnvironment, PayloadTooLarge
from palestra.sandbox import Finished, Sandbox
from palestra.threads import in_thread
from palestra_worlds.harbor.boxes import (
    LOGS,
    BoxRules,
    Spoiled,
    copy_artifacts,
    opened,
    run_script,
    script,
    shown,
    upload_files,
    user_of,
    verifier_spec,
)
from palestra_worlds.harbor.task import HarborTask, resolved

MAX_REWARD_BYTES = 2**16
_MAX_LOG_BYTES = 2**24  # of all that a verifier leaves beside its rewards
_MAX_SHOWN = 2_000  # characters of a verifier's output


@dataclass(frozen=True, kw_only=True)
class VerifierResult:
    """What a verifier found: rewards by name, and the end of its output, for people."""

    rewards: Mapping[str, float]
    output: str

    @property
    def total(self) -> float:
        """Return the reward named `reward`, which the format has for tasks with one; else the mean of all."""
        return self.rewards.get("reward", sum(self.rewards.values()) / len(self.rewards))


async def verify(task: HarborTask, box: Sandbox, rules: BoxRules) -> VerifierResult:
    """Run a task's verifier, in the agent's box or in one of its own, after the end of all processes of the agent.

    Args:
        task: the task.
        box: the agent's.
        rules: what the job allows.

    Raises:
        Spoiled: there is no reward, and what the agent has left may be the reason: the verifier wrote none, or one that
            can't be read, or took too long.
        EnvironmentFailed: the agent can't be the reason: the verifier's own box does not open, say.
        EpisodeForfeited: the agent has broken its box.
    """
    await box.stop_processes()
    spec = verifier_spec(task, rules)
    found = task.verifier_box
    if spec is None or found is None:
        # The agent may have written both folders.
        await script(box, f"rm -rf /tests {LOGS} && mkdir -p {LOGS} && chmod 777 {LOGS}")
        await upload_files(box, await in_thread(task.tests), "/tests")
        return await _verified(task, box, rules)
    async with opened(task, spec, rules, found[0].build_timeout_sec) as other:
        await copy_artifacts(task, box, other)
        if not found[2]:
            await upload_files(other, await in_thread(task.tests), "/tests")
        return await _verified(task, other, rules)


async def _verified(task: HarborTask, box: Sandbox, rules: BoxRules) -> VerifierResult:
    """Run the tests that are in a box, and read what they leave."""
    verifier = task.table.verifier
    done = await box.run(
        run_script("/tests/test.sh"),
        environment=resolved(verifier.env, rules.variables, f"task {task.name!r}: verifier.env"),
        user=user_of(verifier),
        seconds=verifier.timeout_sec,
    )
    if done.timed_out:
        raise Spoiled(f"task {task.name!r}: its verifier did not end in {verifier.timeout_sec:g} s")
    try:
        files = await box.get(LOGS, _MAX_LOG_BYTES)
    except PayloadTooLarge:
        raise Spoiled(
            f"task {task.name!r}: its verifier left more than {_MAX_LOG_BYTES >> 20} MiB, or too many files, in {LOGS}"
        ) from None
    try:
        return VerifierResult(rewards=read_rewards(files), output=shown(done)[-_MAX_SHOWN:])
    except ValueError as error:
        raise Spoiled(f"task {task.name!r}: {error}; {_how(done)}") from None


def read_rewards(files: Mapping[str, bytes]) -> dict[str, float]:
    """Return the rewards of `reward.json`, numbers by name, or else of `reward.txt`, one number named `reward`.

    Args:
        files: those of /logs/verifier, by relative path.

    Raises:
        ValueError: there is neither, or it has something else than finite numbers.
    """
    for name, parse in (("reward.json", _of_json), ("reward.txt", _of_text)):
        if (data := files.get(name)) is None:
            continue
        if len(data) > MAX_REWARD_BYTES:
            raise ValueError(f"its verifier wrote a {name} of more than {MAX_REWARD_BYTES >> 10} KiB")
        try:
            return {key: float(value or 0.0) for key, value in checked_names(parse(data.decode())).items()}
        except (ValueError, RecursionError, OverflowError, InvalidEnvironment) as error:
            raise ValueError(f"its verifier wrote a {name} that has no rewards: {str(error)[:200]}") from None
    raise ValueError("its verifier wrote no reward")


def _of_json(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"it is a {type(found).__name__}, and has to be numbers by name")
    for name, value in found.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name[:40]!r} is no finite number")
    return found


def _of_text(text: str) -> dict[str, float]:
    return {"reward": float(text)}


def _how(done: Finished) -> str:
    """Describe the end of a verifier in one line."""
    said = " ".join(shown(done).split())[-200:]
    return f"it ended with {done.code}" + (f": {said}" if said else " and said nothing")
