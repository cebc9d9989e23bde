"""A model with a sliding window gets the gradient that transformers' own forward pass gives."""

from __future__ import annotations

import numpy as np
import torch

from palestra.models.causal_lm import CausalLM
from palestra.trainer.packing import pack
from palestra.trainer.tree_attention import TreeAttention
from unit.building import make_sample
from unit.models.test_causal_lm import two_of


def test_rows_that_share_a_beginning_see_no_further_back_than_the_window():
    own, flat = two_of("mistral", sliding_window=5)
    model = CausalLM(flat)
    draw = np.random.default_rng(0)
    common = draw.integers(1, 97, 20).tolist()
    rows = [[*common, *draw.integers(1, 97, n).tolist()] for n in (3, 9, 1)]
    (micro,) = pack([make_sample(row, range(20, len(row))) for row in rows], 1000)
    (tree,) = micro.trees
    with torch.inference_mode():
        hidden = model.hidden(
            torch.tensor(tree.ids), torch.tensor(tree.positions), TreeAttention(micro.trees, torch.device("cpu"))
        )
        for row, path in zip(rows, tree.paths, strict=True):
            found = model.logits(hidden[torch.from_numpy(path)])
            assert torch.allclose(found, own(torch.tensor([row])).logits[0], atol=1e-4)
