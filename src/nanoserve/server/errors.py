"""The one error that clients see: OpenAI's four keys, whatever went wrong.

Invariant: its body can always be sent. Text that no UTF-8 spells (a lone surrogate in what a client
sent) is replaced here, and long values and messages are cut, so that none is as large as its
request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

dump = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
"""JSON in ASCII, without a space to spare; ValueError for a number that JSON has not."""

MAX_SHOWN_CHARS = 80
"""Of a client's value in a message."""
MAX_MESSAGE_CHARS = 1000
"""Of a message; templates and tokenizers may quote what they were given in theirs."""


class ApiError(Exception):
    """An answer other than 2xx.

    `type` is OpenAI's class of errors, `param` the field at fault ("messages[0].content"), `code`
    what a program may test. `headers` go out with the status.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",  # noqa: A002 - the wire's own name
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.message = sendable(cut(message, MAX_MESSAGE_CHARS))
        super().__init__(self.message)
        self.status = status
        self.type = type
        self.param = None if param is None else sendable(param)
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, dict[str, str | None]]:
        """All four keys, always; `param` and `code` may be null."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def sendable(text: str) -> str:
    """`text` with a question mark for each lone surrogate."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def shown(value: object) -> str:
    """A client's value, for a message: short, and nothing of what a container holds."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value[: MAX_SHOWN_CHARS + 1] if isinstance(value, str) else value)
    return cut(text, MAX_SHOWN_CHARS)


def cut(text: str, max_chars: int) -> str:
    """The beginning of a text that is longer."""
    return text if len(text) <= max_chars else text[:max_chars] + "..."
