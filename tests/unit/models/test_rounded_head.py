"""An output layer whose weights are rounded once a pass: the scores of the module, and a gradient no worse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from palestra.models import output_head
from palestra.models.attention_backend import TrialAttention
from palestra.models.output_head import HeadWeights, RoundedHead

SIZES = (5, 1, 7)  # positions of each chunk


def made() -> tuple[nn.Linear, Tensor, Tensor]:
    """A layer, hidden states of all chunks, and what their scores are weighted by."""
    draw = torch.Generator().manual_seed(0)
    head = nn.Linear(16, 40, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(40, 16, generator=draw))
    hidden, factors = (torch.randn(sum(SIZES), width, generator=draw) for width in (16, 40))
    return head, hidden.requires_grad_(), factors


def gradients(head: nn.Linear, hidden: Tensor, factors: Tensor, product, again: bool) -> tuple[Tensor, Tensor, Tensor]:
    head.weight.grad = hidden.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        call = (lambda part: checkpoint(product, part, use_reentrant=False)) if again else product
        scores = torch.cat([call(part).float() for part in hidden.split(SIZES)])
        (scores * factors).sum().backward()
    return scores.detach(), hidden.grad, head.weight.grad


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("most", [0, 1000, 2**27], ids=["each chunk", "some chunks", "all chunks"])
@pytest.mark.parametrize("rows", [7, 40, 4096])
def test_chunks_have_the_modules_scores_and_gradients(monkeypatch, again, most, rows):
    monkeypatch.setattr(output_head, "_ROWS", rows)
    monkeypatch.setattr(output_head, "_KEPT_BYTES", most)
    head, hidden, factors = made()
    wanted = gradients(head, hidden, factors, head, again)
    found = gradients(head, hidden, factors, RoundedHead(HeadWeights(head)), again)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    rounded = [one.detach().to(torch.bfloat16).double() for one in (factors, hidden)]
    exact = rounded[0].t() @ rounded[1]
    errors = [float((made_ - exact).norm() / exact.norm()) for made_ in (found[2], wanted[2])]
    assert errors[0] <= 1.1 * errors[1] < 0.01
    assert found[2].dtype == torch.float32


def test_the_gradient_is_added_to_what_the_weights_have_already_and_to_that_of_another_use():
    head, hidden, factors = made()
    alone = gradients(head, hidden, factors, RoundedHead(HeadWeights(head)), False)[2].clone()
    for _ in range(2):  # the first is added to that of `gradients`
        table = torch.nn.functional.embedding(torch.tensor([3, 3]), head.weight)  # as where both are tied
        with torch.autocast("cpu", torch.bfloat16):
            ((RoundedHead(HeadWeights(head))(hidden).float() * factors).sum() + table.sum()).backward()
    wanted = 3 * alone
    wanted[3] += 4
    assert torch.allclose(head.weight.grad, wanted)


class Seen(TorchDispatchMode):
    """The names of all operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class Embedded(nn.Module):
    """All of a model but its output layer; the embeddings see ids, as those of each layer do in some families."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table, self.of_layers = table, nn.Embedding(40, 16)
        table.register_forward_hook(lambda _layer, _given, out: out.to(torch.bfloat16).float())

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.table(input_ids) + self.of_layers(input_ids)


class OwnLookup(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids, self.weight) * 2


@pytest.mark.parametrize("scored", [True, False], ids=["with scores", "without"])
@pytest.mark.parametrize(
    ("kind", "settings", "sparse"),
    [
        (nn.Embedding, {}, True),
        (nn.Embedding, {"padding_idx": 3}, True),
        (nn.Embedding, {"sparse": True}, True),
        (nn.Embedding, {"scale_grad_by_freq": True}, False),
        (OwnLookup, {}, False),
    ],
    ids=["", "padding", "sparse", "by frequency", "its own look-up"],
)
def test_embeddings_by_the_same_weights_add_their_rows_to_the_gradient(scored, kind, settings, sparse):
    head, hidden, factors = made()
    ids, weights = torch.tensor([3, 9, 3, 39]), torch.arange(64.0).view(4, 16)
    table = kind(40, 16, **settings)
    table.weight = head.weight
    model = Embedded(table)

    def gradient(tied: HeadWeights | None) -> tuple[Tensor, Tensor]:
        head.weight.grad = model.of_layers.weight.grad = None
        rows = model(ids) if tied is None else tied.call(model, {"input_ids": ids})
        loss = (rows * weights).sum()
        if scored:
            loss = loss + loss_of(head, hidden, factors, RoundedHead(tied or HeadWeights(head)))
        with Seen() as seen:
            loss.backward()
        dense = sum("embedding_dense_backward" in name for name in seen.names)
        assert tied is None or dense == (1 if sparse else 2), "that of all layers, and of the table"
        assert table.sparse == settings.get("sparse", False)
        assert table.weight is head.weight
        found = head.weight.grad
        assert tied is None or not found.is_sparse
        return found.to_dense() if found.is_sparse else found.clone(), model.of_layers.weight.grad

    found, wanted = gradient(HeadWeights(head)), gradient(None)
    assert torch.allclose(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    assert bool(found[0][3].any()) == (scored or "padding_idx" not in settings)


def test_embeddings_by_other_weights_are_their_own():
    head, hidden, factors = made()
    model, tied = Embedded(nn.Embedding(40, 16)), HeadWeights(head)
    rows = tied.call(model, {"input_ids": torch.tensor([1, 1])})
    (rows.sum() + loss_of(head, hidden, factors, RoundedHead(tied))).backward()
    assert torch.equal(model.table.weight.grad[1], torch.full((16,), 2.0))
    assert int(model.table.weight.grad.count_nonzero()) == 16
    assert torch.equal(head.weight.grad, gradients(head, hidden, factors, RoundedHead(HeadWeights(head)), False)[2])


def gradients_of_a_pass(model, weights: HeadWeights, tied: bool, order: list[str]) -> dict[str, Tensor]:
    model.model.zero_grad()
    positions = torch.arange(4)
    states = model.hidden(positions % 3 + 5, positions, TrialAttention(), weights=weights if tied else None)
    scores = model.logits(states, rounded=RoundedHead(weights))
    states.register_hook(lambda _: order.append("layers"))
    with Seen() as seen:
        scores.log_softmax(-1)[:, 3].sum().backward()
    assert tied != any("embedding_dense_backward" in name for name in seen.names)
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_a_pass_of_a_trainer_makes_one_gradient_of_a_tied_matrix(tiny, monkeypatch):
    """It is begun before that of the layers, so that gradients of scores take no memory meanwhile."""
    tiny.compute_in(torch.bfloat16)
    assert tiny.model.get_output_embeddings().weight is tiny.model.get_input_embeddings().weight
    order, compute = [], output_head._Gradient._compute
    monkeypatch.setattr(output_head._Gradient, "_compute", lambda own: (order.append("scores"), compute(own)))
    found = gradients_of_a_pass(tiny, tiny.head_weights(), True, order)
    assert order == ["scores", "layers"]
    for name, wanted in gradients_of_a_pass(tiny, tiny.head_weights(), False, order).items():
        assert torch.allclose(found[name], wanted, rtol=1e-4, atol=1e-6), name


def test_weights_that_are_not_trained_get_no_gradient_and_hidden_states_do():
    head, hidden, factors = made()
    head.weight.requires_grad_(False)
    (RoundedHead(HeadWeights(head))(hidden).float() * factors).sum().backward()
    assert head.weight.grad is None
    assert hidden.grad.abs().sum() > 0


def test_a_pass_without_use_of_its_scores_leaves_no_gradient():
    head, hidden, _ = made()
    RoundedHead(HeadWeights(head))(hidden)
    (hidden.sum() + head.weight.sum()).backward()
    assert torch.equal(head.weight.grad, torch.ones(40, 16))


def loss_of(head: nn.Linear, hidden: Tensor, factors: Tensor, product) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (torch.cat([product(part).float() for part in hidden.split(SIZES)]) * factors).sum()


def test_a_pass_that_did_not_ask_for_the_weights_leaves_nothing_to_the_next():
    head, hidden, factors = made()
    wanted = gradients(head, hidden, factors, RoundedHead(HeadWeights(head)), False)[2].clone()
    head.weight.grad = None
    loss = loss_of(head, hidden, factors, RoundedHead(HeadWeights(head)))
    torch.autograd.grad(loss, hidden, retain_graph=True)
    loss.backward(inputs=[hidden], retain_graph=True)
    loss.backward(inputs=[head.weight], retain_graph=True)
    assert torch.equal(head.weight.grad, wanted)
    loss.backward()
    assert torch.equal(head.weight.grad, 2 * wanted), "a second time, as asked"


def test_a_pass_that_fails_half_way_leaves_nothing_to_the_next():
    head, hidden, factors = made()
    wanted = gradients(head, hidden, factors, RoundedHead(HeadWeights(head)), False)[2].clone()
    head.weight.grad, failures = None, [True]
    rounded = RoundedHead(HeadWeights(head))

    def fail(_gradient):
        if failures:
            failures.pop()
            raise RuntimeError("half-way")

    with torch.autocast("cpu", torch.bfloat16):
        scores = [rounded(part) for part in hidden.split(SIZES)]
    scores[0].register_hook(fail)
    loss = (torch.cat([one.float() for one in scores]) * factors).sum()
    with pytest.raises(RuntimeError, match="half-way"):
        loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(head.weight.grad, wanted)


def test_a_gradient_of_the_gradient_is_refused():
    head, hidden, factors = made()
    loss = loss_of(head, hidden, factors, RoundedHead(HeadWeights(head))).square()
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()


def test_an_output_layer_that_is_listened_to_is_called(tiny):
    tiny.compute_in(torch.bfloat16)
    assert tiny.head_weights() is not None
    tiny.model.get_output_embeddings().register_forward_hook(lambda _layer, _given, out: 2 * out)
    assert tiny.head_weights() is None
