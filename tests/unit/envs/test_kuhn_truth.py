"""Values of policies of Kuhn poker, against closed forms, and against OpenSpiel where it is installed."""

from __future__ import annotations

import random

import pytest

from palestra_worlds import KuhnPolicy

UNIFORM = dict.fromkeys((*KuhnPolicy.first_states, *KuhnPolicy.second_states), 0.5)
GAME_VALUE = -1 / 18


def perfect(alpha: float) -> dict[str, float]:
    """Kuhn's family of perfect play: the first player bluffs with the lowest card with probability `alpha`."""
    first = {"0": alpha, "1": 0.0, "2": 3 * alpha, "0pb": 0.0, "1pb": alpha + 1 / 3, "2pb": 1.0}
    second = {"0p": 1 / 3, "1p": 0.0, "2p": 1.0, "0b": 0.0, "1b": 1 / 3, "2b": 1.0}
    return first | second


@pytest.mark.parametrize("alpha", [0.0, 0.1, 1 / 3])
def test_perfect_play_has_the_games_value_and_can_not_be_exploited(alpha):
    assert KuhnPolicy(perfect(alpha)).value == pytest.approx(GAME_VALUE, abs=1e-12)
    assert KuhnPolicy(perfect(alpha)).best_responses == pytest.approx((GAME_VALUE, -GAME_VALUE), abs=1e-12)
    assert KuhnPolicy(perfect(alpha)).exploitability == pytest.approx(0.0, abs=1e-12)


def test_random_play_is_exploitable():
    assert KuhnPolicy(UNIFORM).exploitability == pytest.approx(0.458333, abs=1e-6)
    assert KuhnPolicy(UNIFORM).value == pytest.approx(0.125)


def test_all_is_as_open_spiel_says():
    pyspiel = pytest.importorskip("pyspiel")
    from open_spiel.python import policy
    from open_spiel.python.algorithms import expected_game_score
    from open_spiel.python.algorithms import exploitability as of_open_spiel

    game, draw = pyspiel.load_game("kuhn_poker"), random.Random(0)
    for _ in range(20):
        bets = {state: draw.choice((0.0, 1.0, draw.random())) for state in UNIFORM}
        table = policy.TabularPolicy(game)
        for state, bet in bets.items():
            table.action_probability_array[table.state_lookup[state]] = (1 - bet, bet)
        score = expected_game_score.policy_value(game.new_initial_state(), [table, table])
        assert KuhnPolicy(bets).value == pytest.approx(score[0], abs=1e-9)
        assert KuhnPolicy(bets).exploitability == pytest.approx(of_open_spiel.exploitability(game, table), abs=1e-9)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"0pb": 1.5}, r"'0pb'.*1\.5.*0.*1"),
        ({"2b": -0.1}, r"'2b'.*-0\.1"),
        ({"1p": float("nan")}, r"'1p'.*nan"),
        ({"3": 0.5}, r"information.*3"),
        ({"1": None, "2b": None}, r"missing.*1.*2b"),
    ],
)
def test_what_is_no_policy_is_refused(change, said):
    bets = {state: bet for state, bet in (UNIFORM | change).items() if bet is not None}
    with pytest.raises(ValueError, match=said):
        KuhnPolicy(bets)
