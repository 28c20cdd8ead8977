"""The forward pass against two independent ones: transformers' GPT-2 and the dense oracle."""

from __future__ import annotations

from pathlib import Path

import oracle
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from nanoserve.config import ACTIVATIONS, ModelConfig
from nanoserve.kv.cache import BlockCache, RecomputeCache
from nanoserve.kv.codecs import PlainCodec
from nanoserve.kv.step import StepTensors
from nanoserve.model.gpt2 import GPT2
from nanoserve.model.hub import find
from nanoserve.model.weights import load_model_config, load_weights

CPU = torch.device("cpu")
BASE = {"vocab_size": 211, "n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 4}
FLAGS = [
    {},
    {"scale_attn_weights": False},
    {"scale_attn_by_inverse_layer_idx": True},
    {"reorder_and_upcast_attn": True},
    {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    {"tie_word_embeddings": False},
    {"n_inner": 80},
    {"n_inner": 48},  # square: only the siblings tell the orientation
    {"layer_norm_epsilon": 1e-3},
    *({"activation_function": name} for name in ACTIVATIONS),
    *({"n_head": 2, "n_embd": 2 * head_size} for head_size in (1, 2, 3, 64, 80, 96, 120, 128)),
]


def peer_with(settings: dict[str, object], seed: int = 0) -> GPT2LMHeadModel:
    """transformers' model with every bias and norm drawn too: zeros and ones hide bugs."""
    torch.manual_seed(seed)
    peer = GPT2LMHeadModel(GPT2Config(**(BASE | settings), attn_implementation="eager")).eval()
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            if parameter.ndim == 1:
                shift = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
                parameter.copy_(shift + 0.1 * torch.randn_like(parameter))
            elif "wte" in name or "wpe" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[0] ** 0.5)
    return peer


def loaded(folder: Path) -> GPT2:
    checkpoint = find(str(folder))
    config = load_model_config(checkpoint)
    return GPT2.load(config, load_weights(checkpoint, config), dtype="float32", device=CPU)


@torch.inference_mode()
def logits_of(model: GPT2, token_ids: list[int]) -> torch.Tensor:
    step = StepTensors.one_sequence(token_ids, 0, device=CPU, every_row=True)
    return model(step, RecomputeCache(model.config, codec=PlainCodec(torch.float32)))


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """1e-3 absolute and 1e-4 of the logits' range, on logits that do have a range."""
    spread = float(expected.max() - expected.min())
    assert spread > 1.0, "the logits are too flat to tell a wrong model from a right one"
    assert float((got - expected).abs().max()) < min(1e-3, 1e-4 * spread)


def flag_id(settings: dict[str, object]) -> str:
    return ",".join(f"{name}={value}" for name, value in settings.items()) or "plain"


@pytest.mark.parametrize("settings", FLAGS, ids=flag_id)
def test_every_flag_activation_and_head_size_gives_the_peers_logits(
    settings: dict[str, object], tmp_path: Path
) -> None:
    peer = peer_with(settings)
    peer.save_pretrained(tmp_path)
    token_ids = torch.randint(0, BASE["vocab_size"], (40,)).tolist()
    with torch.no_grad():
        expected = peer(torch.tensor([token_ids])).logits[0]
    assert_close(logits_of(loaded(tmp_path), token_ids), expected)


LAYOUTS = ["safetensors", "safetensors-sharded", "bin", "bin-sharded", "no-prefix", "buffers"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_file_layout_gives_the_peers_logits(layout: str, tmp_path: Path) -> None:
    peer = peer_with({}, seed=LAYOUTS.index(layout))
    peer.config.save_pretrained(tmp_path)
    state = dict(peer.state_dict())
    del state["lm_head.weight"]
    if layout.startswith("safetensors"):
        shard = "40KB" if layout.endswith("sharded") else "1GB"
        peer.save_pretrained(tmp_path, max_shard_size=shard)
    elif layout == "bin-sharded":
        save_bin_shards(state, tmp_path)
    else:
        if layout == "no-prefix":
            state = {name.removeprefix("transformer."): t for name, t in state.items()}
        if layout == "buffers":
            for layer in range(BASE["n_layer"]):
                state[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
                state[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
        torch.save(state, tmp_path / "pytorch_model.bin")
    num_files = len([*tmp_path.glob("*.safetensors"), *tmp_path.glob("*.bin")])
    assert (num_files > 1) == layout.endswith("sharded")
    token_ids = list(range(0, 200, 7))
    with torch.no_grad():
        expected = peer(torch.tensor([token_ids])).logits[0]
    assert_close(logits_of(loaded(tmp_path), token_ids), expected)


def save_bin_shards(state: dict[str, torch.Tensor], folder: Path) -> None:
    import json

    names = sorted(state)
    halves = {"pytorch_model-00001-of-00002.bin": names[::2]}
    halves["pytorch_model-00002-of-00002.bin"] = names[1::2]
    for file, keys in halves.items():
        torch.save({key: state[key] for key in keys}, folder / file)
    weight_map = {key: file for file, keys in halves.items() for key in keys}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def test_the_oracle_agrees_with_the_peer(tmp_path: Path) -> None:
    """The dense oracle is held to transformers as well, so that no two are wrong together."""
    for settings in FLAGS[:8]:
        peer = peer_with(settings)
        folder = tmp_path / str(FLAGS.index(settings))
        peer.save_pretrained(folder)
        checkpoint = find(str(folder))
        config = load_model_config(checkpoint)
        weights = oracle.dense_weights(load_weights(checkpoint, config))
        token_ids = list(range(0, 200, 9))
        with torch.no_grad():
            expected = peer(torch.tensor([token_ids])).logits[0]
        assert_close(torch.from_numpy(oracle.logits(config, weights, token_ids)), expected)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> GPT2:
    folder = tmp_path_factory.mktemp("small")
    peer_with({}).save_pretrained(folder)
    return loaded(folder)


@pytest.mark.parametrize("split", [1, 7, 39])
@torch.inference_mode()
def test_prefilling_into_a_filled_cache_uses_the_offset_mask(small: GPT2, split: int) -> None:
    """A chunk of several tokens after `split` others: a mask aligned to the first key is wrong."""
    token_ids = list(range(3, 163, 4))
    expected = logits_of(small, token_ids)
    cache = BlockCache(
        small.config, num_blocks=1, block_size=64, codec=PlainCodec(torch.float32), device=CPU
    )
    rows = [
        small(StepTensors.one_sequence(part, start, device=CPU, every_row=True), cache)
        for start, part in ((0, token_ids[:split]), (split, token_ids[split:]))
    ]
    assert float((torch.cat(rows) - expected).abs().max()) < 1e-4


@torch.inference_mode()
def test_logits_are_computed_only_for_the_rows_asked_for(small: GPT2) -> None:
    token_ids = list(range(10))
    step = StepTensors.one_sequence(token_ids, 0, device=CPU)
    last = small(step, RecomputeCache(small.config, codec=PlainCodec(torch.float32)))
    assert last.shape == (1, small.config.vocab_size)
    assert torch.equal(last[0], logits_of(small, token_ids)[-1]) or torch.allclose(
        last[0], logits_of(small, token_ids)[-1], atol=1e-5
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_keeps_softmax_and_norms_in_fp32(dtype: str, tmp_path: Path) -> None:
    """Activations of a few hundred overflow fp16 sums of squares, and every logit with them."""
    peer = peer_with({})
    with torch.no_grad():
        peer.transformer.wte.weight.mul_(600)
    peer.save_pretrained(tmp_path)
    checkpoint = find(str(tmp_path))
    config = load_model_config(checkpoint)
    model = GPT2.load(config, load_weights(checkpoint, config), dtype=dtype, device=CPU)
    step = StepTensors.one_sequence(list(range(40)), 0, device=CPU, every_row=True)
    with torch.inference_mode():
        hidden = model.hidden(step, RecomputeCache(config, codec=PlainCodec(model.wte.dtype)))
    expected = loaded(tmp_path)
    with torch.inference_mode():
        exact = expected.hidden(step, RecomputeCache(config, codec=PlainCodec(torch.float32)))
    assert bool(hidden.isfinite().all())
    assert float((hidden.float() - exact).abs().max()) < 0.15 * float(exact.abs().max())


def test_the_124m_shape_gives_the_peers_logits(tmp_path: Path) -> None:
    """Random weights of GPT-2's own shape, every bias and norm drawn, 96 positions."""
    torch.manual_seed(1)
    peer = GPT2LMHeadModel(GPT2Config(attn_implementation="eager")).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    token_ids = torch.randint(0, 50257, (96,)).tolist()
    with torch.no_grad():
        expected = peer(torch.tensor([token_ids])).logits[0]
    weights = {
        name.removeprefix("transformer."): tensor.detach()
        for name, tensor in peer.state_dict().items()
        if name != "lm_head.weight"
    }
    config = ModelConfig.from_hf(peer.config.to_dict())
    assert sum(tensor.numel() for tensor in weights.values()) == 124_439_808
    assert_close(logits_of(GPT2(config, weights), token_ids), expected)
