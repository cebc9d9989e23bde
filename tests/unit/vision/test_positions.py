"""Positions in the plane, against those of transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.config import TINY_QWEN_VL
from palestra.errors import ModelError
from palestra.models.catalog import model_folder
from palestra.models.vision.vision import PlacedPicture, Plane, joined_positions, plane_positions
from unit.vision.seeing import Shown, noise, renderer_of, seeing, transformers_model, user

PICTURE, TEXT = 7, 1
SEQUENCES = st.lists(
    st.one_of(st.integers(1, 9), st.tuples(st.integers(1, 5), st.integers(1, 5))), min_size=1, max_size=7
)


def laid_out(parts) -> tuple[list[int], list[tuple[PlacedPicture, Plane]]]:
    """The ids of texts (their lengths) and pictures (rows and columns); between two pictures there is a text."""
    ids, pictures = list[int](), []
    for part in parts:
        if isinstance(part, int):
            ids += [TEXT] * part
            continue
        if ids and ids[-1] == PICTURE:
            ids.append(TEXT)
        size = part[0] * part[1]
        at = np.arange(len(ids), len(ids) + size)
        pictures.append((PlacedPicture("a", at), Plane(*part)))
        ids += [PICTURE] * size
    return ids, pictures


@settings(max_examples=60, deadline=None)
@given(SEQUENCES)
def test_positions_are_those_of_transformers(parts):
    ids, pictures = laid_out(parts)
    given = torch.tensor([ids])
    grid = torch.tensor([[1, 2 * plane.rows, 2 * plane.columns] for _, plane in pictures])
    model = transformers_model(model_folder(TINY_QWEN_VL)).model
    wanted, delta = model.get_rope_index(given, mm_token_type_ids=(given == PICTURE).int(), image_grid_thw=grid)
    found = plane_positions(len(ids), pictures)
    assert found.tolist() == wanted[:, 0].tolist()
    assert found.max() + 1 - len(ids) == delta.item()  # what a reply adds to the indices of its tokens


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.integers(0, 6))
def test_a_position_depends_on_the_tokens_before_it_alone(parts, kept):
    ids, pictures = laid_out(parts)
    begun, some = laid_out(parts[:kept])
    assert plane_positions(len(begun), some).tolist() == plane_positions(len(ids), pictures)[:, : len(begun)].tolist()


def test_what_follows_a_picture_has_the_position_after_its_longer_side():
    ids, pictures = laid_out([2, (2, 3), 2])
    assert plane_positions(len(ids), pictures).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


def test_a_picture_that_follows_itself_lies_in_two_planes():
    """The spans of both are joined, so that they come as one picture with twice as many placeholders."""
    twice = PlacedPicture("a", np.array([1, 2, 4, 5]))
    one = [(PlacedPicture("a", np.array(at)), Plane(1, 2)) for at in ([1, 2], [4, 5])]
    assert plane_positions(7, [(twice, Plane(1, 2))]).tolist() == plane_positions(7, one).tolist()


def test_a_picture_that_does_not_fill_its_plane_is_refused():
    with pytest.raises(ModelError, match=r"4.*embeddings.*3"):
        plane_positions(9, [(PlacedPicture("a", np.array([1, 2, 3])), Plane(2, 2))])
    with pytest.raises(ModelError, match=r"4.*beside"):
        plane_positions(9, [(PlacedPicture("a", np.array([1, 2, 3, 5])), Plane(2, 2))])


def test_positions_of_several_sequences_are_joined_as_text_or_as_planes():
    text, plane = torch.arange(2), torch.tensor([[0, 1], [0, 2], [0, 3]])
    assert joined_positions([text, text]).tolist() == [0, 1, 0, 1]
    assert joined_positions([text, plane]).tolist() == [[0, 1, 0, 1], [0, 1, 0, 2], [0, 1, 0, 3]]


def test_a_model_gives_planes_to_pictures_alone():
    shown = Shown()
    model, renderer = seeing(shown, name=TINY_QWEN_VL), renderer_of(shown, TINY_QWEN_VL)
    text = renderer.render([user("a")])
    assert model.positions(text).tolist() == list(range(len(text.ids)))
    prompt = renderer.render([user("a", shown.add(noise(64, 32)), "b")])
    found = model.positions(prompt)
    (span,) = prompt.media
    inside = found[:, span.start + 1 : span.start + span.tokens - 1]  # without the tokens around the placeholders
    assert (inside - inside[:, :1]).tolist() == [[0] * 8, [0] * 4 + [1] * 4, [0, 1, 2, 3] * 2]
    tiled = seeing(shown)
    prompt = renderer_of(shown).render([user("a", shown.add(noise(64, 32)), "b")])
    assert tiled.positions(prompt).tolist() == list(range(len(prompt.ids)))
