"""Pictures in a terminal: exactly the pixels that were stored where it can show them, and a link everywhere."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image
from rich.console import Group

from palestra.dashboard.answers import EpisodeDetail
from palestra.dashboard.episode import call_answer
from palestra.dashboard.fate import Fate, TokenFates
from palestra.pictures.blobs import Blobs
from palestra.pictures.pixels import encode_picture
from palestra.renderers.model_layouts import FixedLayout, PatchLayout
from palestra.renderers.picture_layout import TiledLayout
from palestra.terminal import TerminalConsole
from palestra.types.messages import ChatMessage, ImagePart, TextPart
from palestra.types.summaries import EpisodeSummary
from palestra_inspect.episode_view import conversation
from palestra_inspect.terminal_pictures import TerminalPicture, protocol_of
from unit.building import make_chat

PIXELS = np.random.default_rng(2).integers(0, 256, (60, 90, 3), np.uint8)


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"TERM": "xterm-kitty"}, "kitty"),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"}, "kitty"),
        ({"TERM_PROGRAM": "ghostty"}, "kitty"),
        ({"TERM_PROGRAM": "iTerm.app"}, "iterm"),
        ({"TERM_PROGRAM": "WezTerm"}, "iterm"),
        ({"TERM_PROGRAM": "iTerm.app", "TMUX": "/tmp/x"}, None),
        ({"TERM": "screen.xterm-256color", "LC_TERMINAL": "iTerm2"}, None),
        ({"TERM": "xterm-256color"}, None),
        ({}, None),
    ],
)
def test_the_terminal_says_what_it_can(variables, wanted):
    assert protocol_of(variables) == wanted


def printed(picture, terminal: bool = True) -> str:
    out = io.StringIO()
    TerminalConsole(file=out, force_terminal=terminal, soft_wrap=True, width=400).print(picture)
    return out.getvalue()


def test_the_pixels_are_those_that_are_stored(tmp_path):
    blobs = Blobs(tmp_path)
    digest = blobs.put(encode_picture(PIXELS))
    kitty = printed(TerminalPicture(blobs, digest, "kitty"))
    pieces = re.findall(r"\x1b_G(?:a=T,f=100,)?m=[01];([^\x1b]*)\x1b\\", kitty)
    assert len(pieces) > 1
    iterm = re.search(
        r"\x1b\]1337;File=inline=1;size=\d+:([^\x07]*)\x07", printed(TerminalPicture(blobs, digest, "iterm"))
    )
    for encoded in ("".join(pieces), iterm[1]):
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded)))), PIXELS)
    assert f"90 × 60: {blobs.path(digest)}" in kitty
    assert f"{blobs.path(digest).as_uri()}\x1b\\" in kitty


def test_without_a_protocol_or_a_terminal_there_is_a_link(tmp_path):
    blobs = Blobs(tmp_path)
    digest = blobs.put(encode_picture(PIXELS))
    plain = printed(TerminalPicture(blobs, digest, "kitty"), terminal=False)
    assert plain.strip() == f"[picture 90 × 60: {blobs.path(digest)}]"
    assert "_G" not in printed(TerminalPicture(blobs, digest, None))
    assert "whose file is gone" in printed(TerminalPicture(blobs, "0" * 64, "kitty"))


def said(chats) -> Group:
    """The conversation of an episode with these calls, with the beginning of each picture's digest."""
    trained = Fate(True, "")
    policies = {chat.index: chat.policy for chat in chats}
    fates = TokenFates(episode=trained, by_policy={}, frozen=frozenset(), kept=policies, policies=policies)
    line = EpisodeSummary(episode_id="train-000000-00", reward=1.0)
    calls = [call_answer(chat, None, fates) for chat in chats]
    rest = {"task": {}, "metadata": {}, "step_rewards": None, "named_rewards": None, "rows": [], "notes": []}
    found = EpisodeDetail(run="r", line=line, step=1, trained=True, why="", distinct_tokens=0, calls=calls, **rest)
    return conversation(found, lambda digest, _: f"<{digest[:4]}>")


