"""transformers' `generate` as a runner of `engine`, in bfloat16; it runs in Palestra's own environment.

All prompts of a call have one length, so that nothing is padded, and samples of one prompt are asked for with
`num_return_sequences`. It has no state between calls: a conversation's history is computed again at every turn, and
nothing joins while others run, so that there is no time to a first token among others to be measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from engine_work import Prompt, main
from transformers import AutoModelForCausalLM


class GenerateSampler:
    """See `Sampler`."""

    def __init__(self, model: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self._eos = self._model.generation_config.eos_token_id

    @torch.inference_mode()
    def sample(self, prompts: Sequence[Prompt], samples: int, tokens: int) -> list[Prompt]:
        """See `Sampler`."""
        ids = torch.tensor(prompts)
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=samples,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
        replies: list[Prompt] = out[:, ids.shape[1] :].tolist()
        assert not any(self._eos in reply for reply in replies), "a reply ended before its last token"
        return replies


if __name__ == "__main__":
    main(GenerateSampler)
