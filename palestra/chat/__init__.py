"""Messages to ids and back."""

from palestra.chat.byte_tokenizer import ByteTokenizer
from palestra.chat.chatml import ChatMLConfig, ChatMLRenderer
from palestra.chat.package import PackageRenderer
from palestra.chat.rendering import Renderer, Reply, bridge, parse_reply, render
from palestra.chat.selection import select_renderer

__all__ = [
    "ByteTokenizer",
    "ChatMLConfig",
    "ChatMLRenderer",
    "PackageRenderer",
    "Renderer",
    "Reply",
    "bridge",
    "parse_reply",
    "render",
    "select_renderer",
]
