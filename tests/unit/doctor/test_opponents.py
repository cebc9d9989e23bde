"""Games that go wrong, and games that do not: what the doctor says of two opponents."""

from __future__ import annotations

import math
import random

import pytest

from palestra.config import parse_config
from palestra.doctor.examination import findings_of
from palestra.doctor.rule import JobSize
from palestra.doctor.store_facts import store_facts
from palestra.store.browsing import browse
from palestra.store.lifecycle import EpisodeEnd
from palestra.types.metrics import by_policy
from palestra.types.records import BatchManifest
from palestra_inspect.opponent_rules import TOGETHER
from unit.building import TASK, open_store
from unit.doctor.curves import run_of

GROUPS, GAMES = 16, 128
RIVALS = JobSize(groups_per_step=GROUPS, steps=100, rivals=True)
FRIENDS = JobSize(groups_per_step=GROUPS, steps=100)


def game(share: float, noise: random.Random, drawn: float = 0.2, bug: bool = False) -> dict[str, float]:
    """The facts of a step in which white has won `share` of the games that were not drawn; won 1, drawn 0.5, lost 0."""
    pairs = []
    for _ in range(GAMES):
        if noise.random() < drawn:
            pairs.append((0.5, 0.5))
        else:
            won = float(noise.random() < share)
            pairs.append((1.0, 1.0) if bug else (won, 1 - won))
    white, black = ([pair[side] for pair in pairs] for side in (0, 1))
    facts = {
        "store__episodes_of_two": float(GAMES),
        "store__constant_sum_share": sum(a + b == 1 for a, b in pairs) / GAMES,
        "store__reward_spread": 1.0,
        "store__reward_highest": 1.0,
        "store__reward_lowest": 0.0,
        "store__reward/white": sum(white) / GAMES,
        "store__reward/black": sum(black) / GAMES,
    }
    if len(set(white)) > 1 and len(set(black)) > 1:
        facts["store__reward_correlation"] = 1.0 if bug else -1.0
    return facts


def named(share, job: JobSize, seed: int = 0, steps: int = 60, **kw) -> dict[str, str]:
    noise = random.Random(seed)
    rows = run_of(steps, lambda step: game(share(step), noise, **kw), seed)
    return {one.code: one.seen for one in findings_of(rows, job)}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("job", [RIVALS, FRIENDS])
@pytest.mark.parametrize(
    "share",
    [
        lambda step: 0.5,
        lambda step: 0.5 + 0.3 * (1 - 0.95**step),  # one gets better than the other
        lambda step: 0.5 + 0.25 * math.sin(step / 6),  # the lead changes, by less than what is a sign
        lambda step: min(0.9, 0.5 + 0.01 * step),
    ],
)
def test_games_that_go_well_show_nothing(seed, job, share):
    assert named(share, job, seed) == {}


def test_two_that_are_paid_alike_are_named_where_both_learn():
    rise = {"share": lambda step: 0.5, "bug": True}
    said = named(job=RIVALS, **rise)
    assert set(said) == {"opponents_paid_alike"}
    assert "black and white earn goes up and down together (correlation 1.00)" in said["opponents_paid_alike"]
    assert "if they are meant to be opponents" in said["opponents_paid_alike"]  # they may be partners
    assert named(job=FRIENDS, **rise) == {}


def test_one_that_always_wins_is_named_where_both_learn():
    def share(step: int) -> float:
        return 0.5 if step < 20 else 1.0

    said = named(share, RIVALS, drawn=0.0)
    assert set(said) == {"opponents_collapse"}
    assert said["opponents_collapse"].startswith("white has won nearly every game of the last 10 steps (mean")
    assert named(share, FRIENDS, drawn=0.0) == {}  # to beat a frozen opponent is what was wanted
    assert "black has won" in named(lambda step: 1 - share(step), RIVALS, drawn=0.0)["opponents_collapse"]


def test_draws_and_late_losses_are_no_collapse():
    assert named(lambda step: 0.5, RIVALS, drawn=0.97) == {}
    assert named(lambda step: 1.0 if step % 9 else 0.8, RIVALS, drawn=0.0) == {}


