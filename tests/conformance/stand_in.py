"""A tokenizer for a family of which only a vocabulary is at hand, its own or another's."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken


class StandIn:
    """The vocabulary of `base`, which gets a control token for each one that a renderer asks for while it is made.

    Once `frozen`, it answers as any tokenizer does: a token that it does not have is unknown.
    """

    unk_token_id = None
    name_or_path = "stand-in"
    chat_template = ""

    def __init__(self, base: Any) -> None:
        """`base` is a fast tokenizer of transformers."""
        backend = base.backend_tokenizer
        self.backend = type(backend).from_str(backend.to_str())
        self.frozen = False
        self.specials: set[int] = {i for i, t in self.backend.get_added_tokens_decoder().items() if t.special}
        self.eos_token_id = self.convert_tokens_to_ids("<|stand_in_end|>")

    def __len__(self) -> int:
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @property
    def backend_tokenizer(self) -> Any:
        return self.backend

    def convert_tokens_to_ids(self, token: Any) -> Any:
        if isinstance(token, list):
            return [self.convert_tokens_to_ids(t) for t in token]
        found = self.backend.token_to_id(token)
        if found is None and not self.frozen:
            self.backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
            found = self.backend.token_to_id(token)
        if found is not None and not self.frozen:
            self.specials.add(found)
        return found

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        if not self.frozen and text.startswith(
            ("<", "｜")
        ):  # a renderer that asks in this way whether there is such a token
            self.convert_tokens_to_ids(text)
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def __call__(
        self, text: str, add_special_tokens: bool = False, return_offsets_mapping: bool = False
    ) -> dict[str, Any]:
        encoding = self.backend.encode(text, add_special_tokens=False)
        return {"input_ids": list(encoding.ids), "offset_mapping": list(encoding.offsets)}

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def get_vocab(self) -> dict[str, int]:
        return dict(self.backend.get_vocab())

    @property
    def all_special_tokens(self) -> list[str]:
        return [self.backend.id_to_token(i) for i in sorted(self.specials)]

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self.specials)
