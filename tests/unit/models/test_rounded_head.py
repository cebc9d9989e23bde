"""An output layer whose weights are rounded once a pass: the scores of the module, and a gradient no worse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from palestra.models import rounded_head
from palestra.models.rounded_head import RoundedHead

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
def test_chunks_have_the_modules_scores_and_gradients(monkeypatch, again, most):
    monkeypatch.setattr(rounded_head, "_KEPT_BYTES", most)
    head, hidden, factors = made()
    wanted = gradients(head, hidden, factors, head, again)
    found = gradients(head, hidden, factors, RoundedHead(head), again)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    rounded = [one.detach().to(torch.bfloat16).double() for one in (factors, hidden)]
    exact = rounded[0].t() @ rounded[1]
    errors = [float((made_ - exact).norm() / exact.norm()) for made_ in (found[2], wanted[2])]
    assert errors[0] <= 1.1 * errors[1] < 0.01
    assert found[2].dtype == torch.float32


def test_the_gradient_is_added_to_what_the_weights_have_already_and_to_that_of_another_use():
    head, hidden, factors = made()
    alone = gradients(head, hidden, factors, RoundedHead(head), False)[2].clone()
    for _ in range(2):  # the first is added to that of `gradients`
        table = torch.nn.functional.embedding(torch.tensor([3, 3]), head.weight)  # as where both are tied
        with torch.autocast("cpu", torch.bfloat16):
            ((RoundedHead(head)(hidden).float() * factors).sum() + table.sum()).backward()
    wanted = 3 * alone
    wanted[3] += 4
    assert torch.allclose(head.weight.grad, wanted)


def test_weights_that_are_not_trained_get_no_gradient_and_hidden_states_do():
    head, hidden, factors = made()
    head.weight.requires_grad_(False)
    (RoundedHead(head)(hidden).float() * factors).sum().backward()
    assert head.weight.grad is None
    assert hidden.grad.abs().sum() > 0


def test_a_pass_without_use_of_its_scores_leaves_no_gradient():
    head, hidden, _ = made()
    RoundedHead(head)(hidden)
    (hidden.sum() + head.weight.sum()).backward()
    assert torch.equal(head.weight.grad, torch.ones(40, 16))


def loss_of(head: nn.Linear, hidden: Tensor, factors: Tensor, product) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (torch.cat([product(part).float() for part in hidden.split(SIZES)]) * factors).sum()


def test_a_pass_that_did_not_ask_for_the_weights_leaves_nothing_to_the_next():
    head, hidden, factors = made()
    wanted = gradients(head, hidden, factors, RoundedHead(head), False)[2].clone()
    head.weight.grad = None
    loss = loss_of(head, hidden, factors, RoundedHead(head))
    torch.autograd.grad(loss, hidden, retain_graph=True)
    loss.backward(inputs=[hidden], retain_graph=True)
    loss.backward(inputs=[head.weight], retain_graph=True)
    assert torch.equal(head.weight.grad, wanted)
    loss.backward()
    assert torch.equal(head.weight.grad, 2 * wanted), "a second time, as asked"


def test_a_pass_that_fails_half_way_leaves_nothing_to_the_next():
    head, hidden, factors = made()
    wanted = gradients(head, hidden, factors, RoundedHead(head), False)[2].clone()
    head.weight.grad, failures = None, [True]
    rounded = RoundedHead(head)

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
    loss = loss_of(head, hidden, factors, RoundedHead(head)).square()
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()


def test_an_output_layer_that_is_listened_to_is_called(tiny):
    tiny.compute_in(torch.bfloat16)
    assert tiny.rounded_head() is not None
    tiny.model.get_output_embeddings().register_forward_hook(lambda _layer, _given, out: 2 * out)
    assert tiny.rounded_head() is None
