"""End-of-text ids, sampling defaults and tokenizers: which of a model's files has the say."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers
from transformers import GenerationConfig

from nanoserve.config import ModelConfig
from nanoserve.model.generation import eos_token_ids, generation_defaults, load_tokenizer
from nanoserve.model.hub import Checkpoint, find
from nanoserve.request import SamplingParams

SIZES = {"vocab_size": 100, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}


def checkpoint(folder: Path, generation: dict[str, Any] | None = None, **config: Any) -> Checkpoint:
    raw = {"model_type": "gpt2", **SIZES, **config}
    (folder / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return find(str(folder), load_format="dummy")


def eos(found: Checkpoint, tokenizer_eos: int | None = None) -> tuple[int, ...]:
    return eos_token_ids(found, ModelConfig.from_hf(found.raw_config), tokenizer_eos)


@pytest.mark.parametrize(
    "generation,config,tokenizer_eos,expected",
    [
        ({"eos_token_id": 5}, {"eos_token_id": 6}, 7, (5,)),
        ({"eos_token_id": [5, 9, 5]}, {"eos_token_id": 6}, 7, (5, 9)),
        ({"eos_token_id": None}, {"eos_token_id": 6}, 7, (6,)),
        ({"top_k": 5}, {"eos_token_id": [6, 8]}, 7, (6, 8)),
        (None, {"eos_token_id": 0}, 7, (0,)),
        (None, {}, 7, (7,)),
        (None, {"eos_token_id": None}, None, ()),
        ({"eos_token_id": []}, {}, None, ()),
    ],
)
def test_who_decides_the_end_of_text(
    tmp_path: Path,
    generation: dict[str, Any] | None,
    config: dict[str, Any],
    tokenizer_eos: int | None,
    expected: tuple[int, ...],
) -> None:
    assert eos(checkpoint(tmp_path, generation, **config), tokenizer_eos) == expected


def test_ids_outside_the_vocabulary_are_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """CodeParrot: 32,768 tokens and an end id of 50,256; its tokenizer knows better."""
    with caplog.at_level(logging.WARNING):
        assert eos(checkpoint(tmp_path, {"eos_token_id": [5, 100]}), 7) == (5,)
        assert "gives end-of-text ids [100] outside the vocabulary of 100; ignored" in caplog.text
        caplog.clear()
        outside = checkpoint(tmp_path, {"eos_token_id": 50256}, eos_token_id=-1)
        assert eos(outside, 7) == (7,)
    assert len(caplog.records) == 2
    assert eos(outside, 100) == ()


@pytest.mark.parametrize("value", ["</s>", 5.0, True, [5, "x"], {"id": 5}])
def test_an_end_id_must_be_an_integer(tmp_path: Path, value: object) -> None:
    found = checkpoint(tmp_path, {"eos_token_id": value})
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id must be an int"):
        eos(found)


def test_a_built_in_shape_ends_where_the_tokenizer_says() -> None:
    found = find("gpt2", load_format="dummy")
    assert eos(found, 50256) == (50256,)
    assert generation_defaults(found) == {}


def test_sampling_defaults(tmp_path: Path) -> None:
    written = GenerationConfig(
        do_sample=True, temperature=0.7, top_k=40, top_p=0.9, repetition_penalty=1.1,
        max_new_tokens=64, eos_token_id=5,
    )  # fmt: skip
    written.save_pretrained(tmp_path)
    found = checkpoint(tmp_path)
    defaults = generation_defaults(found)
    assert defaults == {
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "max_tokens": 64,
    }
    assert SamplingParams(**defaults).temperature == 0.7  # type: ignore[arg-type]


def test_a_config_that_does_not_sample_is_greedy(tmp_path: Path) -> None:
    found = checkpoint(tmp_path, {"do_sample": False, "temperature": 0.7, "top_p": None})
    assert generation_defaults(found) == {"temperature": 0.0}


@pytest.mark.parametrize(
    "generation,words",
    [
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"top_k": True}, "top_k must be a number, got True"),
        ({"temperature": -1}, "temperature must be at least 0.0, got -1"),
        ({"top_p": 2}, "top_p must be between 0.0 and 1.0, got 2"),
        ({"max_new_tokens": 1.5}, "max_tokens must be an integer, got 1.5"),
    ],
)
def test_sampling_defaults_are_checked(
    tmp_path: Path, generation: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=r"generation_config\.json: ") as error:
        generation_defaults(checkpoint(tmp_path, generation))
    assert words in str(error.value)


def test_broken_generation_config(tmp_path: Path) -> None:
    found = checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json is not JSON"):
        eos(found)


def write_tokenizer(folder: Path) -> None:
    """Byte-level BPE with no merges: 256 bytes, then the end of text."""
    folder.mkdir(exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE({c: i for i, c in enumerate(letters)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(folder / "tokenizer.json"))


def test_which_tokenizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_tokenizer(find("gpt2", load_format="dummy")).num_ids == 50257
    found = checkpoint(tmp_path)
    assert load_tokenizer(found).num_ids == 50257
    assert "has no tokenizer; GPT-2's own is used" in caplog.text
    write_tokenizer(tmp_path)
    assert load_tokenizer(found).num_ids == 257
    assert load_tokenizer(found, "gpt2").num_ids == 50257
    write_tokenizer(tmp_path / "alone")
    assert load_tokenizer(find("gpt2", load_format="dummy"), str(tmp_path / "alone")).num_ids == 257
