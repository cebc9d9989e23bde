"""Renderers: each turns messages into token ids and token ids back into messages, for the chat format of one model."""

from palestra.renderers.base import (
    MessageDelta,
    NotInThisFormat,
    PlainTextStream,
    Renderer,
    Reply,
    ReplyForm,
    ReplyStream,
    whole_message,
)
from palestra.renderers.chatml import ChatMLConfig, ChatMLRenderer
from palestra.renderers.package import PackageRenderer
from palestra.renderers.selection import select_renderer
from palestra.renderers.vocabulary import ByteTokenizer, Vocabulary

__all__ = [
    "ByteTokenizer",
    "ChatMLConfig",
    "ChatMLRenderer",
    "MessageDelta",
    "NotInThisFormat",
    "PackageRenderer",
    "PlainTextStream",
    "Renderer",
    "Reply",
    "ReplyForm",
    "ReplyStream",
    "Vocabulary",
    "select_renderer",
    "whole_message",
]
