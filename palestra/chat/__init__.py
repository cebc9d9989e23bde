"""Messages to ids and back."""

from palestra.chat.byte_tokenizer import ByteTokenizer
from palestra.chat.chatml import ChatMLConfig, ChatMLRenderer
from palestra.chat.rendering import Renderer, render_prompt, reply_message, select_renderer

__all__ = [
    "ByteTokenizer",
    "ChatMLConfig",
    "ChatMLRenderer",
    "Renderer",
    "render_prompt",
    "reply_message",
    "select_renderer",
]
