"""Attention by branches is attention with a mask of all nodes, in values and in gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from palestra.trainer import block_attention, tree_attention
from palestra.trainer.block_attention import BlockAttention
from palestra.trainer.tree_attention import TreeAttention, branches
from property.test_packing import tree_of

pytestmark = pytest.mark.ci

# Ids of two values make rows that fork often, after long common beginnings as well.
rows = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=6)
bounds = st.tuples(st.sampled_from([0, 8, 100, 4096]), st.sampled_from([1, 3, 512]), st.sampled_from([0, 10, 768]))


@pytest.fixture(autouse=True)
def few_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def with_bounds(call: int, block: int, rows: int) -> pytest.MonkeyPatch:
    """Divide a tree otherwise, and compute more or fewer gradients by plain products."""
    patch = pytest.MonkeyPatch()
    patch.setattr(tree_attention, "_KERNEL_ROWS", rows)
    patch.setattr(tree_attention, "_CAUSAL_ROWS", rows)
    patch.setattr(tree_attention, "_CALL", call)
    patch.setattr(tree_attention, "_BLOCK", block)
    return patch


def seen_by_each(trees, window):
    """Which nodes of trees each node sees, bool [N, N]."""
    nodes = sum(map(len, trees))
    seen, start = torch.zeros((nodes, nodes), dtype=torch.bool), 0
    for tree in trees:
        part = slice(start, start + len(tree))
        mask = tree.mask()
        seen[part, part] = torch.ones((len(tree), len(tree))).tril().bool() if mask is None else mask
        start += len(tree)
    places = torch.tensor([place for tree in trees for place in tree.positions])
    return seen if window is None else seen & (places.unsqueeze(1) - places < window)


@given(rows, bounds)
def test_every_node_is_in_one_branch_and_sees_its_ancestors(lists, given_bounds):
    tree = tree_of(lists)
    mask = tree.mask()
    expected = np.tril(np.ones((len(tree), len(tree)), bool)) if mask is None else mask.numpy()
    patch = with_bounds(*given_bounds)
    try:
        found = branches(tree)
    finally:
        patch.undo()
    seen = np.zeros_like(expected)
    for branch in found:
        part = branch.seen(np.asarray(tree.positions), None)
        keys = np.concatenate((branch.before, branch.nodes))
        own = np.tril(np.ones((len(branch.nodes),) * 2, bool)) if part is None else part.numpy()
        assert not seen[branch.nodes].any()
        seen[np.ix_(branch.nodes, keys)] = own
    assert sorted(node for branch in found for node in branch.nodes.tolist()) == list(range(len(tree)))
    assert (seen == expected).all()


@given(rows, rows, bounds, st.sampled_from([1, 3]), st.sampled_from([None, 1, 4]), st.integers(0, 2**31))
def test_values_and_gradients_are_those_of_one_mask(one, two, given_bounds, repeats, window, seed):
    trees = [tree_of(one), tree_of(two)]
    nodes, width, groups = sum(map(len, trees)), 8, 2
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn((1, groups * repeats, nodes, width), generator=draw, requires_grad=True)
    key, value = (torch.randn((1, groups, nodes, width), generator=draw, requires_grad=True) for _ in range(2))
    upstream = torch.randn((nodes, groups * repeats, width), generator=draw)

    seen = seen_by_each(trees, window)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=0.3, enable_gqa=True)
    wanted = torch.autograd.grad(expected[0].transpose(0, 1), (query, key, value), upstream)

    patch = with_bounds(*given_bounds)
    try:
        found = TreeAttention(trees, torch.device("cpu"))(0, query, key, value, 0.3, window)
        gradients = torch.autograd.grad(found, (query, key, value), upstream)
    finally:
        patch.undo()
    assert torch.allclose(found, expected[0].transpose(0, 1), atol=1e-5)
    for gradient, right in zip(gradients, wanted, strict=True):
        assert torch.allclose(gradient, right, atol=1e-5)


@given(rows, rows, st.sampled_from([1, 3]), st.sampled_from([None, 1, 4]), st.integers(0, 2**31))
def test_in_bfloat16_values_and_gradients_are_those_of_one_mask(one, two, repeats, window, seed):
    trees = [tree_of(one), tree_of(two)]
    nodes, width, groups = sum(map(len, trees)), 8, 2
    draw = torch.Generator().manual_seed(seed)
    query, key, value, upstream = (
        torch.randn((1, heads, nodes, width), generator=draw).to(torch.bfloat16)
        for heads in (groups * repeats, groups, groups, groups * repeats)
    )
    upstream = upstream[0].transpose(0, 1)
    exact = [part.double().requires_grad_() for part in (query, key, value)]
    expected = F.scaled_dot_product_attention(
        *exact, attn_mask=seen_by_each(trees, window), scale=0.3, enable_gqa=True
    )[0].transpose(0, 1)
    wanted = expected.detach(), *torch.autograd.grad(expected, exact, upstream.double())
    given_parts = [part.requires_grad_() for part in (query, key, value)]
    found = TreeAttention(trees, torch.device("cpu"))(0, *given_parts, 0.3, window)
    gradients = torch.autograd.grad(found, given_parts, upstream)
    for own, right in zip((found.detach(), *gradients), wanted, strict=True):
        assert float((own.double() - right).norm()) <= 2**-7 * float(right.norm() + 0.1)


@given(rows, rows, st.sampled_from([None, 1, 4]))
def test_on_a_gpu_the_blocks_of_nodes_hold_all_that_see_each_other(one, two, window):
    """The mask of what is computed on a GPU, tried with blocks of a few nodes: there is no GPU here."""
    trees = [tree_of(one), tree_of(two)]
    seen = seen_by_each(trees, window)
    patch = pytest.MonkeyPatch()
    patch.setattr(block_attention, "BLOCK", 4)
    try:
        mask = BlockAttention(trees, torch.device("cpu")).mask(window)
    finally:
        patch.undo()
    count, size = len(seen), len(mask.kv_num_blocks[0, 0]) * 4
    nodes = torch.arange(size)
    pairs = mask.mask_mod(torch.tensor(0), torch.tensor(0), nodes[:, None], nodes)
    assert torch.equal(pairs[:count, :count], seen)
    assert torch.equal(pairs[count:], torch.eye(size, dtype=torch.bool)[count:])
    listed = torch.zeros((size // 4, size // 4), dtype=torch.int64)
    for numbers, places, kind in (
        (mask.kv_num_blocks, mask.kv_indices, 1),
        (mask.full_kv_num_blocks, mask.full_kv_indices, 2),
    ):
        for row, amount in enumerate(numbers[0, 0].tolist()):
            listed[row, places[0, 0, row, :amount].long()] += kind
    blocks = pairs.view(size // 4, 4, size // 4, 4).transpose(1, 2).flatten(2).sum(dim=2)
    assert torch.equal(listed == 2, blocks == 16) or window is not None
    assert ((blocks == 16) | (listed != 2)).all()
    assert ((blocks > 0) <= (listed > 0)).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own code looks at it
@pytest.mark.parametrize("window", [None, 40])
def test_a_gpu_gets_the_same_attention_and_gradient(window, monkeypatch):
    """The kernel for a GPU without a compiler, which refuses gradients on a CPU, and yet has them."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    draw = np.random.default_rng(0)
    prompt = draw.integers(0, 9, 150).tolist()
    trees = [tree_of([prompt + draw.integers(0, 9, 60).tolist() for _ in range(3)]), tree_of([[1, 2]])]
    nodes = sum(map(len, trees))
    generator = torch.Generator().manual_seed(0)
    query = torch.randn((1, 4, nodes, 16), generator=generator, requires_grad=True)
    key, value = (torch.randn((1, 2, nodes, 16), generator=generator, requires_grad=True) for _ in range(2))
    upstream = torch.randn((nodes, 4, 16), generator=generator)
    found = BlockAttention(trees, torch.device("cpu"))(query, key, value, 0.3, window)
    wanted = TreeAttention(trees, torch.device("cpu"))(0, query, key, value, 0.3, window)
    assert torch.allclose(found, wanted, atol=1e-5)
    for own, right in zip(
        *(torch.autograd.grad(out, (query, key, value), upstream) for out in (found, wanted)), strict=True
    ):
        assert torch.allclose(own, right, atol=1e-5)
