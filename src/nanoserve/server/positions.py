"""Where each token stands in the text: characters before it, and bytes of it that show.

Log-probabilities are told per token, text is told in characters, and the two do not meet: a
character may take several tokens, a stop string cuts through the middle of one, an end token shows
nowhere. This is the one place that counts. Invariant: the characters counted are those of
`Tokenizer.decode` with the same `continues` and `skip_special_tokens`.
"""

from __future__ import annotations

import codecs

from nanoserve.tokenizer import Tokenizer


class TextPositions:
    """Counts the characters of a text that arrives token by token.

    `num_chars` are those that are whole so far; `num_begun` counts the one whose bytes have only
    begun, too.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = False, continues: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._at_start = not continues
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.num_chars = 0

    @property
    def num_begun(self) -> int:
        return self.num_chars + bool(self._utf8.getstate()[0])

    def push(self, token_id: int) -> bytes:
        """Count what a token adds to the text, and return it."""
        data = self._tokenizer.spell(
            token_id, at_start=self._at_start, skip_special_tokens=self._skip_special_tokens
        )
        self._at_start = self._at_start and not data
        self.num_chars += len(self._utf8.decode(data))
        return data

    def flush(self) -> None:
        """No token follows: a character left unfinished counts, for it shows as U+FFFD."""
        self.num_chars += len(self._utf8.decode(b"", final=True))

    def num_bytes_before(self, data: bytes, num_chars: int) -> int:
        """How many bytes of `data`, which come next, belong to the first `num_chars` characters.

        They are counted as far as that.
        """
        for place in range(len(data)):
            self.num_chars += len(self._utf8.decode(data[place : place + 1]))
            if self.num_begun > num_chars:
                return place
        return len(data)
