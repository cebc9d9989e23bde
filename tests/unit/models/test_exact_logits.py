from __future__ import annotations

import pytest
import torch

from palestra.models.output_head import EXACT_LOGITS, _largest


@pytest.mark.parametrize("vocabulary", [7, 64, 1000, 1024, 1100, 49_152, 49_153])
@pytest.mark.parametrize("rounded", [False, True])
def test_the_largest_logits_are_those_of_topk(vocabulary, rounded):
    """Rounded to bfloat16 many are equal; then any of them may be taken, and the values say whether all are right."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn((9, vocabulary), generator=generator)
    logits[0, -3:] = 50.0  # among the last, which may lie behind the last whole block
    logits = logits.to(torch.bfloat16).float() if rounded else logits
    found = _largest(logits)
    count = min(EXACT_LOGITS, vocabulary)
    assert found.shape == (9, count)
    assert all(len(set(row)) == count for row in found.tolist()), "a token is there twice"
    assert torch.equal(logits.gather(1, found).sort(descending=True).values, logits.topk(count).values)
