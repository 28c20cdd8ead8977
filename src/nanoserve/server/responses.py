"""From what the engine gives to what clients get: JSON answers and server-sent events.

Pure functions of the call and its deltas: no engine, no event loop, no clock. Invariant: an answer
in pieces is the whole one cut up. The same code makes both, so texts, log-probabilities, offsets
and counts are equal, and each choice has exactly one piece with a `finish_reason`, its last.

Every event is ASCII: clients that split a stream into lines also split at U+2028 and U+0085, which
JSON would let through. What does not change from token to token is written once, at the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanoserve.request import (
    CompletionOutput,
    FinishReason,
    RequestDelta,
    RequestOutput,
    TokenLogprob,
)
from nanoserve.server.errors import ApiError, dump
from nanoserve.server.logprobs import ChatLogprobs, CompletionLogprobs, ends_unseen
from nanoserve.server.protocol import Call, Prepared
from nanoserve.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"

_REASONS = {None: None, FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
"""The reasons that an answer can give; whoever calls makes errors of the others."""
_FINISH = {reason: dump(word) for reason, word in _REASONS.items()}

PromptLogprobs = Sequence[TokenLogprob | None]


class Writer:
    """One HTTP request's answer, streamed (`events`, then `end`) or not (`whole`).

    `reply_id` begins with "cmpl-" or "chatcmpl-", `created` is in whole seconds, `model` and
    `fingerprint` are shown as they are. Choice j of prompt i has index i * n + j on the wire.
    Deltas and outputs that ended as anything but STOP or LENGTH are the caller's to report.
    """

    def __init__(
        self,
        call: Call,
        prepared: Sequence[Prepared],
        *,
        reply_id: str,
        created: int,
        model: str,
        fingerprint: str | None,
        tokenizer: Tokenizer,
    ) -> None:
        self._call = call
        self._prepared = list(prepared)
        self._tokenizer = tokenizer
        self._names = {
            "id": reply_id,
            "object": "text_completion" if call.kind == "completion" else "chat.completion",
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        chunk_names = dict(self._names)
        if call.kind == "chat":
            chunk_names["object"] = "chat.completion.chunk"
        self._head = f'data: {dump(chunk_names)[:-1]},"choices":['
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in self._prepared)
        self._num_completion_tokens = 0
        self._choices = [self._new_choice(i, j) for i, j in self._places()]
        self._heads = [f'{self._head}{{"index":{k},' for k in range(len(self._choices))]
        # Where prompts are scored, choices wait for the scores, which come with choice 0.
        self._scores: dict[int, PromptLogprobs] = {}
        self._early: dict[int, list[RequestDelta]] = {}

    def _places(self) -> list[tuple[int, int]]:
        choices = range(self._call.params.n)
        return [(i, j) for i in range(len(self._prepared)) for j in choices]

    def _new_choice(self, prompt_index: int, index: int) -> CompletionChoice | ChatChoice:
        kinds: dict[str, type[CompletionChoice] | type[ChatChoice]]
        kinds = {"completion": CompletionChoice, "chat": ChatChoice}
        return kinds[self._call.kind](self._call, self._prepared[prompt_index], self._tokenizer)

    def events(self, prompt_index: int, delta: RequestDelta) -> bytes:
        """The events that one delta gives; none (b"") where others must come first."""
        place = prompt_index * self._call.params.n
        parts: list[str] = []
        for ready in self._ready(prompt_index, delta):
            self._num_completion_tokens += len(ready.token_ids)
            tail = self._tail()
            head = self._heads[place + ready.index]
            scores = self._scores.get(prompt_index)
            for body in self._choices[place + ready.index].pieces(ready, scores):
                parts += (head, body, tail)
        return "".join(parts).encode("ascii")

    def _ready(self, prompt_index: int, delta: RequestDelta) -> Sequence[RequestDelta]:
        if self._call.params.prompt_logprobs is None or prompt_index in self._scores:
            return (delta,)
        if delta.prompt_logprobs is None:
            self._early.setdefault(prompt_index, []).append(delta)
            return ()
        self._scores[prompt_index] = delta.prompt_logprobs
        return (delta, *self._early.pop(prompt_index, ()))

    def _tail(self) -> str:
        """What closes a chunk: no `usage`, null, or the count so far."""
        if self._call.continuous_usage:
            return f'],"usage":{dump(self._usage())}}}\n\n'
        return '],"usage":null}\n\n' if self._call.include_usage else "]}\n\n"

    def end(self) -> bytes:
        """The last events: the usage, if it was asked for, and the mark that all was sent."""
        if not self._call.include_usage:
            return DONE
        return f'{self._head}],"usage":{dump(self._usage())}}}\n\n'.encode("ascii") + DONE

    def _usage(self) -> dict[str, int]:
        """Tokens: prompts once each, however many choices; an end token counts."""
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_completion_tokens,
        }

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer in one piece, from the outputs of all prompts, in the prompts' order.

        With `best_of` only the tokens of the choices that are shown are counted.
        """
        choices: list[dict[str, Any]] = []
        for output in outputs:
            for completion in output.outputs:
                self._num_completion_tokens += len(completion.token_ids)
                choice = self._choices[len(choices)].whole(completion, output.prompt_logprobs)
                choices.append({"index": len(choices), **choice})
        answer: dict[str, Any] = {**self._names, "choices": choices, "usage": self._usage()}
        if self._call.kind == "chat" and self._call.return_token_ids:
            answer["prompt_token_ids"] = list(self._prepared[0].token_ids)
        return answer


