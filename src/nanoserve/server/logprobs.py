"""Log-probabilities in OpenAI's two shapes, the same whether an answer is streamed or not.

They are the raw model's, before temperature, penalties, bias and filters. Invariants: the lists of
a completion have one entry for every token that was counted, an end token included, and offsets
that go on from chunk to chunk; the `bytes` of a chat answer, put together, are the bytes of its
content. JSON knows no infinity: what cannot happen has `IMPOSSIBLE`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from nanoserve.request import FinishReason, TokenLogprob
from nanoserve.server.positions import TextPositions
from nanoserve.server.protocol import Prepared
from nanoserve.tokenizer import Tokenizer

IMPOSSIBLE = -9999.0
"""Stands for minus infinity, as in vLLM."""


def ends_unseen(reason: FinishReason | None, stop_reason: str | int | None) -> bool:
    """Whether the last token shows nowhere: it ended the text, being an end token or a stop id."""
    return reason is FinishReason.STOP and not isinstance(stop_reason, str)


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text, `bytes:...` where that is no UTF-8, `token_id:...` where it has none.

    The last are ids that a padded model has beyond its tokenizer, or that nobody assigned.
    """
    name = tokenizer.token_text(token_id) if token_id < tokenizer.num_ids else ""
    return name or f"token_id:{token_id}"


def finite(logprob: float) -> float:
    """`logprob` as JSON can write it."""
    return max(logprob, IMPOSSIBLE)


class CompletionLogprobs:
    """`choices[].logprobs` of a completion, piece by piece, for one choice.

    Offsets are characters into `choices[].text`: from the start of the prompt where it is echoed,
    else of the generated text. A token whose text a stop string cut off keeps the place where it
    would stand. `skip_special_tokens` as in the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prepared: Prepared, *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._prepared = prepared
        self._start = len(prepared.echo_text)
        self._positions = TextPositions(
            tokenizer, skip_special_tokens=skip_special_tokens, continues=True
        )

    def of_prompt(self, scores: Sequence[TokenLogprob | None]) -> dict[str, list[Any]]:
        """The echoed prompt's part; nothing came before its first token, which has no score."""
        lists = empty_lists()
        tokens = zip(self._prepared.token_ids, scores, self._prepared.echo_offsets, strict=True)
        for token_id, score, offset in tokens:
            self._add(lists, token_id, score, offset)
        return lists

    def of_output(
        self, scores: Sequence[TokenLogprob], *, last_is_unseen: bool
    ) -> dict[str, list[Any]]:
        """The part of the next generated tokens."""
        lists = empty_lists()
        for place, score in enumerate(scores, start=1):
            self._add(lists, score.token_id, score, self._start + self._positions.num_chars)
            if not (last_is_unseen and place == len(scores)):
                self._positions.push(score.token_id)
        return lists

    def _add(
        self, lists: dict[str, list[Any]], token_id: int, score: TokenLogprob | None, offset: int
    ) -> None:
        lists["tokens"].append(token_name(self._tokenizer, token_id))
        lists["token_logprobs"].append(None if score is None else finite(score.logprob))
        lists["top_logprobs"].append(None if score is None else self._top(score))
        lists["text_offset"].append(offset)

    def _top(self, score: TokenLogprob) -> dict[str, float]:
        """The best, and the token itself. Of two tokens with one name the likelier stays."""
        top: dict[str, float] = {}
        for token_id, logprob in (*score.top, (score.token_id, score.logprob)):
            top.setdefault(token_name(self._tokenizer, token_id), finite(logprob))
        return top


def empty_lists() -> dict[str, list[Any]]:
    """The four lists of a completion, which are always of one length."""
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


class ChatLogprobs:
    """`choices[].logprobs.content` of a chat answer, piece by piece, for one choice.

    An entry leaves once the text that its token is part of has left: only then is it certain that
    no stop string cuts it. `bytes` are what the token adds to the content: none for an end token,
    fewer than it has where the content ends within it.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._positions = self._new_positions()
        self._num_chars = 0  # of the content that has left
        # Entries not yet certain, each with the number of characters that make it so.
        self._pending: deque[tuple[dict[str, Any], int]] = deque()
        self._settled = self._new_positions()

    def _new_positions(self) -> TextPositions:
        return TextPositions(
            self._tokenizer, skip_special_tokens=self._skip_special_tokens, continues=True
        )

    def push(
        self, scores: Sequence[TokenLogprob], text: str, reason: FinishReason | None, unseen: bool
    ) -> list[dict[str, Any]]:
        """The entries that became certain, now that `text` left with the tokens of `scores`.

        `reason` is not None on the last piece, `unseen` if the last token shows nowhere.
        """
        for place, score in enumerate(scores, start=1):
            silent = unseen and place == len(scores)
            data = b"" if silent else self._positions.push(score.token_id)
            self._pending.append((self._entry(score, data), self._positions.num_begun))
        self._num_chars += len(text)
        entries = []
        while self._pending and self._pending[0][1] <= self._num_chars:
            entries.append(self._settle())
        while reason is not None and self._pending:
            entries.append(self._settle())
        return entries

    def _settle(self) -> dict[str, Any]:
        """The next entry, with the bytes of it that the content has."""
        entry, _ = self._pending.popleft()
        num_bytes = self._settled.num_bytes_before(bytes(entry["bytes"]), self._num_chars)
        entry["bytes"] = entry["bytes"][:num_bytes]
        return entry

    def _entry(self, score: TokenLogprob, data: bytes) -> dict[str, Any]:
        return {
            "token": token_name(self._tokenizer, score.token_id),
            "logprob": finite(score.logprob),
            "bytes": list(data),
            "top_logprobs": [self._alternative(*alternative) for alternative in score.top],
        }

    def _alternative(self, token_id: int, logprob: float) -> dict[str, Any]:
        known = token_id < self._tokenizer.num_ids
        return {
            "token": token_name(self._tokenizer, token_id),
            "logprob": finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)) if known else None,
        }