@pytest.mark.parametrize("period", [6, 18])
def test_two_that_chase_each_other_are_named(period):
    def share(step: int) -> float:
        return 0.95 if step // (period // 2) % 2 else 0.05

    said = named(share, RIVALS, drawn=0.0)
    assert ("opponents_oscillate" in said) == (period == 6)  # of longer waves, fewer than four turns are in 24 steps
    assert named(share, FRIENDS, drawn=0.0) == {}


def few_games(share: float, noise: random.Random, games: int) -> dict[str, float]:
    """The facts of a step of few games, each won by one of the two: won 1, lost 0."""
    won = [float(noise.random() < share) for _ in range(games)]
    facts = game(0.5, noise) | {
        "store__episodes_of_two": float(games),
        "store__constant_sum_share": 1.0,
        "store__reward/white": sum(won) / games,
        "store__reward/black": 1 - sum(won) / games,
    }
    return facts | {"store__reward_correlation": -1.0}


@pytest.mark.parametrize(("groups", "games"), [(1, 16), (4, 32), (5, 40)])
def test_two_that_chase_each_other_are_named_where_a_step_has_few_groups(groups, games):
    """What is sure is decided by the number of games: of five groups, no difference could be four of their errors."""
    job, noise = JobSize(groups_per_step=groups, steps=100, rivals=True), random.Random(0)
    rows = run_of(60, lambda step: few_games(0.95 if step // 3 % 2 else 0.05, noise, games))
    assert "opponents_oscillate" in {one.code for one in findings_of(rows, job)}
    rows = run_of(60, lambda step: few_games(0.5, noise, games))
    assert "opponents_oscillate" not in {one.code for one in findings_of(rows, job)}


def flat(step: int) -> dict[str, float]:
    """Between two that learn: nothing has a trend, although weights move."""
    up = 1 if step % 2 else -1
    return {
        "train__reward_mean": 0.5 + 0.02 * up,
        "train__entropy": 1.0 + 0.03 * up,
        "rollout__completion_tokens": 128 * (40 + up),
    }


def test_a_reward_without_a_trend_is_no_idle_learning_rate_between_opponents():
    noise = random.Random(0)
    rows = run_of(60, lambda step: flat(step) | game(0.5, noise))
    assert "learning_rate_idle" in {one.code for one in findings_of(rows, FRIENDS)}
    assert findings_of(rows, RIVALS) == []
    assert findings_of(run_of(60, flat), RIVALS) == [], "of other games than those of two it is not known"
    stopped = run_of(
        60, lambda step: flat(step) | game(0.5, noise) | ({"train__learning_rate": 0.0} if step > 40 else {})
    )
    assert {one.code for one in findings_of(stopped, RIVALS)} == {"learning_rate_idle"}


def test_the_lead_of_the_other_is_no_collapse_of_the_reward():
    """A lead that turns once, and stays: what one has lost the other has won."""
    noise = random.Random(0)

    def turned(step: int) -> dict[str, float]:
        share = 0.8 if step < 30 else 0.2
        return game(share, noise, drawn=0.0) | {"train__reward_mean": share, "train__reward_std": 0.4}

    assert "reward_collapse" in {one.code for one in findings_of(run_of(60, turned), FRIENDS)}
    assert findings_of(run_of(60, turned), RIVALS) == []


def test_partners_whose_reward_collapses_are_named_where_both_are_trained():
    noise = random.Random(0)

    def broken(step: int) -> dict[str, float]:
        facts = game(0.5, noise, bug=True)
        return facts | ({"train__reward_mean": 0.05, "train__reward_std": 0.1} if step > 40 else {})

    assert {one.code for one in findings_of(run_of(60, broken), RIVALS)} == {"reward_collapse", "opponents_paid_alike"}


@pytest.mark.parametrize("job", [RIVALS, FRIENDS])
def test_partners_who_fail_at_first_and_then_succeed_are_no_opponents_that_rise(job):
    noise = random.Random(0)

    def together(step: int) -> dict[str, float]:
        won = sum(noise.random() < max(0.0, (step - 5) / 60) for _ in range(GAMES)) / GAMES
        spread = float(won > 0)
        facts = {
            "store__episodes_of_two": float(GAMES),
            "store__constant_sum_share": max(won, 1 - won),
            "store__reward_spread": spread,
            "store__reward_highest": spread,
            "store__reward_lowest": 0.0,
            "store__reward/white": won,
            "store__reward/black": won,
        }
        return facts | ({"store__reward_correlation": 1.0} if spread else {})

    said = {one.code: one for one in findings_of(run_of(60, together), job)}
    assert set(said) == ({"opponents_paid_alike"} if job is RIVALS else set())
    assert all("if they play together, this is as it should be" in one.means for one in said.values())


def test_where_several_policies_are_trained_each_has_its_signs_and_the_job_has_those_of_the_game():
    config = parse_config({"policies": {"white": {}, "black": {}}, "roles": {"opponent": "black"}, "steps": 100})
    noise, rows = random.Random(0), []
    for row in run_of(60):
        facts = game(0.5 if row["step"] < 20 else 1.0, noise, drawn=0.0)
        own = by_policy(row, "white") | by_policy(row, "black")
        named = {name.replace("__", "/"): value for name, value in facts.items()}
        rows.append(own | named | {"black/train/grad_norm": 0.0})
    found = {one.code: one for one in findings_of(rows, JobSize.of(config), config.players.rivals)}
    assert set(found) == {"opponents_collapse", "no_gradient"}
    assert found["no_gradient"].policy == "black"
    assert found["opponents_collapse"].seen.startswith("white has won")


def test_steps_without_an_episode_of_a_policy_are_none_of_its_own_and_still_count_for_the_game():
    """White and black take turns: in the steps of the other each has trained no episode."""
    config = parse_config({"policies": {"white": {}, "black": {}}, "roles": {"opponent": "black"}, "steps": 100})
    noise, whole, in_turns = random.Random(0), [], []
    for row in run_of(60):
        facts = game(0.5 if row["step"] < 20 else 1.0, noise, drawn=0.0)
        named = {name.replace("__", "/"): value for name, value in facts.items()}
        own = {name: by_policy(row, name) for name in ("white", "black")}
        whole.append(own["white"] | own["black"] | named)
        waits = "white" if row["step"] % 2 else "black"
        # What a policy that is not due reports: no episodes, and signs of trouble, if anyone read them.
        idle = {f"{waits}/train/episodes": 0.0, f"{waits}/train/grad_norm": 0.0, f"{waits}/train/updates_skipped": 9.0}
        in_turns.append(whole[-1] | idle)
    size, rivals = JobSize.of(config), config.players.rivals
    (expected,) = findings_of(whole, size, rivals)
    assert findings_of(in_turns, size, rivals) == [expected]
    assert (expected.code, expected.policy) == ("opponents_collapse", "")
    never = [row | {"white/train/episodes": 0.0, "white/train/updates_skipped": 9.0} for row in whole]
    assert findings_of(never, size, rivals) == [expected]
    neither = [row | {"white/train/episodes": 0.0, "black/train/episodes": 0.0} for row in whole]
    assert findings_of(neither, size, rivals) == []


async def test_the_correlation_is_that_of_the_episodes_rewards(tmp_path):
    with open_store(tmp_path) as store:
        for step, pairs in ((1, [(1, 0), (0, 1), (0.5, 0.5)]), (2, [(1, 1), (0, 0)]), (3, [(1, 0), (1, 0)])):
            await store.groups.register("train", step, step, TASK, len(pairs))
            for number, (agent, opponent) in enumerate(pairs):
                episode = await store.episodes.claim("w", f"{step}-{number}", None)
                rewards = {"agent": float(agent), "opponent": float(opponent)}
                await store.episodes.end(episode.episode_id, episode.fence, EpisodeEnd(rewards=rewards))
            names = tuple(f"train-{step:06d}-{number:02d}" for number in range(len(pairs)))
            await store.log.commit_manifest(
                BatchManifest(step=step, versions={}, episode_ids=names, seed=0, config_digest="d")
            )
    with browse(next(tmp_path.rglob("run.db"))) as connection:
        facts = store_facts(connection)
    assert [facts[step].get(TOGETHER) for step in (1, 2, 3)] == [pytest.approx(-1), pytest.approx(1), None]
    assert (facts[1]["store/reward_highest"], facts[1]["store/reward_lowest"]) == (1.0, 0.0)
