"""What a model's files say about generating: its tokenizer, its end of text, its sampling defaults.

generation_config.json speaks before config.json, and the tokenizer last. Ids that the model cannot
draw never end a text.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from nanoserve.config import ModelConfig
from nanoserve.model.hub import Checkpoint, expanded, find, has_vocabulary, read_json
from nanoserve.request import SamplingParams
from nanoserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def load_tokenizer(checkpoint: Checkpoint, name: str | None = None) -> Tokenizer:
    """The tokenizer that `name` asks for (a local folder or a model's name), or the checkpoint's.

    Random weights of a shape without a folder, or of one without a tokenizer, take GPT-2's own.
    Raises ValueError if there is none, or if its files cannot be read.
    """
    if name is not None:
        if expanded(name).is_dir():
            return Tokenizer.from_folder(expanded(name))
        return load_tokenizer(find(name, load_format="dummy"))
    if checkpoint.folder is None:
        return Tokenizer.gpt2()
    if checkpoint.kind == "dummy" and not has_vocabulary(checkpoint.folder):
        logger.warning("%s has no tokenizer; GPT-2's own is used", checkpoint.folder)
        return Tokenizer.gpt2()
    return Tokenizer.from_folder(checkpoint.folder)


def eos_token_ids(
    checkpoint: Checkpoint, config: ModelConfig, tokenizer_eos: int | None
) -> tuple[int, ...]:
    """Ids that end a text: generation_config.json's, else the config's, else the tokenizer's.

    Ids outside the vocabulary cannot be drawn and are ignored with a warning; a source that has
    none left makes way for the next. Raises ValueError for an id that is not an integer.
    """
    sources = (
        ("generation_config.json", _generation_config(checkpoint).get("eos_token_id")),
        ("config.json", checkpoint.raw_config.get("eos_token_id")),
        ("the tokenizer", tokenizer_eos),
    )
    for source, value in sources:
        ids = _token_ids(source, value)
        outside = [i for i in ids if not 0 <= i < config.vocab_size]
        if outside:
            logger.warning(
                "%s: %s gives end-of-text ids %s outside the vocabulary of %d; ignored",
                checkpoint.name,
                source,
                outside,
                config.vocab_size,
            )
        inside = tuple(dict.fromkeys(i for i in ids if i not in outside))
        if inside:
            return inside
    return ()


def _token_ids(source: str, value: object) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise ValueError(f"{source}: eos_token_id must be an integer or a list, got {value!r}")
    return list(ids)


_SAMPLING_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}


def generation_defaults(checkpoint: Checkpoint) -> dict[str, int | float]:
    """Sampling defaults in generation_config.json, under `SamplingParams`' names.

    `do_sample` false is temperature 0; keys that are absent or null give nothing. Only
    `nanoserve generate` uses these. Raises ValueError for a value that `SamplingParams` refuses.
    """
    raw = _generation_config(checkpoint)
    found: dict[str, int | float] = {}
    for theirs, ours in _SAMPLING_FIELDS.items():
        value = raw.get(theirs)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"generation_config.json: {theirs} must be a number, got {value!r}")
        found[ours] = value
    if raw.get("do_sample") is False:
        found["temperature"] = 0.0
    try:
        SamplingParams(**found)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}") from error
    return found


def _generation_config(checkpoint: Checkpoint) -> Mapping[str, object]:
    if checkpoint.folder is None or not (checkpoint.folder / "generation_config.json").is_file():
        return {}
    return read_json(checkpoint.folder / "generation_config.json")
