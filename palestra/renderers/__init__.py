"""Renderers: each turns messages into token ids and token ids back into messages, for the chat format of one model."""

from palestra.renderers.base import (
    MessageDelta,
    NotInThisFormat,
    PlainTextStream,
    Renderer,
    Reply,
    ReplyForm,
    ReplyStream,
    shown_reply,
    whole_message,
)
from palestra.renderers.chatml import ChatMLConfig, ChatMLRenderer
from palestra.renderers.dialog import DialogRenderer
from palestra.renderers.package import PackageRenderer
from palestra.renderers.picture_layout import QWEN, PictureLayout, PictureTokens, layout_of
from palestra.renderers.selection import select_renderer
from palestra.renderers.vocabulary import ByteTokenizer, Vocabulary

__all__ = [
    "QWEN",
    "ByteTokenizer",
    "ChatMLConfig",
    "ChatMLRenderer",
    "DialogRenderer",
    "MessageDelta",
    "NotInThisFormat",
    "PackageRenderer",
    "PictureLayout",
    "PictureTokens",
    "PlainTextStream",
    "Renderer",
    "Reply",
    "ReplyForm",
    "ReplyStream",
    "Vocabulary",
    "layout_of",
    "select_renderer",
    "shown_reply",
    "whole_message",
]
