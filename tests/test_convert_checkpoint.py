"""The converter for nanoGPT and llm.c: what it writes loads as the weights that went in."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel

from nanoserve.config import ModelConfig
from nanoserve.model.hub import find
from nanoserve.model.weights import as_float32, load_model_config, load_weights, tensor_shapes

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import convert_checkpoint

SIZES = {"vocab_size": 61, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 3}
CONFIG = ModelConfig(**SIZES, n_inner=96)
State = dict[str, torch.Tensor]


def random_state() -> State:
    """Canonical names, matrices [in, out]."""
    generator = torch.Generator().manual_seed(5)
    shapes = tensor_shapes(CONFIG).items()
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes}


def is_matrix(name: str, value: torch.Tensor) -> bool:
    return value.ndim == 2 and name.startswith("h.")


def convert(kind: str, source: Path, out: Path, *options: str) -> int:
    return convert_checkpoint.main([kind, str(source), "--out", str(out), *options])


def write_nanogpt(path: Path, state: State, prefix: str = "", **model_args: Any) -> None:
    model = {
        f"{prefix}transformer.{name}": value.t().contiguous() if is_matrix(name, value) else value
        for name, value in state.items()
    }
    model[f"{prefix}lm_head.weight"] = model[f"{prefix}transformer.wte.weight"]
    model[f"{prefix}transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    sizes = {"block_size" if k == "n_positions" else k: v for k, v in SIZES.items()}
    saved = {
        "model": model,
        "optimizer": {"state": {}, "param_groups": [{"lr": 1e-3}]},
        "model_args": {**sizes, "bias": True, "dropout": 0.1, **model_args},
        "iter_num": 10,
        "best_val_loss": torch.tensor(3.5),
        "config": {"dataset": "openwebtext"},
    }
    torch.save(saved, path)


def write_llmc(path: Path, state: State, *, version: int = 3, num_rows: int = 64) -> None:
    """llm.c's layout, written here a second time: each parameter of all layers together."""
    header = np.zeros(256, np.int32)
    header[:8] = (20240326, version, 16, 61, 2, 3, 24, num_rows)
    kinds = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"]
    padding = torch.zeros(num_rows - 61, 24)
    ordered = [torch.cat([state["wte.weight"], padding]), state["wpe.weight"]]
    for kind in kinds:
        for part in ("weight", "bias"):
            values = [state[f"h.{layer}.{kind}.{part}"] for layer in range(2)]
            ordered += [v.t() if v.ndim == 2 else v for v in values]
    ordered += [state["ln_f.weight"], state["ln_f.bias"]]
    flat = torch.cat([value.reshape(-1) for value in ordered])
    body = flat.bfloat16().view(torch.int16) if version == 5 else flat
    path.write_bytes(header.tobytes() + body.numpy().tobytes())


def assert_holds(folder: Path, state: State, activation: str) -> None:
    checkpoint = find(str(folder))
    config = load_model_config(checkpoint)
    assert config.activation_function == activation
    assert {name: getattr(config, name) for name in SIZES} == SIZES
    loaded = {t.name: as_float32(t) for t in load_weights(checkpoint, config)}
    assert loaded.keys() == state.keys()
    for name, value in state.items():
        np.testing.assert_array_equal(loaded[name], value.float().numpy(), err_msg=name)
    theirs = GPT2LMHeadModel.from_pretrained(str(folder), dtype=torch.float32).transformer
    for name, value in theirs.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), loaded[name], err_msg=name)


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_nanogpt(tmp_path: Path, capsys: pytest.CaptureFixture[str], prefix: str) -> None:
    write_nanogpt(tmp_path / "ckpt.pt", random_state(), prefix)
    assert convert("nanogpt", tmp_path / "ckpt.pt", tmp_path / "out") == 0
    assert_holds(tmp_path / "out", random_state(), "gelu")
    printed = capsys.readouterr().out
    assert "assumed: activation gelu\n" in printed
    assert "biases" not in printed
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_nanogpt_without_biases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = random_state()
    biases = [name for name in state if name.endswith(".bias")]
    without = {name: value for name, value in state.items() if name not in biases}
    write_nanogpt(tmp_path / "ckpt.pt", without, bias=False)
    assert convert("nanogpt", tmp_path / "ckpt.pt", tmp_path / "out", "--activation", "relu") == 0
    expected = state | {name: torch.zeros_like(state[name]) for name in biases}
    assert_holds(tmp_path / "out", expected, "relu")
    assert f"{len(biases)} biases that the file leaves out are 0" in capsys.readouterr().out


def test_nanogpt_in_bfloat16(tmp_path: Path) -> None:
    state = {name: value.bfloat16() for name, value in random_state().items()}
    write_nanogpt(tmp_path / "ckpt.pt", state)
    assert convert("nanogpt", tmp_path / "ckpt.pt", tmp_path / "out") == 0
    assert_holds(tmp_path / "out", state, "gelu")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for value in written.values()} == {torch.bfloat16}


