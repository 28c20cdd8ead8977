"""Request bodies, field by field: how a JSON value is read, and what its schema says.

A table of fields is the only description of a body: it is what reads one, and what the OpenAPI
document shows. Invariant: whatever JSON arrives, a field is read or the client is told, by name,
what was got and what is allowed. `null` is absent. Nothing is coerced: true is no number, "1" no
integer, 1.0 no token id.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nanoserve.chat import ROLES, Message, MessageError, read_messages
from nanoserve.request import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    range_words,
)
from nanoserve.server.errors import ApiError, shown

Schema = dict[str, Any]

MAX_CHAT_TOP_LOGPROBS = 20
MAX_BEST_OF = 20
MAX_STOP_CHARS_IN_ALL = 20_000
"""Of one request's stop strings: what finds them takes memory, and the engine's time, for each."""

_INTEGER_KEY = re.compile("0|-?[1-9][0-9]{0,19}")
"""One spelling for each integer: of "7" and "07" in one object, one would be lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field. `read` takes its name and a value that is not null; it raises ApiError."""

    read: Callable[[str, Any], Any]
    schema: Schema


Fields = Mapping[str, Field]


def refusal(name: str, expected: str, value: object) -> ApiError:
    """A 400 that says which field, what it may be, and what was got."""
    return ApiError(f"{name} must be {expected}, got {shown(value)}", param=name)


def read_fields(body: object, fields: Fields) -> dict[str, Any]:
    """The fields of `body` that are there, read; unknown ones are left alone.

    Raises ApiError 400 for a body that is no object and for the first field that is wrong.
    """
    if not isinstance(body, dict):
        raise ApiError(f"the request body must be a JSON object, got {shown(body)}")
    return {
        name: field.read(name, body[name])
        for name, field in fields.items()
        if body.get(name) is not None
    }


def object_schema(fields: Fields, required: tuple[str, ...] = ()) -> Schema:
    """JSON Schema of a body; each field that may be left out may also be null."""
    properties = {
        name: field.schema if name in required else nullable(field.schema)
        for name, field in fields.items()
    }
    return {"type": "object", "properties": properties, "required": list(required)}


def nullable(schema: Schema) -> Schema:
    """`schema`, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def number(low: float, high: float = math.inf) -> Field:
    """A float or an integer in [low, high]."""

    def read(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refusal(name, "a number", value)
        return _within(name, value, low, high)

    return Field(read=read, schema={"type": "number", **_limits(low, high)})


def integer(low: float = -math.inf, high: float = math.inf) -> Field:
    """An integer in [low, high]; a bool is none, nor is 1.0."""

    def read(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise refusal(name, "an integer", value)
        return int(_within(name, value, low, high))

    return Field(read=read, schema={"type": "integer", **_limits(low, high)})


def _within(name: str, value: float, low: float, high: float) -> float:
    # NaN is within nothing, and an infinity only within what excludes no number.
    if low <= value <= high and (isinstance(value, int) or math.isfinite(value)):
        return value
    raise refusal(name, range_words(low, high), value)


def _limits(low: float, high: float) -> Schema:
    limits = {"minimum": low, "maximum": high}
    return {name: limit for name, limit in limits.items() if math.isfinite(limit)}


def boolean() -> Field:
    """True or false."""

    def read(name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise refusal(name, "true or false", value)
        return value

    return Field(read=read, schema={"type": "boolean"})


def string() -> Field:
    """Text that UTF-8 can spell."""

    def read(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise refusal(name, "a string", value)
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise refusal(name, "text without lone surrogates", value) from None
        return value

    return Field(read=read, schema={"type": "string"})


_STRING = string()


def token_id_list() -> Field:
    """A list of integers from 0 on; whether the vocabulary has them is asked later."""

    def read(name: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list):
            raise refusal(name, "a list of token ids", value)
        for place, token_id in enumerate(value):
            if type(token_id) is not int or token_id < 0:
                raise ApiError(
                    f"{name}[{place}] must be a token id, an integer from 0 on, "
                    f"got {shown(token_id)}",
                    param=name,
                )
        return tuple(value)

    return Field(read=read, schema={"type": "array", "items": {"type": "integer", "minimum": 0}})


_TOKEN_IDS = token_id_list()


def stop_strings() -> Field:
    """A string or a list of them. An empty one is refused: it would end every text at once."""

    def read(name: str, value: Any) -> tuple[str, ...]:
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list):
            raise refusal(name, "a string or a list of strings", value)
        if len(listed) > MAX_STOP_STRINGS:
            raise refusal(name, f"at most {MAX_STOP_STRINGS} strings", value)
        for place, item in enumerate(listed):
            where = name if isinstance(value, str) else f"{name}[{place}]"
            if not _STRING.read(where, item):
                raise refusal(where, "a non-empty string", item)
            if len(item) > MAX_STOP_CHARS:
                raise ApiError(
                    f"{where} must have at most {MAX_STOP_CHARS} characters, got {len(item)}",
                    param=where,
                )
        num_chars = sum(map(len, listed))
        if num_chars > MAX_STOP_CHARS_IN_ALL:
            raise ApiError(
                f"{name} must have at most {MAX_STOP_CHARS_IN_ALL} characters in all, "
                f"got {num_chars}",
                param=name,
            )
        return tuple(listed)

    one = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
    many = {"type": "array", "items": one, "maxItems": MAX_STOP_STRINGS}
    return Field(read=read, schema={"anyOf": [one, many]})


def logit_bias() -> Field:
    """An object from token ids, written as strings as JSON must, to numbers in [-100, 100]."""
    bias = number(-100, 100)

    def read(name: str, value: Any) -> dict[int, float]:
        if not isinstance(value, dict):
            raise refusal(name, "an object from token ids to numbers", value)
        for key in value:
            if not _INTEGER_KEY.fullmatch(key):
                raise ApiError(
                    f"{name}: the key {shown(key)} must be a token id, an integer", param=name
                )
        return {int(key): bias.read(f"{name}.{key}", item) for key, item in value.items()}

    return Field(read=read, schema={"type": "object", "additionalProperties": bias.schema})


def prompts() -> Field:
    """A string, a list of strings, one list of token ids, or a list of such lists.

    Read as a tuple of prompts, each a string or a tuple of ids.
    """

    def read(name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
        if isinstance(value, str):
            return (_STRING.read(name, value),)
        if not isinstance(value, list):
            raise refusal(name, "a string, token ids, or a list of either", value)
        if not value:
            raise ApiError(f"{name} is an empty list: at least one prompt is needed", param=name)
        if all(isinstance(item, str) for item in value):
            return tuple(_STRING.read(name, item) for item in value)
        if not any(isinstance(item, str | list) for item in value):
            return (_TOKEN_IDS.read(name, value),)
        if not all(isinstance(item, list) for item in value):
            raise ApiError(
                f"{name} mixes kinds: it must be only strings, only token ids or only lists of ids",
                param=name,
            )
        return tuple(_id_prompt(name, place, item) for place, item in enumerate(value))

    ids = {**_TOKEN_IDS.schema, "minItems": 1}
    texts = {"type": "array", "items": {"type": "string"}, "minItems": 1}
    many = {"type": "array", "items": ids, "minItems": 1}
    return Field(read=read, schema={"anyOf": [{"type": "string"}, texts, ids, many]})


def _id_prompt(name: str, place: int, value: list[Any]) -> tuple[int, ...]:
    if not value:
        raise ApiError(f"{name}[{place}] is empty: at least one token id is needed", param=name)
    try:
        return tuple(_TOKEN_IDS.read(f"{name}[{place}]", value))
    except ApiError as error:
        raise ApiError(error.message, param=name) from None


def nested(fields: Fields) -> Field:
    """An object with fields of its own."""

    def read(name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise refusal(name, "an object", value)
        return {
            key: field.read(f"{name}.{key}", value[key])
            for key, field in fields.items()
            if value.get(key) is not None
        }

    return Field(read=read, schema=object_schema(fields))


def messages() -> Field:
    """A conversation, as `chat.read_messages` reads it."""

    def read(_: str, value: Any) -> tuple[Message, ...]:
        try:
            return read_messages(value)
        except MessageError as error:
            if error.is_unsupported:
                raise unsupported(error.where) from None
            raise ApiError(str(error), param=error.where) from None

    text = {"type": "string"}
    part = {"type": "object", "properties": {"type": {"const": "text"}, "text": text}}
    parts = {"type": "array", "items": {**part, "required": ["type", "text"]}}
    message = {
        "type": "object",
        "properties": {
            "role": {"type": "string", "enum": list(ROLES)},
            "content": nullable({"anyOf": [text, parts]}),
            "name": nullable(text),
        },
        "required": ["role", "content"],
    }
    return Field(read=read, schema={"type": "array", "items": message, "minItems": 1})


def unsupported(name: str) -> ApiError:
    """A 400 for a field that would change the output, and cannot be honoured."""
    return ApiError(
        f"{name} is not supported by this server; leave it out, it would change the output",
        param=name,
        code="unsupported_parameter",
    )


STREAM_OPTIONS: Fields = {"include_usage": boolean(), "continuous_usage_stats": boolean()}

SHARED_FIELDS: Fields = {
    "model": string(),
    "max_tokens": integer(0),
    "max_completion_tokens": integer(0),
    "min_tokens": integer(0),
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_k": integer(-1),
    "min_p": number(0, 1),
    "repetition_penalty": number(1e-6),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "logit_bias": logit_bias(),
    "stop": stop_strings(),
    "stop_token_ids": token_id_list(),
    "include_stop_str_in_output": boolean(),
    "ignore_eos": boolean(),
    "skip_special_tokens": boolean(),
    "seed": integer(-(2**63), 2**63 - 1),
    "n": integer(1, MAX_CHOICES),
    "stream": boolean(),
    "stream_options": nested(STREAM_OPTIONS),
    "add_special_tokens": boolean(),
    "truncate_prompt_tokens": integer(-1),
    "return_token_ids": boolean(),
    "priority": integer(-(2**63), 2**63 - 1),
}
"""Of both endpoints: OpenAI's fields, and vLLM's spelling of those that OpenAI lacks."""

COMPLETION_FIELDS: Fields = {
    **SHARED_FIELDS,
    "prompt": prompts(),
    "logprobs": integer(0, MAX_LOGPROBS),
    "echo": boolean(),
    "best_of": integer(1, MAX_BEST_OF),
}

CHAT_FIELDS: Fields = {
    **SHARED_FIELDS,
    "messages": messages(),
    "logprobs": boolean(),
    "top_logprobs": integer(0, MAX_CHAT_TOP_LOGPROBS),
    "add_generation_prompt": boolean(),
}

COMPLETION_SCHEMA: Schema = object_schema(
    {name: field for name, field in COMPLETION_FIELDS.items() if name != "prompt"}, ("model",)
)
# A prompt must be there, but may be null: the end of text.
COMPLETION_SCHEMA["properties"]["prompt"] = nullable(COMPLETION_FIELDS["prompt"].schema)
COMPLETION_SCHEMA["required"].append("prompt")

CHAT_SCHEMA: Schema = object_schema(CHAT_FIELDS, ("model", "messages"))

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "suffix": ("",),
    "logit_processors": ([],),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "grammar": ("",),
    "json_schema": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "return_tokens_as_token_ids": (False,),
    "logprob_token_ids": ([],),
    "truncation_side": ("left",),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "continue_final_message": (False,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
}
"""Fields that clients know from OpenAI, vLLM and llama.cpp and that would change the output, each
with the values that ask for nothing."""

CHAT_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    **UNSUPPORTED,
    "echo": (False,),
    "best_of": (1,),
}

HARMLESS = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "parallel_tool_calls", "request_id", "cache_salt"),
    )
)
"""Known, and without effect on the output here: ignored without a word."""
