"""Attention of runs by compiled functions: against the definition in float64, its bits, and what can go wrong."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from palestra_cpu.attention_kernels import AttentionKernels, CachedRuns, Runs
from palestra_cpu.cpu_kernels import attention_kernels, cpu_kernels

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="compiled on Linux alone")
LAYERS, HALF = 2, 2**-8  # a step of bfloat16, half of it either way
PIECES = [[(0, 1)], [(0, 40)], [(63, 2), (0, 65)], [(64, 64), (5, 130), (0, 3)], [(300, 1), (1, 22)]]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def new_tokens(count: int, heads: int, groups: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """As `rotate` returns them: parts of one tensor."""
    whole = drawn(count, heads + 2 * groups, width, seed=seed).transpose(0, 1).unsqueeze(0)
    return whole[:, :heads], whole[:, heads : heads + groups], whole[:, heads + groups :]


@pytest.fixture(scope="module")
def kernels() -> AttentionKernels:
    compiled = cpu_kernels()
    assert compiled is not None, "this machine has no C compiler"
    if not compiled.most_rows:
        pytest.skip("no compiled products of bfloat16 here")
    found = attention_kernels(*new_tokens(1, 3, 1, 64)[:2])
    assert found is not None
    return found


def cut(pieces, new, kept):
    """Each piece with its storage, its tokens and what was computed of it before."""
    start = 0
    for number, (old, count) in enumerate(pieces):
        yield kept[number], old, count, [one[0, :, start : start + count] for one in new]
        start += count


def seen(queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """What the last queries [H, N, D] see of keys [K, S, D], by the definition, in float64: [N, H, D]."""
    count, all_keys, group = queries.shape[1], keys.shape[1], len(queries) // len(keys)
    q, k, v = queries.double(), *(one.double().repeat_interleave(group, dim=0) for one in (keys, values))
    places = torch.arange(all_keys)
    behind = places[-count:].unsqueeze(1) - places
    unseen = (behind < 0) | (behind >= (window or all_keys + 1))
    weights = torch.softmax((q @ k.transpose(1, 2) * scale).masked_fill(unseen, -torch.inf), dim=-1)
    return (weights @ v).transpose(0, 1)


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize(("heads", "groups", "width"), [(6, 2, 64), (3, 3, 10), (8, 1, 80), (64, 1, 2)])
def test_new_tokens_of_prompts_see_their_cache_and_themselves(kernels, pieces, window, heads, groups, width):
    new = new_tokens(sum(count for _, count in pieces), heads, groups, width)
    kept = [drawn(LAYERS, 2, groups, old + count + 3, width, seed=old) for old, count in pieces]
    before = [one.clone() for one in kept]
    runs = CachedRuns([(one, *piece) for one, piece in zip(kept, pieces, strict=True)])
    found = kernels.prompts(1, new, runs, 0.3, window)
    start = 0
    for number, (storage, old, count, (queries, keys, values)) in enumerate(cut(pieces, new, kept)):
        wanted = before[number].clone()
        wanted[1, :, :, old : old + count] = torch.stack((keys, values))
        assert torch.equal(storage, wanted), "the new ones are there, and nothing else has changed"
        all_keys, all_values = wanted[1, :, :, : old + count]
        exact = seen(queries, all_keys, all_values, 0.3, window)
        error = (found[start : start + count].double() - exact).abs()
        # Weights are rounded, each by half a step, and then the result.
        assert (error <= 1.01 * HALF * (exact.abs() + seen(queries, all_keys, all_values.abs(), 0.3, window))).all()
        start += count


def test_a_token_gets_the_same_bits_however_its_prompt_is_computed(kernels):
    heads, groups, width, length = 6, 2, 64, 210
    new = new_tokens(length, heads, groups, width)

    def computed(cuts, beside=0):
        """The whole prompt in pieces, each beside another prompt of so many tokens."""
        kept, found = torch.zeros(1, 2, groups, length, width, dtype=torch.bfloat16), []
        for start, end in zip([0, *cuts], [*cuts, length], strict=True):
            own = [one[:, :, start:end] for one in new]
            pieces = [(kept, start, end - start)]
            if beside:
                own = [
                    torch.cat((one, two), dim=2)
                    for one, two in zip(own, new_tokens(beside, heads, groups, width, 5), strict=True)
                ]
                pieces.append((torch.zeros(1, 2, groups, beside, width, dtype=torch.bfloat16), 0, beside))
            found.append(kernels.prompts(0, tuple(own), CachedRuns(pieces), 0.125, None)[: end - start])
        return torch.cat(found)

    whole = computed([])
    for cuts in ([1], [64], [100, 101, 173], list(range(10, 210, 10))):
        assert torch.equal(computed(cuts), whole)
        assert torch.equal(computed(cuts, beside=75), whole)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - threads if threads < 3 else 1)
        assert torch.equal(computed([64]), whole)
    finally:
        torch.set_num_threads(threads)


def runs_with_many_parts() -> tuple[Runs, list[list[int]]]:
    """A prompt, three replies, one of which forks, and another tree; with the tokens that each token sees."""
    lengths, parents, behind = [100, 70, 3, 66, 1, 90], [-1, 0, 0, 1, 3, -1], [0, 100, 40, 64, 66, 0]
    paths, first = list[list[int]](), 0
    above: list[list[int]] = []
    for length, parent, until in zip(lengths, parents, behind, strict=True):
        path = [] if parent < 0 else above[parent][: len(above[parent]) - lengths[parent] + until]
        for place in range(length):
            path = [*path, first + place]
            paths.append(path)
        above.append(path)
        first += length
    return Runs(lengths, parents=parents, behind=behind, trees=[0, 5]), paths


@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("heads", "groups", "width"), [(6, 2, 64), (3, 3, 10), (5, 1, 136)])
def test_runs_of_trees_have_the_values_and_gradients_of_the_definition(kernels, window, threads, heads, groups, width):
    runs, paths = runs_with_many_parts()
    count = len(paths)
    new, of_out = new_tokens(count, heads, groups, width), drawn(count, heads, width, seed=1)
    exact = [one[0].double().requires_grad_() for one in new]
    unseen = torch.ones((count, count), dtype=torch.bool)
    for token, path in enumerate(paths):
        unseen[token, path[-window:] if window else path] = False
    keys, values = (one.repeat_interleave(heads // groups, dim=0) for one in exact[1:])
    scores = (exact[0] @ keys.transpose(1, 2) * 0.2).masked_fill(unseen, -torch.inf)
    wanted = (scores.softmax(dim=-1) @ values).transpose(0, 1)
    gradients = torch.autograd.grad(wanted, exact, of_out.double())

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        made = kernels.trees(new, runs, 0.2, window)
        found = kernels.trees_gradient(of_out, new, made, runs, 0.2, window)
    finally:
        torch.set_num_threads(before)
    assert torch.allclose(made[1].double(), torch.logsumexp(scores.detach(), dim=-1), atol=1e-4)
    for one, right in zip(
        (made[0], *found), (wanted.detach(), *(part.unsqueeze(0) for part in gradients)), strict=True
    ):
        assert one.shape == right.shape
        # Weights and gradients of scores are rounded, and the result: three times half a step, not all the same way.
        assert float((one.double() - right).norm()) <= HALF * float(right.norm() + 1e-3 * of_out.double().norm())


def test_trees_do_not_touch_each_other(kernels):
    """A number that is none stays in its tree, and numbers elsewhere have the bits that they have alone."""
    alone, both = Runs([90]), Runs([90, 30, 30], parents=[-1, -1, 1], behind=[0, 0, 7], trees=[0, 1])
    first, second = new_tokens(90, 6, 2, 64), new_tokens(60, 6, 2, 64, seed=1)
    second[1][0, 0, 0, 0] = torch.nan  # seen by all of the second tree, in the first head of keys
    new = tuple(torch.cat(pair, dim=2) for pair in zip(first, second, strict=True))
    of_out = drawn(150, 6, 64, seed=2)
    made, own = kernels.trees(new, both, 0.125, None), kernels.trees(first, alone, 0.125, None)
    assert torch.equal(made[0][:90], own[0])
    assert made[0][90:, :3].isnan().all()
    assert not made[0][90:, 3:].isnan().any()
    found = kernels.trees_gradient(of_out, new, made, both, 0.125, None)
    right = kernels.trees_gradient(of_out[:90].contiguous(), first, own, alone, 0.125, None)
    for one, other in zip(found, right, strict=True):
        assert torch.allclose(one[:, :, :90], other, rtol=2**-7, atol=2**-12), "shared out to threads otherwise"
        assert one[:, 0, 90:].isnan().all()


def test_a_reply_does_not_touch_its_siblings(kernels):
    """Also where one begins in the middle of a prompt, behind a token beside others that it does not see."""
    runs = Runs([100, 50], parents=[-1, 0], behind=[0, 40], trees=[0])
    new, of_out = new_tokens(150, 6, 2, 64), drawn(150, 6, 64, seed=1)
    right = kernels.trees(new, runs, 0.125, None)
    gradients = kernels.trees_gradient(of_out, new, right, runs, 0.125, None)
    for number in (1, 2):
        bad = tuple(one.clone() for one in new)
        bad[number][0, :, 41] = torch.inf
        made = kernels.trees(bad, runs, 0.125, None)
        found = kernels.trees_gradient(of_out, bad, made, runs, 0.125, None)
        assert torch.equal(made[0][100:], right[0][100:])
        assert torch.equal(found[0][:, :, 100:], gradients[0][:, :, 100:])


def test_a_key_that_is_never_chosen_weighs_nothing(kernels):
    queries, keys, values = (torch.ones(1, 1, 2, 64).to(torch.bfloat16) for _ in range(3))
    keys[0, 0, 0], values[0, 0, 0] = -20, 3e38
    made = kernels.trees((queries, keys, values), Runs([2]), 1.0, None)
    assert (made[0][1] == 1).all(), "the scores are -1280 and 64"


def test_large_scores_do_not_overflow(kernels):
    new = tuple(one * 300 for one in new_tokens(80, 6, 2, 64))
    made = kernels.trees(new, Runs([80]), 1.0, None)
    exact = seen(*(one[0] for one in new), 1.0, None)
    assert made[0].isfinite().all()
    assert torch.allclose(made[0].double(), exact, rtol=2**-7, atol=1e-30)
    found = kernels.trees_gradient(drawn(80, 6, 64), new, made, Runs([80]), 1.0, None)
    assert all(one.isfinite().all() for one in found)


def test_any_layout_is_read(kernels):
    """What is not the parts of one tensor is copied first."""
    new, runs = new_tokens(70, 6, 2, 64), Runs([40, 30], trees=[0, 1])
    made = kernels.trees(new, runs, 0.125, None)
    apart = tuple(one.clone(memory_format=torch.contiguous_format) for one in new)
    assert apart[0].stride() != new[0].stride()
    of_out = drawn(6, 70, 64).transpose(0, 1)
    assert torch.equal(kernels.trees(apart, runs, 0.125, None)[0], made[0])
    for one, other in zip(
        kernels.trees_gradient(of_out, apart, made, runs, 0.125, None),
        kernels.trees_gradient(of_out.contiguous(), new, made, runs, 0.125, None),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "given",
    [
        {"lengths": []},
        {"lengths": [3, 0]},
        {"lengths": [3], "queries": [4]},
        {"lengths": [3], "queries": [0]},
        {"lengths": [3, 3], "parents": [-1, 1], "behind": [0, 1]},
        {"lengths": [3, 3], "parents": [-1, 0], "behind": [0, 1]},
        {"lengths": [3, 3], "parents": [-1, 0], "behind": [0, 4], "trees": [0]},
        {"lengths": [3, 3], "parents": [-1, 0], "behind": [0, 0], "trees": [0]},
        {"lengths": [3, 3], "parents": [-1, -2], "trees": [0]},
        {"lengths": [3, 3], "behind": [0, 1], "trees": [0]},
        {"lengths": [3, 3], "parents": [-1]},
        {"lengths": [3, 3], "queries": [1, 1, 1]},
        {"lengths": [3], "queries": []},
        {"lengths": [3, 3], "trees": [1]},
        {"lengths": [3, 3], "trees": [0, 0]},
        {"lengths": [3, 3], "trees": [0, 2]},
    ],
    ids=str,
)
def test_what_are_no_runs_is_refused(given):
    with pytest.raises(ValueError, match="no runs"):
        Runs(**given)


def test_what_c_would_misread_is_refused(kernels):
    new, cache = new_tokens(5, 6, 2, 64), drawn(LAYERS, 2, 2, 9, 64)
    runs, all_asked = CachedRuns([(cache, 3, 5)]), Runs([5])
    made = kernels.trees(new, all_asked, 0.125, None)
    for call in (
        lambda: CachedRuns([(cache, 5, 5)]),
        lambda: CachedRuns([(cache, -1, 5)]),
        lambda: CachedRuns([(cache.float(), 3, 5)]),
        lambda: CachedRuns([(cache.transpose(3, 4), 3, 5)]),
        lambda: CachedRuns([(cache, 3, 5), (cache[:1], 3, 5)]),
        lambda: CachedRuns([(cache, 0, 5), (cache, 5, 3)]),
        lambda: kernels.prompts(0, new, runs, 0.125, 0),
        lambda: kernels.trees(new, all_asked, 0.125, -1),
        lambda: kernels.trees(new, all_asked, 0.125, 2**63),
        lambda: kernels.trees_gradient(drawn(5, 6, 64), new, made, all_asked, 0.125, 0),
        lambda: kernels.prompts(LAYERS, new, runs, 0.125, None),
        lambda: kernels.prompts(-1, new, runs, 0.125, None),
        lambda: kernels.prompts(0, new_tokens(4, 6, 2, 64), runs, 0.125, None),
        lambda: kernels.prompts(0, new_tokens(5, 6, 1, 64), runs, 0.125, None),
        lambda: kernels.prompts(0, new_tokens(5, 6, 2, 32), runs, 0.125, None),
        lambda: kernels.prompts(0, (new[0].float(), *new[1:]), runs, 0.125, None),
        lambda: kernels.prompts(0, (new[0], new[1], new[2][:, :, :4]), runs, 0.125, None),
        lambda: kernels.trees(new, Runs([6]), 0.125, None),
        lambda: kernels.trees(new, Runs([6], queries=[5]), 0.125, None),
        lambda: kernels.trees(new_tokens(5, 5, 2, 64), all_asked, 0.125, None),
        lambda: kernels.trees(new_tokens(5, 6, 2, 258), all_asked, 0.125, None),
        lambda: kernels.trees(new_tokens(5, 6, 2, 9), all_asked, 0.125, None),
        lambda: kernels.trees_gradient(drawn(5, 6, 63), new, made, all_asked, 0.125, None),
        lambda: kernels.trees_gradient(drawn(5, 6, 64).float(), new, made, all_asked, 0.125, None),
        lambda: kernels.trees_gradient(drawn(5, 6, 64), new, (made[0], made[1].half()), all_asked, 0.125, None),
        lambda: kernels.trees_gradient(drawn(5, 6, 64), new, made, Runs([4]), 0.125, None),
        lambda: kernels.trees_gradient(drawn(6, 6, 64), new, made, all_asked, 0.125, None),
    ):
        with pytest.raises(ValueError, match=r"needed|fit|does not take|have|are no"):
            call()


def test_what_the_functions_do_not_compute_is_left_to_torch():
    queries, keys, _ = new_tokens(3, 6, 2, 64)
    assert AttentionKernels.takes(queries, keys)
    assert not AttentionKernels.takes(queries.float(), keys.float())
    assert not AttentionKernels.takes(*new_tokens(3, 6, 2, 9)[:2])
    assert not AttentionKernels.takes(*new_tokens(3, 6, 2, 258)[:2])
    assert not AttentionKernels.takes(*new_tokens(3, 65, 1, 8)[:2])
    assert not AttentionKernels.takes(*(one.to("meta") for one in (queries, keys)))
