"""Two conversations agree up to a message exactly when their chains do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from palestra.schemas.messages import ChatMessage, message_chain

# Few letters, and those of JSON, so that equal prefixes and near misses are common.
texts = st.text(alphabet='ab"\\,{}[]', max_size=3)
parts = st.fixed_dictionaries({"type": st.just("text"), "text": texts}) | st.fixed_dictionaries(
    {"type": st.just("image"), "digest": texts}
)
messages = st.builds(
    lambda role, content, name: ChatMessage.model_validate({"role": role, "content": content, "name": name}),
    st.sampled_from(["user", "assistant", "system"]),
    st.none() | texts | st.lists(parts, max_size=2),
    st.none() | texts,
)
conversations = st.lists(messages, max_size=4).map(tuple)


def equal_up_to(first, second) -> int:
    count = 0
    for a, b in zip(first, second, strict=False):
        if (a.role, a.content, a.name) != (b.role, b.content, b.name):
            break
        count += 1
    return count


@given(conversations, conversations, st.integers(0, 4))
def test_entries_are_equal_exactly_where_all_messages_before_are(first, tail, keep):
    second = first[:keep] + tail
    a, b = message_chain(first), message_chain(second)
    common = equal_up_to(first, second)
    for k in range(min(len(a), len(b))):
        assert (a[k] == b[k]) == (k < common)


@given(conversations)
def test_no_two_places_of_a_conversation_look_alike(conversation):
    chain = message_chain(conversation)
    assert len(set(chain)) == len(chain)
