"""The text of single tokens, by policy of a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from palestra.config import JobConfig, past_of

TokenText = Callable[[int], str]


def token_text(config: JobConfig, policy: str) -> TokenText:
    """Return the detokenizer of a policy or past version, with its model's tokenizer."""
    if not config.engine.has_model:
        from palestra.renderers import ByteTokenizer

        plain = ByteTokenizer()
        return lambda token: plain.decode([token])
    past = past_of(policy)
    return _of_model(config.policies[policy if past is None else past[0]].model)


@lru_cache(maxsize=8)
def _of_model(model: str) -> TokenText:
    from palestra.models.catalog import model_folder

    # Who looks at a run sends no request to anybody, whatever model its folder names.
    if (file := Path(model_folder(model, ask=False)) / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        # Neither transformers nor torch, whose import takes seconds; the text of a token is the same.
        plain = Tokenizer.from_file(str(file))
        return lambda token: str(plain.decode([token], skip_special_tokens=False))
    from palestra.models.adapter_files import tokenizer_source
    from palestra.models.causal_lm import load_tokenizer

    tokenizer = load_tokenizer(str(model_folder(tokenizer_source(model), ask=False)))
    return lambda token: str(tokenizer.decode([token]))