def test_a_conversation_has_its_pictures_where_they_were_said(tmp_path):
    message = ChatMessage(role="user", content=(TextPart(text="look"), ImagePart(digest="ab" * 32)))
    chat = make_chat(0, new_messages=(message,))
    shown = printed(said([chat]), False)
    lines = shown.splitlines()
    assert lines[1:4] == ["[user]", "look", "<abab>"]
    assert lines[4] == "[assistant]"


def test_pictures_stand_between_the_texts_beside_them():
    first, second = ImagePart(digest="ab" * 32), ImagePart(digest="cd" * 32)
    content = (TextPart(text="first:"), first, second, TextPart(text="and "), TextPart(text="then?"))
    chat = make_chat(0, new_messages=(ChatMessage(role="user", content=content),))
    shown = printed(said([chat]), False)
    assert shown.splitlines()[1:7] == ["[user]", "first:", "<abab>", "<cdcd>", "and then?", "[assistant]"]


def test_a_prompt_that_is_sent_again_is_no_prompt_of_token_ids():
    first = make_chat()
    again = make_chat(index=1, messages=(), prompt=(), parent=first, shared=3, shared_messages=1)
    raw = make_chat(index=2, messages=())
    chats = [first, again, raw]
    shown = printed(said(chats), False).splitlines()
    assert shown[5:] == [
        "── call 1, agent, step 1 ──",
        "(no new message: call 0 begins with this prompt, too)",
        "[assistant]",
        "reply",
        "── call 2, agent, step 2 (begins anew) ──",
        "(a prompt of token ids or raw text)",
        "[assistant]",
        "reply",
        "reward 1",
    ]


def test_the_tiles_that_a_model_got_are_shown_with_gaps_and_all_of_their_pixels(tmp_path):
    blobs, layout = Blobs(tmp_path), TiledLayout(tokens=4, tile=32, longest=64, splits=True)
    digest = blobs.put(encode_picture(PIXELS))
    said = printed(TerminalPicture(blobs, digest, "iterm", layout))
    assert "[picture 90 × 60, as 2 × 2 tiles of 32 × 32 pixels, and the whole in one:" in said
    encoded = re.search(r"size=\d+:([^\x07]*)\x07", said)[1]
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))))
    seen = np.asarray(layout.seen(Image.fromarray(PIXELS)))
    assert shown.shape == (66, 66, 3)
    for row in (0, 1):
        for column in (0, 1):
            tile = shown[row * 34 : row * 34 + 32, column * 34 : column * 34 + 32]
            assert np.array_equal(tile, seen[row * 32 : row * 32 + 32, column * 32 : column * 32 + 32])
    assert (shown[32:34] == (255, 0, 255)).all()


def test_what_a_model_got_that_cuts_no_tiles_is_shown_in_the_squares_of_its_embeddings(tmp_path):
    blobs = Blobs(tmp_path)
    digest, narrow = blobs.put(encode_picture(PIXELS)), blobs.put(encode_picture(np.zeros((1, 150), np.uint8)))
    layout = PatchLayout(side=28, least=0, most=28 * 28 * 4)
    said = printed(TerminalPicture(blobs, digest, "iterm", layout))
    assert "[picture 90 × 60, as 56 × 28 pixels, in 1 × 2 squares of 28 × 28 with an embedding each:" in said
    encoded = re.search(r"size=\d+:([^\x07]*)\x07", said)[1]
    assert Image.open(io.BytesIO(base64.b64decode(encoded))).size == (28 + 2 + 28, 28)
    assert f"[picture {narrow}: a picture has 150 × 1 pixels, and this model needs more" in printed(
        TerminalPicture(blobs, narrow, None, layout)
    )
    said = printed(TerminalPicture(blobs, digest, None, FixedLayout(tokens=4, side=32, patch=16, shorter=32)))
    assert "as 32 × 32 pixels in the middle of 48 × 32, in 2 × 2 squares of 16 × 16 with an embedding each:" in said