class CompletionChoice:
    """One choice of `/v1/completions`. The first piece brings the prompt, if it is echoed."""

    def __init__(self, call: Call, prepared: Prepared, tokenizer: Tokenizer) -> None:
        self._prepared = prepared
        self._returns_ids = call.return_token_ids
        self._scores_prompt = call.params.prompt_logprobs is not None
        self._logprobs = (
            None
            if call.params.logprobs is None
            else CompletionLogprobs(
                tokenizer, prepared, skip_special_tokens=call.params.skip_special_tokens
            )
        )
        self._has_begun = False

    def pieces(self, delta: RequestDelta, scores: PromptLogprobs | None) -> list[str]:
        """The members of the choice in the one chunk that `delta` gives, but for its index."""
        text, extras = delta.text, ""
        is_first, self._has_begun = not self._has_begun, True
        if is_first:
            text = self._prepared.echo_text + text
        if self._returns_ids:
            extras = members(self._ids(delta.token_ids, with_prompt=is_first))
        logprobs = "null"
        if self._logprobs is not None:
            unseen = ends_unseen(delta.finish_reason, delta.stop_reason)
            prompt_scores = scores if is_first else None
            logprobs = dump(self._lists(delta.logprobs or (), prompt_scores, unseen))
        return [
            f'"text":{dump(text)},"logprobs":{logprobs},'
            f'"finish_reason":{_FINISH[delta.finish_reason]}{extras}}}'
        ]

    def whole(self, output: CompletionOutput, scores: PromptLogprobs | None) -> dict[str, Any]:
        """The choice in one piece, but for its index."""
        unseen = ends_unseen(output.finish_reason, output.stop_reason)
        choice: dict[str, Any] = {
            "text": self._prepared.echo_text + output.text,
            "logprobs": None
            if self._logprobs is None
            else self._lists(output.logprobs or (), scores, unseen),
            "finish_reason": _REASONS[output.finish_reason],
        }
        if self._returns_ids:
            choice |= self._ids(output.token_ids, with_prompt=True)
        return choice

    def _lists(
        self, output: Sequence[TokenLogprob], prompt: PromptLogprobs | None, unseen: bool
    ) -> dict[str, list[Any]]:
        assert self._logprobs is not None
        lists = self._logprobs.of_output(output, last_is_unseen=unseen)
        if prompt is None or not self._scores_prompt:
            return lists
        before = self._logprobs.of_prompt(prompt)
        return {name: before[name] + lists[name] for name in lists}

    def _ids(self, token_ids: Sequence[int], *, with_prompt: bool) -> dict[str, list[int]]:
        ids = {"token_ids": list(token_ids)}
        return ids | {"prompt_token_ids": list(self._prepared.token_ids)} if with_prompt else ids


class ChatChoice:
    """One choice of `/v1/chat/completions`: a role, then content, then a reason."""

    def __init__(self, call: Call, prepared: Prepared, tokenizer: Tokenizer) -> None:
        self._returns_ids = call.return_token_ids
        self._logprobs = (
            None
            if call.params.logprobs is None
            else ChatLogprobs(tokenizer, skip_special_tokens=call.params.skip_special_tokens)
        )
        self._has_begun = False

    def pieces(self, delta: RequestDelta, _: PromptLogprobs | None) -> list[str]:
        """The members of the choice in each chunk that `delta` gives, but for its index."""
        pieces: list[str] = []
        if not self._has_begun:
            self._has_begun = True
            pieces.append(_piece('{"role":"assistant","content":""}'))
        entries = self._entries(delta, delta.logprobs)
        reason = delta.finish_reason
        if reason is None or delta.text or entries or (self._returns_ids and delta.token_ids):
            extras = members({"token_ids": list(delta.token_ids)}) if self._returns_ids else ""
            pieces.append(
                _piece(
                    f'{{"content":{dump(delta.text)}}}',
                    logprobs=dump(entries),
                    extras=extras,
                )
            )
        if reason is not None:
            pieces.append(_piece("{}", reason=reason))
        return pieces

    def whole(self, output: CompletionOutput, _: PromptLogprobs | None) -> dict[str, Any]:
        """The choice in one piece, but for its index."""
        choice: dict[str, Any] = {
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self._entries(output, output.logprobs, always=True),
            "finish_reason": _REASONS[output.finish_reason],
        }
        if self._returns_ids:
            choice["token_ids"] = list(output.token_ids)
        return choice

    def _entries(
        self,
        part: RequestDelta | CompletionOutput,
        scores: Sequence[TokenLogprob] | None,
        *,
        always: bool = False,
    ) -> dict[str, Any] | None:
        """The entries that are certain; None if there are none, unless `always`, or not asked."""
        if self._logprobs is None:
            return None
        unseen = ends_unseen(part.finish_reason, part.stop_reason)
        entries = self._logprobs.push(scores or (), part.text, part.finish_reason, unseen)
        return {"content": entries, "refusal": None} if entries or always else None


def _piece(
    delta: str, *, logprobs: str = "null", reason: FinishReason | None = None, extras: str = ""
) -> str:
    """The members of a chat chunk's choice, but for its index."""
    return f'"delta":{delta},"logprobs":{logprobs},"finish_reason":{_FINISH[reason]}{extras}}}'


def members(values: dict[str, Any]) -> str:
    """`values` as further members of a JSON object."""
    return "," + dump(values)[1:-1]


def error_event(error: ApiError) -> bytes:
    """How a stream that has begun ends with an error."""
    return f"data: {dump(error.body())}\n\n".encode("ascii") + DONE
