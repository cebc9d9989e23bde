"""What matching and inserting add to a model call, early and late in a conversation; prints one JSON line.

Each run plays a conversation of 500 tokens a turn through the session's own functions and keeps the seconds of the
first, the 20th and the 400th call: finding the call that its messages go on from, adding it to the trie, adding it to
the history.
"""

from __future__ import annotations

import argparse
import gc
import json

from conversations import SYSTEM_TOKENS, TOKENS_A_TURN, calls, threads
from merge_palestra import play
from merge_runs import Stopwatch

from palestra.session.history import CallHistory
from palestra.tokens import TokenTrie
from palestra.types.calls import Chat

TURNS = (1, 20, 400)
LIMIT_SECONDS = 60.0  # of one function in one call
PIECES = ("match", "trie", "history")


def main() -> None:
    """Seconds by turn and function."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    arguments = parser.parse_args()
    turns = threads(1, max(TURNS), TOKENS_A_TURN)
    found: dict[int, dict[str, list[float]]] = {turn: {piece: [] for piece in PIECES} for turn in TURNS}
    for _ in range(arguments.runs):
        trie, history = TokenTrie(), CallHistory()
        chats: list[Chat] = []
        gc.collect()
        for call in calls(turns):
            watches = [Stopwatch(LIMIT_SECONDS) for _ in PIECES]
            chats.append(play(call, trie, history, chats, *watches))
            for piece, seconds in found.get(len(chats), {}).items():
                seconds.append(watches[PIECES.index(piece)].seconds)
    print(json.dumps({"tokens_a_turn": TOKENS_A_TURN, "system_tokens": SYSTEM_TOKENS, "seconds": found}))


if __name__ == "__main__":
    main()
