"""Versions of a run against one another, by the real engine: every pair, both seatings, the same again by seed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import safetensors.torch
from test_two_policies import TASKS, Talk, config, other_model, score  # noqa: F401 - a fixture

import palestra
import palestra_lab
from palestra import JobConfig, RolloutSpec
from palestra.errors import ConfigError, NotFound
from palestra.types.messages import text_message
from palestra_lab.matrix.play import versions_of


class Duel(Talk):
    """Both say something; whose text has the larger hash wins 1, the other loses 1."""

    roles = ("agent", "opponent")

    async def on_action(self, observation, action):
        self.said.append(action.text)
        if len(self.said) == 1:
            self.emit("opponent", (text_message("user", action.text or "?"),), parents=(observation.id,))
            return
        won = 1.0 if score(self.said[0]) > score(self.said[1]) else -1.0
        self.emit("agent", (), parents=(observation.id,), reward=won, terminated=True)
        self.emit("opponent", (), parents=(observation.id,), reward=-won, terminated=True)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    roles = {"opponent": {"policy": "white", "pool": {"every_steps": 1, "size": 2}}}
    settings = config(folder, {}, roles, steps=3, checkpoint={"every_steps": 1})
    palestra.train(RolloutSpec(environment=Duel), TASKS, settings, quiet=True)
    return folder


@pytest.mark.slow
def test_the_versions_of_a_run_are_its_pool_and_its_checkpoints(run_dir, tmp_path):
    found = versions_of(run_dir)
    assert list(found) == ["white@2", "white@3"]
    assert found["white@3"].endswith("pool/white@3")
    for path in found.values():
        assert safetensors.torch.load_file(Path(path) / "model.safetensors")
    with pytest.raises(NotFound, match=r"folder.*run"):
        versions_of(tmp_path)
    with pytest.raises(NotFound, match=r"version.*'black'"):
        versions_of(_empty(tmp_path, run_dir), "black")


@pytest.mark.slow
def test_a_run_that_has_trained_two_policies_plays_with_the_versions_of_both(tmp_path):
    policies = {"black": {"max_context": 400}}
    settings = config(tmp_path / "run", policies, {"opponent": "black"}, steps=1, checkpoint={"every_steps": 1})
    palestra.train(RolloutSpec(environment=Duel), TASKS, settings, quiet=True)
    found = palestra_lab.play_matrix(tmp_path / "run", Duel, tasks=TASKS, games=1)
    assert (found.players, found.failed) == (("white@1", "black@1"), 0)


def _empty(folder: Path, run_dir: Path) -> Path:
    (folder / "run.db").touch()
    (folder / "config.toml").write_text((run_dir / "config.toml").read_text())
    return folder


@pytest.mark.slow
def test_every_pair_plays_in_both_seatings_and_the_same_again(run_dir, other_model):  # noqa: F811
    players = versions_of(run_dir) | {"other": other_model}
    played = []
    seen: list[tuple[int, int]] = []
    for seed in (1, 1, 2):
        played.append(
            palestra_lab.play_matrix(
                players,
                Duel,
                palestra.load_config(run_dir / "config.toml"),
                tasks=TASKS,
                games=3,
                seed=seed,
                concurrency=5 if len(played) else 1,
                moves=lambda observation: ("left", "right"),
                report=lambda done, total: seen.append((done, total)),
            )
        )
    first, again, other = played
    assert first.players == ("white@2", "white@3", "other", "random")
    assert first.games == again.games != other.games
    pairs = Counter((game.first, game.second) for game in first.games)
    assert pairs == {(a, b): 3 for a in first.players for b in first.players if a != b}
    assert all(sum(game.rewards) == 0 for game in first.games)
    assert first.failed == 0
    assert sum(rating.elo for rating in first.ratings.values() if rating) == pytest.approx(0, abs=1e-6)
    assert seen[:36] == [(number, 36) for number in range(1, 37)]
    lines = first.text().splitlines()
    assert len(lines) == 5


@pytest.mark.slow
def test_greedy_games_of_one_task_are_all_the_same(run_dir):
    found = palestra_lab.play_matrix(run_dir, Duel, tasks=TASKS[:1], games=4, greedy=True)
    assert set(found.players) == {"white@2", "white@3"}
    assert len({(game.first, game.second, game.rewards) for game in found.games}) == 2


@pytest.mark.slow
def test_what_can_not_be_played_is_a_clear_sentence(run_dir):
    def refused(said: str, *arguments, **kw):
        with pytest.raises(ConfigError, match=said):
            palestra_lab.play_matrix(*arguments, **kw)

    refused("at least two players, and there is one", {"one": "tiny-random"}, Duel, tasks=TASKS)
    refused("name the environment that is played", run_dir)
    refused("there is nothing to play: give `tasks`", run_dir, Duel)
    refused("Talk does not say which roles it has", run_dir, Talk, tasks=TASKS)
    refused("'random' is the name of the player", {"random": "tiny-random", "b": "tiny-random"}, Duel, tasks=TASKS)
    refused("`games` is 0; give a whole number of at least 1", run_dir, Duel, tasks=TASKS, games=0)
    job = JobConfig.model_validate({"policies": {"p": {"model": "tiny-random"}}})
    refused("there is no environment 'chess'", {"a": "tiny-random", "b": "tiny-random"}, "chess", job)
