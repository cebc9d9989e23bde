"""Fields of requests that a dialect does not act on: ignored, refused, or treated as the job says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from palestra.errors import UnsupportedField

# Fields that change what is sampled. They are refused also where unknown fields are ignored.
CHANGES_REPLY = frozenset(
    {
        *("allowed_token_ids", "audio", "bad_words", "best_of", "function_call", "functions", "ignore_eos", "min_p"),
        *("length_penalty", "modalities", "repetition_penalty", "suffix", "typical_p", "use_beam_search"),
        *("guided_choice", "guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex"),
        *("add_generation_prompt", "chat_template", "chat_template_kwargs", "continue_final_message", "documents"),
        *("background", "conversation", "max_tool_calls", "previous_response_id", "prompt", "truncation"),
        *(
            "add_special_tokens",
            "custom_logit_processor",
            "ebnf",
            "enable_thinking",
            "json_schema",
            "logits_processors",
        ),
        *("lora_path", "mm_processor_kwargs", "regex", "stop_regex", "structural_tag", "structured_outputs"),
        *("container", "mcp_servers", "top_logprobs", "truncate_prompt_tokens", "web_search_options"),
    }
)
MAX_NAME = 100  # characters of a field's name in messages and counters


@dataclass(frozen=True, slots=True)
class OtherFields:
    """The fields of one request that its dialect does not act on.

    Attributes:
        ignored: names of wishes that have no effect here, such as `reasoning_effort` or `tools.web_search`.
        unknown: names and values of unknown fields.
    """

    ignored: tuple[str, ...] = ()
    unknown: tuple[tuple[str, Any], ...] = ()

    def refuse_unknown(self) -> None:
        """Raise UnsupportedField for the first unknown field."""
        for name, value in self.unknown:
            raise _unsupported(name, value, '; server.unknown_fields = "ignore" in the job has it ignored')

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all these fields, each once."""
        return tuple(dict.fromkeys((*self.ignored, *(name for name, _ in self.unknown))))


NO_OTHERS = OtherFields()


def other_fields(
    wanted: BaseModel, unused: Sequence[str], harmless: Mapping[str, Sequence[Any]], wishes: Sequence[str]
) -> OtherFields:
    """Sort the fields of a request that its model does not declare.

    Args:
        wanted: a request body, with its unknown fields in `model_extra`.
        unused: names of fields that never concern the reply, and are not counted.
        harmless: by field name, the values that request this server's behaviour.
        wishes: names of fields, or of keys in a field's object (`reasoning.effort`), that have no effect here.

    Raises:
        UnsupportedField: a field changes what is sampled.
    """
    ignored, unknown = [], []
    for name, value in _flat(wanted, wishes):
        if value is None or name in unused or value in harmless.get(name, ()):
            continue
        if name in CHANGES_REPLY:
            raise _unsupported(name, value)
        if name in wishes:
            ignored.append(name)
        else:
            unknown.append((name[:MAX_NAME], value))
    return OtherFields(tuple(ignored), tuple(unknown)) if ignored or unknown else NO_OTHERS


def _flat(wanted: BaseModel, wishes: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the undeclared fields of a request; an object in which keys are wishes counts key by key."""
    for name, value in (wanted.model_extra or {}).items():
        if isinstance(value, dict) and any(wish.startswith(f"{name}.") for wish in wishes):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        else:
            yield name, value


def _unsupported(name: str, value: Any, remedy: str = "") -> UnsupportedField:
    shown = f"{name[:MAX_NAME]} = {str(value)[:60]!r}"
    return UnsupportedField(f"{shown} is not supported by this server{remedy}", name[:MAX_NAME])
