"""Validation of requests before they join a batch: a pass that one request breaks fails for all."""

from __future__ import annotations

from palestra.errors import InvalidRequest
from palestra.types.calls import LARGEST_BIAS, MOST_LISTED, SAMPLING_RANGES, SamplingParams, TokenSequence

# Words, names, numbers, code, other scripts: places at which tokenizers differ.
SAMPLE_TEXT = "Tokenizers differ: 1,234.5 km, naïve Zürich, def f(x):\n    return x**2  # 東京, Москва 🙂\n"


def check_prompt(prompt: TokenSequence, vocab_size: int, most_tokens: int, sees: bool) -> None:
    """Raise InvalidRequest for a prompt that the model can't read.

    Args:
        prompt: [P] ids and their pictures.
        sees: whether the model is a vision-language model.
    """
    ids = prompt.ids
    if prompt.media and not sees:
        raise InvalidRequest("this model reads text only, and the prompt has a picture", "prompt")
    one_list = ids.ndim == 1 and 0 < len(ids) <= most_tokens
    if not one_list or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise InvalidRequest(
            f"a prompt has 1 to {most_tokens} tokens, and all are from 0 to {vocab_size - 1}", "prompt"
        )


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest for sampling parameters out of range, naming the field, and for unknown tokens."""
    for name, (least, most) in SAMPLING_RANGES.items():
        if not least <= getattr(sampling, name) <= most:  # NaN is in no range
            raise InvalidRequest(f"{name} has to be from {least} to {most}", name)
    if not all(abs(bias) <= LARGEST_BIAS for _, bias in sampling.logit_bias):
        raise InvalidRequest(f"biases are from -{LARGEST_BIAS:g} to {LARGEST_BIAS:g}", "logit_bias")
    for name, named in (
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ("stop_token_ids", sampling.stop_ids),
    ):
        if len(named) > MOST_LISTED or not all(0 <= token < vocab_size for token in named):
            raise InvalidRequest(f"{name} names at most {MOST_LISTED} tokens, from 0 to {vocab_size - 1}", name)
