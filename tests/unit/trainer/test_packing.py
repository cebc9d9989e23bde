from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from palestra.tokens import TokenRun
from palestra.trainer.packing import Tree, pack
from palestra.trainer.tree_attention import TreeAttention
from palestra.types.calls import MediaSpan
from unit.building import make_sample


def tree_of(*rows) -> Tree:
    tree = Tree()
    for row in rows:
        run = TokenRun(np.array(row, np.int32))
        tree.add(run, tree.shared(run))
    return tree


def test_a_single_row_is_a_chain_that_needs_no_mask():
    tree = tree_of([5, 6, 7])
    assert (tree.ids, tree.positions) == ([5, 6, 7], [0, 1, 2])
    assert tree.paths[0].tolist() == [0, 1, 2]
    assert tree.mask() is None


def test_what_rows_have_in_common_is_one_run_of_nodes():
    tree = tree_of([1, 2, 3], [1, 2, 4, 5], [1, 9])
    assert tree.ids == [1, 2, 3, 4, 5, 9]
    assert tree.positions == [0, 1, 2, 2, 3, 1]
    assert [p.tolist() for p in tree.paths] == [[0, 1, 2], [0, 1, 3, 4], [0, 5]]
    assert tree.mask().int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 1, 1, 0],
        [1, 0, 0, 0, 0, 1],
    ]


def test_a_row_that_is_there_already_adds_nothing():
    tree = tree_of([1, 2, 3], [1, 2, 3], [1, 2])
    assert len(tree) == 3
    assert [p.tolist() for p in tree.paths] == [[0, 1, 2], [0, 1, 2], [0, 1]]
    assert tree.mask() is None


def test_a_longer_row_goes_on_where_the_shorter_ended():
    tree = tree_of([1, 2], [1, 2, 3])
    assert tree.ids == [1, 2, 3]
    assert tree.mask().int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_a_fork_of_a_fork_shares_with_the_nearest_row():
    tree = tree_of([1, 2, 3, 4], [1, 2, 8, 9], [1, 2, 8, 7])
    assert tree.ids == [1, 2, 3, 4, 8, 9, 7]
    assert tree.shared(TokenRun(np.array([1, 2, 8, 9, 9], np.int32))).tolist() == [0, 1, 4, 5]
    assert tree.shared(TokenRun(np.array([5], np.int32))).tolist() == []


def test_a_row_can_not_begin_with_a_sampled_token():
    with pytest.raises(ValueError, match="episode e7"):
        pack([make_sample([1, 2], [0], name="e7")], 100)


def test_groups_are_trees_and_no_micro_batch_is_too_large():
    rows = [[1, 1, 1, s] for s in range(3)] + [[2, 2, 2, s] for s in range(3)]
    batches = pack([make_sample(row, [3]) for row in rows], 12)
    assert [[len(t) for t in b.trees] for b in batches] == [[6, 6]]
    batches = pack([make_sample(row, [3]) for row in rows], 11)
    assert [[len(t) for t in b.trees] for b in batches] == [[6, 5], [4]]
    assert [b.tokens for b in batches] == [11, 4]


def test_answers_to_a_prompt_that_is_too_long_share_it_up_to_twice_its_length():
    prompt = list(range(50))
    rows = [make_sample([*prompt, 100 + k, 200 + k], (51,)) for k in range(40)]
    micros = pack(rows, 10)
    assert [len(micro.trees) for micro in micros] == [1, 1]
    assert [micro.tokens for micro in micros] == [104, 50 + 2 * 13]  # 2 x 52, and the rest
    strangers = [make_sample([*range(1000 * k, 1000 * k + 52)], (51,)) for k in range(3)]
    assert [micro.tokens for micro in pack(strangers, 10)] == [52, 52, 52]


def test_a_row_that_alone_is_too_long_is_a_micro_batch_of_its_own():
    batches = pack([make_sample(row, [1]) for row in ([1, 2], [3] * 50, [4, 5])], 10)
    assert [b.tokens for b in batches] == [2, 50, 2]


def test_targets_are_the_trained_tokens_with_the_node_before_them():
    one = make_sample([1, 2, 3, 4], [2, 3], advantage=0.5, weight=0.1, logprobs=[-1.0, -2.0], temperature=0.7)
    two = make_sample([1, 2, 9], [2], advantage=-1.0, weight=0.2, logprobs=[-3.0])
    other = make_sample([7, 8], [1], weight=0.3, logprobs=[-4.0])
    (micro,) = pack([one, two, other], 100)
    targets = micro.targets()
    assert targets["source"].tolist() == [1, 2, 1, 5]
    assert targets["target"].tolist() == [3, 4, 9, 8]
    assert targets["sampling_logprobs"].tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert targets["advantages"].tolist() == [0.5, 0.5, -1.0, 1.0]
    assert targets["loss_weights"].tolist() == pytest.approx([0.1, 0.1, 0.2, 0.3])
    assert targets["temperature"].tolist() == pytest.approx([0.7, 0.7, 1.0, 1.0])
    assert (targets["source"].dtype, targets["sampling_logprobs"].dtype) == (torch.int64, torch.float32)


def test_trees_do_not_see_each_other():
    """Changing the keys and values of one tree changes nothing in the other."""
    trees = [tree_of([1, 2, 3], [1, 2, 4]), tree_of([5, 6])]
    generator = torch.Generator().manual_seed(0)
    query = torch.randn((1, 4, 6, 8), generator=generator)
    key, value = (torch.randn((1, 2, 6, 8), generator=generator) for _ in range(2))
    attend = TreeAttention(trees, torch.device("cpu"))
    before = attend(0, query, key, value, 0.3)
    key, value = key.clone(), value.clone()
    key[:, :, :4] += 1.0
    value[:, :, :4] += 1.0
    after = attend(0, query, key, value, 0.3)
    assert torch.equal(before[4:], after[4:])
    assert not torch.allclose(before[:4], after[:4])


def test_placeholders_of_two_images_are_never_merged():
    row = [5, 9, 9, 6, 7]
    image = {digest: (MediaSpan(1, 2, digest),) for digest in ("cat", "dog")}
    samples = [
        replace(make_sample(row, [4], name=f"{digest} {number}"), media=image[digest])
        for digest in image
        for number in range(2)
    ]
    (batch,) = pack(samples, 100)
    (tree,) = batch.trees
    assert tree.ids == [5, 9, 9, 6, 7, 9, 9, 6, 7]
    cats, dogs = tree.paths[0].tolist(), tree.paths[2].tolist()
    assert [path.tolist() for path in tree.paths] == [cats, cats, dogs, dogs]
    assert set(cats) & set(dogs) == {0}
    mask = tree.mask()
    assert mask is not None
    assert not mask[dogs[1:]][:, cats[1:]].any()
