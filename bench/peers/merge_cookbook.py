"""Merge the cases of `merging` with tinker-cookbook's `trajectory_to_data`; a JSON line for each.

Timed: `trajectory_to_data`, which compares every call's prompt with the row so far. Not timed: making its `Trajectory`,
without validating ids. In its favour: equal ids are one object in all prompts, so that comparing them is cheap.
"""

from __future__ import annotations

from collections.abc import Sequence

import tinker
from conversations import Row, Turn, calls
from merge_runs import Stopwatch, main
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.types import Trajectory, Transition

LOGPROB = -0.5


def merge(turns: Sequence[Turn], watch: Stopwatch) -> list[Row]:
    """One row for each datum."""
    transitions = [
        Transition(
            ob=tinker.ModelInput(chunks=[tinker.EncodedTextChunk.model_construct(tokens=call.prompt)]),
            ac=TokensWithLogprobs(tokens=call.turn.said, maybe_logprobs=[LOGPROB] * len(call.turn.said)),
            reward=0.0,
            episode_done=False,
        )
        for call in calls(turns)
    ]
    trajectory = Trajectory(transitions=transitions, final_ob=tinker.ModelInput.empty())
    with watch:
        data = trajectory_to_data(trajectory, 1.0)
    return [row(datum) for datum in data]


def row(datum: tinker.Datum) -> Row:
    """The tokens of a datum, its first input and its targets, and which of them are trained."""
    targets, mask = datum.loss_fn_inputs["target_tokens"].data, datum.loss_fn_inputs["mask"].data
    return [datum.model_input.to_ints()[0], *map(int, targets)], [False, *map(bool, mask)]


if __name__ == "__main__":
    main({"cookbook": merge})