@pytest.mark.parametrize("version", [3, 5])
@pytest.mark.parametrize("num_rows", [61, 128])
def test_llmc(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], version: int, num_rows: int
) -> None:
    state = random_state()
    write_llmc(tmp_path / "model.bin", state, version=version, num_rows=num_rows)
    assert convert("llmc", tmp_path / "model.bin", tmp_path / "out") == 0
    expected = {n: v.bfloat16().float() for n, v in state.items()} if version == 5 else state
    assert_holds(tmp_path / "out", expected, "gelu_new")
    assert f"a vocabulary of 61, padded to {num_rows} in the file" in capsys.readouterr().out


def test_tokenizer_files_come_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_llmc(tmp_path / "model.bin", random_state())
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    out = tmp_path / "out"
    assert convert("llmc", tmp_path / "model.bin", out, "--tokenizer", str(tokenizer)) == 2
    assert f"{tokenizer} holds none of tokenizer.json" in capsys.readouterr().err
    assert not out.exists()
    (tokenizer / "vocab.json").write_text("{}")
    (tokenizer / "config.json").write_text(json.dumps({"not": "ours"}))
    assert convert("llmc", tmp_path / "model.bin", out, "--tokenizer", str(tokenizer)) == 0
    assert (out / "vocab.json").read_text() == "{}"
    assert json.loads((out / "config.json").read_text())["model_type"] == "gpt2"
    assert convert("llmc", tmp_path / "model.bin", out) == 2
    assert f"--out {out} is not empty" in capsys.readouterr().err


def refused(kind: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert convert(kind, path, path.parent / "out") == 2
    assert not (path.parent / "out").exists()
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def test_what_is_not_plain_nanogpt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, state = tmp_path / "ckpt.pt", random_state()
    write_nanogpt(path, state, use_rmsnorm=True, use_relu=False)
    assert "model_args are not nanoGPT's: unknown ['use_rmsnorm']" in refused(
        "nanogpt", path, capsys
    )
    write_nanogpt(path, state, n_layer=3)
    assert "missing h.2.ln_1.weight" in refused("nanogpt", path, capsys)
    write_nanogpt(path, state, n_head=5)
    assert "n_embd must be a multiple of n_head" in refused("nanogpt", path, capsys)
    write_nanogpt(path, {**state, "h.0.attn.q_norm": torch.ones(8)})
    assert "unexpected h.0.attn.q_norm" in refused("nanogpt", path, capsys)
    write_nanogpt(path, {**state, "h.0.mlp.c_fc.weight": torch.ones(24, 95)})
    assert "h.0.mlp.c_fc.weight is [95, 24], not [96, 24]" in refused("nanogpt", path, capsys)
    write_nanogpt(path, {**state, "ln_f.bias": torch.ones(24, dtype=torch.int32)})
    assert "ln_f.bias is torch.int32" in refused("nanogpt", path, capsys)
    torch.save({"weights": state}, path)
    assert "it lacks model or model_args" in refused("nanogpt", path, capsys)
    path.write_bytes(b"PK\x03\x04 nothing more")
    assert "cannot be read as tensors alone" in refused("nanogpt", path, capsys)
    assert "No such file" in refused("nanogpt", tmp_path / "none.pt", capsys)


def test_an_untied_head_is_not_nanogpts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_nanogpt(tmp_path / "ckpt.pt", random_state())
    saved = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    saved["model"]["lm_head.weight"] = torch.ones(61, 24)
    torch.save(saved, tmp_path / "ckpt.pt")
    assert "lm_head.weight is not wte.weight" in refused("nanogpt", tmp_path / "ckpt.pt", capsys)


def test_what_is_not_llmc(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"\0" * 2048)
    assert "is not a model of llm.c: its first number is not 20240326" in refused(
        "llmc", path, capsys
    )
    path.write_bytes(b"\0" * 100)
    assert "is not a model of llm.c" in refused("llmc", path, capsys)
    write_llmc(path, random_state(), version=1)
    assert "has llm.c version 1; versions 3 and 5 are read" in refused("llmc", path, capsys)
    write_llmc(path, random_state())
    path.write_bytes(path.read_bytes()[:-4])
    assert "values after its header, which describes" in refused("llmc", path, capsys)


def test_find_names_this_converter(tmp_path: Path) -> None:
    write_nanogpt(tmp_path / "ckpt.pt", random_state())
    with pytest.raises(ValueError, match=r"python scripts/convert_checkpoint\.py nanogpt") as error:
        find(str(tmp_path / "ckpt.pt"))
    arguments = str(error.value).split("convert_checkpoint.py ")[1].split()
    assert convert_checkpoint.main([*arguments[:-1], str(tmp_path / "out")]) == 0
    assert find(str(tmp_path / "out")).weight_format == "safetensors"
