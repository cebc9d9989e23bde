"""Trees of rows: nodes are the distinct beginnings of the rows, and a node sees its own beginning, nothing else."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from unit.building import make_sample

from palestra.tokens import TokenRun, common_prefix
from palestra.trainer.packing import Tree, pack

rows = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=8)


def tree_of(lists) -> Tree:
    tree = Tree()
    for row in lists:
        run = TokenRun(np.array(row, np.int32))
        tree.add(run, tree.shared(run))
    return tree


def beginnings(tree: Tree, lists) -> dict[int, tuple[int, ...]]:
    """What each node stands for: the beginning of a row that ends there."""
    found: dict[int, tuple[int, ...]] = {}
    for row, path in zip(lists, tree.paths, strict=True):
        assert len(path) == len(row)
        for place, node in enumerate(path.tolist()):
            assert found.setdefault(node, tuple(row[: place + 1])) == tuple(row[: place + 1])
    return found


@given(rows)
def test_every_distinct_beginning_is_one_node(lists):
    tree = tree_of(lists)
    found = beginnings(tree, lists)
    distinct = {tuple(row[:n]) for row in lists for n in range(1, len(row) + 1)}
    assert len(tree) == len(distinct) == len(found)
    assert set(found.values()) == distinct
    for node, beginning in found.items():
        assert tree.ids[node] == beginning[-1]
        assert tree.positions[node] == len(beginning) - 1


@given(rows)
def test_a_node_sees_exactly_its_ancestors_and_itself(lists):
    tree = tree_of(lists)
    found = beginnings(tree, lists)
    mask = tree.mask()
    seen = np.tril(np.ones((len(tree), len(tree)), bool)) if mask is None else mask.numpy()
    for i in range(len(tree)):
        for j in range(len(tree)):
            assert seen[i, j] == (found[i][: len(found[j])] == found[j])


@given(rows.map(lambda lists: [[9, *row] for row in lists]), st.integers(1, 30))
def test_every_sample_is_in_one_micro_batch_in_order_with_its_own_tokens(lists, most):
    samples = [make_sample(row, range(1, len(row)), name=str(i)) for i, row in enumerate(lists)]
    batches = pack(samples, most)
    assert [s.episode_id for b in batches for s, _, _ in b.samples] == [s.episode_id for s in samples]
    for batch in batches:
        ids = [i for tree in batch.trees for i in tree.ids]
        positions = [p for tree in batch.trees for p in tree.positions]
        assert batch.tokens == len(ids)
        longest = max(len(sample.ids) for sample, _, _ in batch.samples)
        assert batch.tokens <= max(most, 2 * longest)
        if batch.tokens > most and len(batch.samples) > 1:  # only for what those that came last have in common
            sample, _, _ = batch.samples[-1]
            assert any(common_prefix(s.ids, sample.ids) * 2 >= len(sample.ids) for s, _, _ in batch.samples[:-1])
        targets = batch.targets()
        place = 0
        for sample, offset, path in batch.samples:
            assert [ids[n + offset] for n in path] == sample.ids.tolist()
            assert [positions[n + offset] for n in path] == list(range(len(sample.ids)))
            for t in range(1, len(sample.ids)):
                assert targets["target"][place] == sample.ids[t]
                assert targets["source"][place] == path[t - 1] + offset
                place += 1
        assert place == len(targets["target"])
