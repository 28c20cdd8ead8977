"""`ModelConfig`: what config.json says is read as transformers reads it, or refused by name.

The oracle is transformers' own GPT2Config; refusals are checked for the words a user needs.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

import pytest
from transformers import GPT2Config

from nanoserve.config import ACTIVATIONS, ModelConfig

SIZES = {
    "vocab_size": 101,
    "n_positions": 32,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 3,
    "n_inner": 40,
}
FLAGS = (
    "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx",
    "reorder_and_upcast_attn",
    "tie_word_embeddings",
)


def hf(**changes: Any) -> dict[str, object]:
    return {"model_type": "gpt2", **SIZES, **changes}


def assert_equal_to_oracle(raw: dict[str, object]) -> None:
    ours, theirs = ModelConfig.from_hf(raw), GPT2Config(**raw)
    for field in dataclasses.fields(ModelConfig):
        expected = getattr(theirs, field.name)
        if field.name == "n_inner" and expected is None:
            expected = 4 * theirs.n_embd
        assert getattr(ours, field.name) == expected, field.name


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_inner": None},
        {"activation_function": "gelu"},
        {"layer_norm_epsilon": 1e-6},
        *({flag: value} for flag in FLAGS for value in (True, False)),
    ],
    ids=str,
)
def test_every_flag_is_what_transformers_reads(changes: dict[str, object]) -> None:
    assert_equal_to_oracle(hf(**changes))


def test_silent_keys_take_gpt2s_defaults() -> None:
    assert_equal_to_oracle({"model_type": "gpt2"})


def test_other_names_of_the_sizes() -> None:
    assert_equal_to_oracle(
        {
            "model_type": "gpt2",
            "hidden_size": 36,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
        }
    )
    with pytest.raises(ValueError, match=r"n_embd 24 and hidden_size 36"):
        ModelConfig.from_hf(hf(hidden_size=36))
    assert ModelConfig.from_hf(hf(hidden_size=24)).n_embd == 24


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    assert ModelConfig.from_hf(hf(activation_function=name)).activation_function == name


@pytest.mark.parametrize("name", ["mish", "gelu_10", "relu2", None, 3, ["gelu"]])
def test_unknown_activations_are_refused(name: object) -> None:
    with pytest.raises(ValueError, match=r"activation_function .*not supported.*gelu_new, gelu,"):
        ModelConfig.from_hf(hf(activation_function=name))


def test_a_config_that_transformers_writes_is_read() -> None:
    full = GPT2Config(**SIZES).to_dict()
    assert ModelConfig.from_hf(full) == ModelConfig.from_hf(hf())


def test_n_positions_may_be_called_n_ctx(caplog: pytest.LogCaptureFixture) -> None:
    raw = hf(n_ctx=48)
    del raw["n_positions"]
    assert ModelConfig.from_hf(raw).n_positions == 48
    assert ModelConfig.from_hf(hf(n_ctx=32)).n_positions == 32
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert ModelConfig.from_hf(hf(n_ctx=48)).n_positions == 32
    assert "n_positions 32 and n_ctx 48" in caplog.text


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, 2.0, "24", True, [24]], ids=repr)
def test_sizes_must_be_positive_integers(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be an integer of at least 1, got"):
        ModelConfig.from_hf(hf(**{name: value}))


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "true", None], ids=repr)
def test_flags_must_be_bools(flag: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{flag} must be true or false, got {value!r}"):
        ModelConfig.from_hf(hf(**{flag: value}))


@pytest.mark.parametrize("value", [0, -1e-5, math.inf, math.nan, "1e-5", None, True], ids=repr)
def test_epsilon_must_be_a_positive_number(value: object) -> None:
    with pytest.raises(ValueError, match=r"layer_norm_epsilon must be"):
        ModelConfig.from_hf(hf(layer_norm_epsilon=value))


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match=r"multiple of n_head, got n_embd 24 and n_head 5"):
        ModelConfig.from_hf(hf(n_head=5))


def test_direct_construction_is_checked_too() -> None:
    with pytest.raises(ValueError, match=r"n_layer must be an integer of at least 1, got 0"):
        ModelConfig(**{**SIZES, "n_layer": 0})
    assert ModelConfig(**SIZES).head_size == 8


@pytest.mark.parametrize(
    "model_type,reason",
    [
        ("biogpt", "embeddings"),
        ("gpt_neo", "local window"),
        ("gptj", "rotary"),
        ("gpt_bigcode", "share one key and value head"),
        ("opt", "offsets its positions"),
        ("imagegpt", "pixels"),
        ("openai-gpt", "after each block"),
        ("encoder-decoder", "cross-attention"),
        ("llama", "only GPT-2"),
        (["gpt2"], "only GPT-2"),
    ],
)
def test_other_families_are_refused_with_the_reason(model_type: object, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"is not GPT-2: .*{reason}"):
        ModelConfig.from_hf(hf(model_type=model_type))


@pytest.mark.parametrize(
    "name",
    ["GPT2LMHeadModel", "GPT2Model", "GPT2DoubleHeadsModel", "AutoModelForCausalLMWithValueHead"],
)
def test_architectures_of_gpt2(name: str) -> None:
    assert ModelConfig.from_hf(hf(architectures=[name])) == ModelConfig.from_hf(hf())
    without_type = {k: v for k, v in hf(architectures=[name]).items() if k != "model_type"}
    assert ModelConfig.from_hf(without_type) == ModelConfig.from_hf(hf())


@pytest.mark.parametrize(
    "name", ["GPT2ForSequenceClassification", "GPTNeoForCausalLM", "MyGPT2Variant", None]
)
def test_other_architectures_are_refused(name: object) -> None:
    with pytest.raises(ValueError, match=rf"architecture {name} is not a GPT-2 language model"):
        ModelConfig.from_hf(hf(architectures=[name]))


def test_a_config_that_does_not_say_gpt2_is_refused() -> None:
    with pytest.raises(ValueError, match=r"neither model_type nor architectures"):
        ModelConfig.from_hf(SIZES)
    with pytest.raises(ValueError, match=r"architectures must be a list"):
        ModelConfig.from_hf(hf(architectures="GPT2LMHeadModel"))


def test_remote_code_is_never_run() -> None:
    auto_map = {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    plain = hf(auto_map=auto_map, architectures=["GPT2LMHeadModel"])
    assert ModelConfig.from_hf(plain) == ModelConfig.from_hf(hf())
    for raw in (
        hf(auto_map=auto_map),
        {**plain, "model_type": None},
    ):
        with pytest.raises(ValueError, match=r"auto_map names code .* never run"):
            ModelConfig.from_hf(raw)
    with pytest.raises(ValueError, match=r"MineForCausalLM is not a GPT-2"):
        ModelConfig.from_hf(hf(auto_map=auto_map, architectures=["MineForCausalLM"]))


@pytest.mark.parametrize(
    "key,value",
    [("add_cross_attention", True), ("quantization_config", {"quant_method": "gptq", "bits": 4})],
)
def test_what_is_not_implemented_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{key}: "):
        ModelConfig.from_hf(hf(**{key: value}))


def test_unknown_keys_are_refused_unless_they_are_off() -> None:
    raw = hf(rotary_dim=64, attention_layers=["local"], parallel_residual=True, alibi=False)
    with pytest.raises(ValueError, match=r"rotary_dim=64") as error:
        ModelConfig.from_hf(raw)
    assert "attention_layers=['local'], parallel_residual=True, rotary_dim=64" in str(error.value)
    assert "alibi" not in str(error.value)
    off = hf(rotary_dim=None, alibi=False, window=0, layers=[], rope={}, scheme="")
    assert ModelConfig.from_hf(off) == ModelConfig.from_hf(hf())


def test_keys_that_old_checkpoints_carry_are_let_through() -> None:
    raw = hf(
        n_special=0,
        predict_special_tokens=True,
        output_past=True,
        _num_labels=1,
        id2label={"0": "LABEL_0"},
        label2id={"LABEL_0": 0},
        summary_type="cls_index",
        summary_activation="tanh",
        task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}},
        gradient_checkpointing=True,
        tokenizer_class="BertTokenizer",
        torch_dtype="float16",
        bos_token_id=50256,
        eos_token_id=[1, 2],
        resid_pdrop=0.1,
    )
    assert ModelConfig.from_hf(raw) == ModelConfig.from_hf(hf())


def test_attention_scale_per_layer() -> None:
    plain = ModelConfig.from_hf(hf())
    assert plain.attention_scale(1) == 8**-0.5
    by_layer = ModelConfig.from_hf(hf(scale_attn_by_inverse_layer_idx=True))
    assert [by_layer.attention_scale(layer) for layer in (0, 1)] == [8**-0.5, 8**-0.5 / 2]
    assert ModelConfig.from_hf(hf(scale_attn_weights=False)).attention_scale(1) == 1.0
