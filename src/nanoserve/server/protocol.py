"""From a request's body to what the engine is asked: OpenAI's fields, checked, with their meaning.

Pure functions: no engine, no event loop. `read_completion` and `read_chat` make a `Call` of a body,
`prepare` the token ids of its prompts; the latter may take long and belongs in a worker thread.
Invariant: whatever a client sends gives a `Call` that the engine accepts, or an `ApiError` 400 (404
for a model that is not served) that names the field.

What OpenAI leaves open is decided so: a prompt that fits although `max_tokens` does not is served
and ends with `length` (refused under --strict-context); an empty prompt continues from
`<|endoftext|>`; special tokens count in a completion's prompt text, never in a message.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NoReturn

from nanoserve.chat import ChatFormat, Message, start_token_id
from nanoserve.config import EngineConfig
from nanoserve.engine.executor import ExecutorSpec
from nanoserve.request import SamplingParams
from nanoserve.server.bodies import (
    CHAT_FIELDS,
    CHAT_UNSUPPORTED,
    COMPLETION_FIELDS,
    HARMLESS,
    UNSUPPORTED,
    Fields,
    read_fields,
    unsupported,
)
from nanoserve.server.errors import ApiError, shown
from nanoserve.server.positions import TextPositions
from nanoserve.tokenizer import Tokenizer

__all__ = [
    "ApiError",
    "Call",
    "Prepared",
    "Prompt",
    "Served",
    "prepare",
    "read_chat",
    "read_completion",
    "read_json",
]

logger = logging.getLogger(__name__)

Prompt = str | tuple[int, ...]

DEFAULT_COMPLETION_TOKENS = 16

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "min_tokens", "seed", "n", "best_of"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
)
"""Fields that mean the same on the wire and in `SamplingParams`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What this server serves, as far as reading a request needs it.

    `model_names` are the names it answers to; the first is what it calls itself. `num_token_ids`
    is how many ids exist: those that both tokenizer and model know. `start_token_id` is what an
    empty prompt is continued from, None where the tokenizer has no such token.
    """

    model_names: tuple[str, ...]
    max_model_len: int
    num_token_ids: int
    start_token_id: int | None
    chat: ChatFormat
    strict_context: bool = False
    context_slides: bool = False
    max_prompts: int = 2048
    max_sequences: int = 4096
    max_logprobs: int = 2**23

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        spec: ExecutorSpec,
        tokenizer: Tokenizer,
        *,
        model_names: tuple[str, ...],
        chat_template: str | None = None,
    ) -> Served:
        """Of an engine's parts. Raises ValueError for a chat template that does not compile."""
        return cls(
            model_names=model_names,
            max_model_len=spec.max_model_len,
            num_token_ids=spec.num_token_ids,
            start_token_id=start_token_id(tokenizer),
            chat=ChatFormat(tokenizer, chat_template),
            strict_context=config.scheduler.strict_context,
            context_slides=config.scheduler.context_overflow == "slide",
        )

    def check_model(self, name: str) -> None:
        """Raise ApiError 404 unless `name` is served."""
        if name not in self.model_names:
            raise ApiError(
                f"the model {shown(name)} is not served here, only {', '.join(self.model_names)} "
                f"(--served-model-name)",
                status=404,
                param="model",
                code="model_not_found",
            )

    def longest_prompt(self, max_tokens: int | None) -> int:
        """Only a prompt that nothing is to follow may fill the context."""
        return self.max_model_len if max_tokens == 0 else self.max_model_len - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request, read. `prompts` is empty for a chat, `messages` for a completion.

    What only the engine needs is in `params`: `logprobs` and `prompt_logprobs` too.
    """

    kind: Literal["completion", "chat"]
    model: str
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[Message, ...] = ()
    params: SamplingParams
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    priority: int = 0
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One prompt as the engine gets it.

    `echo_text` is the text of its tokens, without those that the server put before it (the
    tokenizer's prefix, the start of an empty prompt), and `echo_offsets` where each token stands
    in it, in characters. Both are empty unless the prompt is to be echoed.
    """

    prompt: str | None
    token_ids: tuple[int, ...]
    echo_text: str = ""
    echo_offsets: tuple[int, ...] = ()


