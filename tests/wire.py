"""A server of GPT-2's shape, as far as reading and writing JSON needs one: no model, no engine."""

from __future__ import annotations

from functools import cache
from typing import Any

from nanoserve.chat import ChatFormat
from nanoserve.server.protocol import Served
from nanoserve.tokenizer import Tokenizer

END = 50256
"""`<|endoftext|>`."""


@cache
def gpt2() -> Tokenizer:
    return Tokenizer.gpt2()


def served(**changes: Any) -> Served:
    """Of two names, the whole context and no template, but for `changes`."""
    values: dict[str, Any] = {
        "model_names": ("gpt2", "openai-community/gpt2"),
        "max_model_len": 1024,
        "num_token_ids": 50257,
        "start_token_id": END,
        "chat": ChatFormat(gpt2()),
    }
    return Served(**values | changes)
