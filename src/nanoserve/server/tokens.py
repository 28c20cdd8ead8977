"""`/tokenize`, `/detokenize` and `/tokenizer_info`, in vLLM's shapes: pure functions of bodies.

A prompt's text is read as `/v1/completions` reads it (special tokens count), messages as
`/v1/chat/completions` does (they do not), so that what is counted here is what a request will cost.
"""

from __future__ import annotations

from typing import Any

from nanoserve.chat import written
from nanoserve.server.bodies import (
    Fields,
    Schema,
    boolean,
    messages,
    object_schema,
    read_fields,
    string,
    token_id_list,
)
from nanoserve.server.errors import ApiError
from nanoserve.server.service import Service

TOKENIZE_FIELDS: Fields = {
    "model": string(),
    "prompt": string(),
    "messages": messages(),
    "add_special_tokens": boolean(),
    "add_generation_prompt": boolean(),
    "return_token_strs": boolean(),
}
DETOKENIZE_FIELDS: Fields = {"model": string(), "tokens": token_id_list()}

TOKENIZE_SCHEMA: Schema = object_schema(TOKENIZE_FIELDS)
DETOKENIZE_SCHEMA: Schema = object_schema(DETOKENIZE_FIELDS, ("tokens",))


def tokenize(body: object, service: Service) -> dict[str, Any]:
    """The token ids of a prompt or a conversation. Raises ApiError 400 or 404."""
    fields = _read(body, TOKENIZE_FIELDS, service)
    if ("prompt" in fields) == ("messages" in fields):
        raise ApiError("give either prompt or messages", param="prompt")
    token_ids = _prompt_ids(fields, service) if "prompt" in fields else _chat_ids(fields, service)
    answer: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": service.served.max_model_len,
        "tokens": list(token_ids),
    }
    if fields.get("return_token_strs", False):
        answer["token_strs"] = [service.tokenizer.token_text(i) for i in token_ids]
    return answer


def detokenize(body: object, service: Service) -> dict[str, Any]:
    """The text of token ids. Raises ApiError 400 or 404."""
    fields = _read(body, DETOKENIZE_FIELDS, service)
    if "tokens" not in fields:
        raise ApiError("tokens is required", param="tokens", code="missing_required_parameter")
    try:
        return {"prompt": service.tokenizer.decode(fields["tokens"])}
    except ValueError as error:
        raise ApiError(str(error), param="tokens") from None


def tokenizer_info(service: Service) -> dict[str, Any]:
    """What a client may want to know before it counts by itself.

    `bos_token` and `eos_token` are texts, as in vLLM: lm-eval takes a server that has them for its
    tokenizer.
    """
    tokenizer = service.tokenizer
    bos_id, eos_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    return {
        "vocab_size": tokenizer.num_ids,
        "max_model_len": service.served.max_model_len,
        "bos_token_id": bos_id,
        "bos_token": None if bos_id is None else written(tokenizer, bos_id),
        "eos_token_id": eos_id,
        "eos_token": None if eos_id is None else written(tokenizer, eos_id),
        "special_token_ids": sorted(tokenizer.special_token_ids),
        "prefix_token_ids": list(tokenizer.prefix_token_ids),
        "has_chat_template": service.served.chat.has_template,
        "chat_template": tokenizer.chat_template,
    }


def _read(body: object, fields: Fields, service: Service) -> dict[str, Any]:
    values = read_fields(body, fields)
    if "model" in values:
        service.served.check_model(values["model"])
    return values


def _prompt_ids(fields: dict[str, Any], service: Service) -> list[int]:
    tokenizer = service.tokenizer
    ids = tokenizer.encode(fields["prompt"], add_special_tokens=False)
    return [*tokenizer.prefix_token_ids, *ids] if fields.get("add_special_tokens", True) else ids


def _chat_ids(fields: dict[str, Any], service: Service) -> tuple[int, ...]:
    try:
        return service.served.chat.encode(
            fields["messages"],
            add_generation_prompt=fields.get("add_generation_prompt", True),
            add_special_tokens=fields.get("add_special_tokens"),
        ).token_ids
    except ValueError as error:
        raise ApiError(str(error), param="messages") from None