def read_json(raw: bytes) -> object:
    """A request's body as a JSON value. Raises ApiError 400 for what is none.

    NaN and the infinities are no JSON, though Python reads them.
    """
    try:
        return json.loads(raw, parse_constant=_no_constant)
    except RecursionError:
        raise ApiError("the request body is nested too deeply") from None
    except ValueError as error:  # no JSON, no UTF-8, or an integer of thousands of digits
        raise ApiError(f"the request body is not valid JSON: {_reason(error)}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _reason(error: ValueError) -> str:
    """What is wrong, without the body itself, which a UnicodeDecodeError quotes."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    return str(error)


def read_completion(body: object, served: Served) -> Call:
    """A `/v1/completions` body. Raises ApiError 400 naming the field, 404 for another model."""
    fields = _read(body, COMPLETION_FIELDS, UNSUPPORTED, served, required="prompt")
    prompts: tuple[Prompt, ...] = fields.get("prompt", ("",))  # null: the end of text, as ""
    max_tokens = _max_tokens(fields)
    logprobs, echo = fields.get("logprobs"), fields.get("echo", False)
    call = Call(
        kind="completion",
        prompts=prompts,
        echo=echo,
        params=_sampling_params(
            fields,
            served,
            max_tokens=DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens,
            logprobs=logprobs,
            prompt_logprobs=logprobs if echo else None,
        ),
        **_common(fields),
    )
    if call.stream and call.params.num_choices > 1 and call.params.best_of is not None:
        raise ApiError("best_of cannot be streamed: send stream false", param="best_of")
    _check_sizes(call, served)
    return call


def read_chat(body: object, served: Served) -> Call:
    """A `/v1/chat/completions` body. Raises ApiError 400 naming the field, 404 for a model."""
    fields = _read(body, CHAT_FIELDS, CHAT_UNSUPPORTED, served, required="messages")
    if fields.get("messages") is None:
        raise _missing("messages")
    wants_logprobs = fields.get("logprobs", False)
    if "top_logprobs" in fields and not wants_logprobs:
        raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return Call(
        kind="chat",
        messages=fields["messages"],
        add_generation_prompt=fields.get("add_generation_prompt", True),
        params=_sampling_params(
            fields,
            served,
            max_tokens=_max_tokens(fields),
            logprobs=fields.get("top_logprobs", 0) if wants_logprobs else None,
            prompt_logprobs=None,
        ),
        **_common(fields),
    )


def _read(
    body: object,
    fields: Fields,
    refused: Mapping[str, tuple[object, ...]],
    served: Served,
    *,
    required: str,
) -> dict[str, Any]:
    """Both required fields are there, the model is served, and nothing asks for what is not."""
    values = read_fields(body, fields)
    assert isinstance(body, dict), "read_fields refuses any other"
    if "model" not in values:
        raise _missing("model")
    served.check_model(values["model"])
    if required not in body:
        raise _missing(required)
    for name, harmless in refused.items():
        if body.get(name) is not None and body[name] not in harmless:
            raise unsupported(name)
    for name in body.keys() - fields.keys() - refused.keys() - HARMLESS:
        _log_ignored(name[:64])
    return values


def _missing(name: str) -> ApiError:
    return ApiError(f"{name} is required", param=name, code="missing_required_parameter")


@lru_cache(maxsize=256)
def _log_ignored(name: str) -> None:
    """Once a name, or nearly: clients may invent any number of them."""
    logger.debug("the unknown request field %r is ignored", name)


def _max_tokens(fields: Mapping[str, Any]) -> int | None:
    """`max_completion_tokens` is the newer name, and wins."""
    value: int | None = fields.get("max_completion_tokens", fields.get("max_tokens"))
    return value


def _common(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What both kinds of call have beside their sampling."""
    stream, options = fields.get("stream", False), fields.get("stream_options")
    if options is not None and not stream:
        raise ApiError("stream_options needs stream to be true", param="stream_options")
    options = options or {}
    return {
        "model": fields["model"],
        "stream": stream,
        "include_usage": options.get("include_usage", False),
        "continuous_usage": options.get("continuous_usage_stats", False),
        "priority": fields.get("priority", 0),
        "add_special_tokens": fields.get("add_special_tokens"),
        "truncate_prompt_tokens": _truncation(fields.get("truncate_prompt_tokens")),
        "return_token_ids": fields.get("return_token_ids", False),
    }


def _truncation(value: int | None) -> int | None:
    """Tokens to keep; -1 is as many as fit."""
    if value == 0:
        raise ApiError(
            "truncate_prompt_tokens must be at least 1, or -1 for as many as fit, got 0",
            param="truncate_prompt_tokens",
        )
    return value


def _sampling_params(
    fields: Mapping[str, Any],
    served: Served,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    _check_ids("logit_bias", fields.get("logit_bias", ()), served)
    _check_ids("stop_token_ids", fields.get("stop_token_ids", ()), served)
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            **{name: fields[name] for name in _SAMPLING if name in fields},
        )
    except ValueError as error:  # its message begins with the field's name
        raise ApiError(str(error), param=str(error).split(maxsplit=1)[0]) from None


def _check_ids(name: str, token_ids: Mapping[int, float] | tuple[int, ...], served: Served) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < served.num_token_ids:
            raise ApiError(
                f"{name}: the token id {shown(token_id)} is outside the vocabulary "
                f"(0 to {served.num_token_ids - 1})",
                param=name,
            )


def _check_sizes(call: Call, served: Served) -> None:
    """Everything one request may ask for is bounded before anything is made of it."""
    num_prompts, num_choices = len(call.prompts), call.params.num_choices
    if num_prompts > served.max_prompts:
        raise ApiError(
            f"prompt holds {num_prompts} prompts, one request may have {served.max_prompts}",
            param="prompt",
        )
    if num_prompts * num_choices > served.max_sequences:
        raise ApiError(
            f"{num_prompts} prompts with {num_choices} choices each are "
            f"{num_prompts * num_choices} sequences, one request may have {served.max_sequences}",
            param="n",
        )


def prepare(call: Call, tokenizer: Tokenizer, served: Served) -> list[Prepared]:
    """The prompts of a call as token ids, in their order.

    Takes time in proportion to the text, so not on the event loop. Raises ApiError 400 for a prompt
    that the tokenizer or the template refuses, an id outside the vocabulary (`param` "prompt") and
    what does not fit the context (`code` "context_length_exceeded", with the counts), and for more
    log-probabilities than one answer may hold.
    """
    if call.kind == "chat":
        prepared = [_prepare_chat(call, served)]
    else:
        prepared = [_prepare_prompt(prompt, call, tokenizer, served) for prompt in call.prompts]
    _check_num_logprobs(call, prepared, served)
    return prepared


def _check_num_logprobs(call: Call, prepared: list[Prepared], served: Served) -> None:
    """They are kept until the answer is whole, so one answer may not hold any number of them."""
    params = call.params
    if params.logprobs is None:
        return
    num_tokens = 0
    for prompt in prepared:
        num_prompt_tokens = len(prompt.token_ids)
        room = served.max_model_len - num_prompt_tokens
        longest = room if params.max_tokens is None else params.max_tokens
        longest = longest if served.context_slides else min(longest, room)
        num_tokens += params.num_choices * longest
        num_tokens += num_prompt_tokens if call.echo else 0
    num_logprobs = num_tokens * (1 + params.logprobs)
    if num_logprobs > served.max_logprobs:
        raise ApiError(
            f"the answer could hold {num_logprobs} log-probabilities, one may hold "
            f"{served.max_logprobs}: ask for fewer prompts, choices, tokens or logprobs",
            param="logprobs",
        )


def _prepare_chat(call: Call, served: Served) -> Prepared:
    try:
        prompt = served.chat.encode(
            call.messages,
            add_generation_prompt=call.add_generation_prompt,
            add_special_tokens=call.add_special_tokens,
        )
    except ValueError as error:
        raise ApiError(str(error), param="messages") from None
    token_ids = _truncated(prompt.token_ids, call, served)
    _check_length(len(token_ids), call, served, param="messages")
    _check_ids("messages", token_ids, served)
    return Prepared(prompt=prompt.text, token_ids=token_ids)


def _prepare_prompt(prompt: Prompt, call: Call, tokenizer: Tokenizer, served: Served) -> Prepared:
    if isinstance(prompt, str):
        num_added, encoded = _encode(prompt, call, tokenizer, served)
    else:
        num_added, encoded = 0, prompt
    token_ids = _truncated(encoded, call, served)
    _check_length(len(token_ids), call, served, param="prompt")
    _check_ids("prompt", token_ids, served)
    text = prompt if isinstance(prompt, str) else None
    if not call.echo:
        return Prepared(prompt=text, token_ids=token_ids)
    num_hidden = max(0, num_added - (len(encoded) - len(token_ids)))
    positions = TextPositions(tokenizer, continues=num_hidden > 0)
    offsets = [0] * num_hidden
    for token_id in token_ids[num_hidden:]:
        offsets.append(positions.num_chars)
        positions.push(token_id)
    return Prepared(
        prompt=text,
        token_ids=token_ids,
        echo_text=tokenizer.decode(token_ids[num_hidden:], continues=num_hidden > 0),
        echo_offsets=tuple(offsets),
    )


def _encode(
    text: str, call: Call, tokenizer: Tokenizer, served: Served
) -> tuple[int, tuple[int, ...]]:
    """Token ids of a text, and how many of the first the server added."""
    prefix = () if call.add_special_tokens is False else tokenizer.prefix_token_ids
    try:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
    except ValueError as error:
        raise ApiError(f"prompt: {error}", param="prompt") from None
    if prefix or token_ids:
        return len(prefix), (*prefix, *token_ids)
    if served.start_token_id is None:
        raise ApiError(
            "the prompt is empty, and this tokenizer has no token to begin a text with",
            param="prompt",
        )
    return 1, (served.start_token_id,)


def _truncated(token_ids: tuple[int, ...], call: Call, served: Served) -> tuple[int, ...]:
    """The last of them, if `truncate_prompt_tokens` asks for it; -1 keeps what is not refused."""
    limit, max_tokens = call.truncate_prompt_tokens, call.params.max_tokens
    if limit is None:
        return token_ids
    if limit == -1:
        limit = served.longest_prompt(max_tokens)
        if served.strict_context and max_tokens is not None:
            limit = min(limit, served.max_model_len - max_tokens)
    return token_ids[-max(1, limit) :]


def _check_length(num_tokens: int, call: Call, served: Served, *, param: str) -> None:
    """A prompt must leave room for a token; under --strict-context, for all that may follow."""
    max_tokens = call.params.max_tokens
    wanted = num_tokens + (1 if max_tokens is None else max_tokens)
    fits = num_tokens <= served.longest_prompt(max_tokens)
    if fits and (wanted <= served.max_model_len or not served.strict_context):
        return
    at_least = "at least " if max_tokens is None else ""
    raise ApiError(
        f"This model's maximum context length is {served.max_model_len} tokens "
        f"(--max-model-len), but {at_least}{wanted} were requested: {num_tokens} in the {param}, "
        f"{at_least}{wanted - num_tokens} in the completion. Shorten one of them.",
        param=param,
        code="context_length_exceeded",
    )
