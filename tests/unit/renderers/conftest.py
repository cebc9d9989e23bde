"""Tokenizers and the renderers chosen for them."""

from __future__ import annotations

import pytest

from palestra.renderers import ByteTokenizer, ChatMLRenderer, select_renderer


@pytest.fixture(scope="session")
def byte_renderer():
    return ChatMLRenderer(ByteTokenizer())


@pytest.fixture(scope="session")
def tiny_tokenizer():
    from palestra.models.causal_lm import load_tokenizer

    return load_tokenizer("tiny-random")


@pytest.fixture(scope="session")
def smollm_tokenizer():
    from palestra.models.causal_lm import load_tokenizer

    return load_tokenizer("SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def tiny_renderer(tiny_tokenizer):
    return select_renderer(tiny_tokenizer)


@pytest.fixture(scope="session")
def smollm_renderer(smollm_tokenizer):
    return select_renderer(smollm_tokenizer)


@pytest.fixture(params=["bytes", "tiny", pytest.param("smollm", marks=pytest.mark.model)])
def renderer(request):
    """Each renderer of ours."""
    name = {"bytes": "byte_renderer", "tiny": "tiny_renderer", "smollm": "smollm_renderer"}[request.param]
    return request.getfixturevalue(name)
