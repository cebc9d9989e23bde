"""Bare vLLM on a GPU at the works of `gpu`: its offline `LLM` class, prompts as token ids; prints one JSON line.

python bench/peers/gpu_vllm.py MODEL_FOLDER NEW_TOKENS '{"work": [[1, 2], …], …}'
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

MAX_CONTEXT = 1024


def main(model: str, tokens: str, works: str) -> None:
    """Sample a reply to each prompt of each work, the first work twice, and print tokens a second."""
    import vllm

    engine = vllm.LLM(model=model, dtype="bfloat16", max_model_len=MAX_CONTEXT, enable_prefix_caching=True)
    sampling = vllm.SamplingParams(
        temperature=1.0, max_tokens=int(tokens), min_tokens=int(tokens), ignore_eos=True, detokenize=False
    )
    asked: dict[str, list[list[int]]] = json.loads(Path(works).read_text())
    found: dict[str, float] = {}
    for name in (next(iter(asked)), *asked):
        prompts = [{"prompt_token_ids": prompt} for prompt in asked[name]]
        begin = time.perf_counter()
        done = engine.generate(prompts, sampling, use_tqdm=False)
        sampled = sum(len(reply.token_ids) for one in done for reply in one.outputs)
        found[name] = sampled / (time.perf_counter() - begin)
        engine.reset_prefix_cache()  # else the second time would not compute the prompts
    print(json.dumps({"tokens a second": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
