"""Loading weights: for every layout and trap, each tensor equals what transformers loads.

The checkpoints are made here, with every value random (zeros in biases and ones in norms would hide
mix-ups). Where nanoserve is stricter than transformers the test says what is refused and how.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from nanoserve.config import ModelConfig
from nanoserve.model import weights
from nanoserve.model.hub import find
from nanoserve.model.weights import (
    SafetensorsFile,
    WeightTensor,
    as_float32,
    dummy_weights,
    load_model_config,
    load_weights,
    tensor_shapes,
)

State = dict[str, torch.Tensor]
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "n_positions": 16,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 3,
    "n_inner": 40,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MATRICES = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def random_state(dtype: torch.dtype = torch.float32, **changes: Any) -> State:
    """A state_dict under transformers' names, no two values alike; `lm_head.weight` if untied."""
    model = GPT2LMHeadModel(GPT2Config(**{**SIZES, **changes}))
    generator = torch.Generator().manual_seed(7)
    names = [name for name, _ in model.named_parameters()]
    return {
        name: torch.randn(model.get_parameter(name).shape, generator=generator).to(dtype)
        for name in names
    }


def write_config(folder: Path, **changes: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    raw = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **SIZES, **changes}
    (folder / "config.json").write_text(json.dumps(raw))


def write_safetensors(folder: Path, state: State, **changes: Any) -> None:
    write_config(folder, **changes)
    save_file(
        {key: value.contiguous() for key, value in state.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def write_bin(folder: Path, state: State, **changes: Any) -> None:
    write_config(folder, **changes)
    torch.save(state, folder / "pytorch_model.bin")


def write_old_bin(folder: Path, state: State, **changes: Any) -> None:
    """The format before torch 1.6, in which OpenAI's GPT-2 was first converted."""
    write_config(folder, **changes)
    path = folder / "pytorch_model.bin"
    torch.save(state, path, _use_new_zipfile_serialization=False)


def write_shards(
    folder: Path, state: State, stem: str, save: Callable[[State, Path], None]
) -> None:
    name, suffix = stem.split(".")
    keys = sorted(state)
    files = {f"{name}-0000{i + 1}-of-00003.{suffix}": keys[i::3] for i in range(3)}
    for file, part in files.items():
        save({key: state[key].contiguous() for key in part}, folder / file)
    weight_map = {key: file for file, part in files.items() for key in part}
    (folder / f"{stem}.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def write_sharded_safetensors(folder: Path, state: State, **changes: Any) -> None:
    write_config(folder, **changes)
    write_shards(
        folder, state, "model.safetensors", lambda s, p: save_file(s, p, metadata={"format": "pt"})
    )


def write_sharded_bin(folder: Path, state: State, **changes: Any) -> None:
    write_config(folder, **changes)
    write_shards(folder, state, "pytorch_model.bin", torch.save)


WRITERS = {
    "safetensors": write_safetensors,
    "sharded safetensors": write_sharded_safetensors,
    "bin": write_bin,
    "old bin": write_old_bin,
    "sharded bin": write_sharded_bin,
}


def load(folder: Path) -> dict[str, WeightTensor]:
    checkpoint = find(str(folder))
    return {t.name: t for t in load_weights(checkpoint, load_model_config(checkpoint))}


def transformers_state(folder: Path) -> dict[str, NDArray[np.float32]]:
    model = GPT2LMHeadModel.from_pretrained(str(folder), dtype=torch.float32)
    return {
        name.removeprefix("transformer."): value.numpy()
        for name, value in model.state_dict().items()
    }


def assert_as_transformers(folder: Path, *, tied: bool = True) -> dict[str, WeightTensor]:
    """Ours are exactly the oracle's tensors, contiguous, writable and owned."""
    ours, theirs = load(folder), transformers_state(folder)
    assert ours.keys() == theirs.keys() - ({"lm_head.weight"} if tied else set())
    for name, tensor in ours.items():
        np.testing.assert_array_equal(as_float32(tensor), theirs[name], err_msg=name)
        assert tensor.data.flags.c_contiguous, name
        assert tensor.data.flags.writeable, name
        assert tensor.data.flags.aligned, name
    return ours


def config_of(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({"model_type": "gpt2", **SIZES, **changes})


def linear(state: State) -> State:
    """The same weights as torch's Linear would keep them."""
    return {k: v.t().contiguous() if k.endswith(MATRICES) else v for k, v in state.items()}


# Layouts


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_layouts_and_dtypes(tmp_path: Path, writer: str, dtype: str) -> None:
    WRITERS[writer](tmp_path, random_state(getattr(torch, dtype)))
    assert {t.dtype for t in assert_as_transformers(tmp_path).values()} == {dtype}


def test_float64_is_read_as_float32(tmp_path: Path) -> None:
    write_safetensors(tmp_path, random_state(torch.float64))
    assert {t.dtype for t in assert_as_transformers(tmp_path).values()} == {"float32"}


def test_what_transformers_saves(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(**SIZES))
    model.load_state_dict(random_state(), strict=False)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert_as_transformers(tmp_path / "whole")
    assert_as_transformers(tmp_path / "sharded")


def test_safetensors_go_before_bin(tmp_path: Path) -> None:
    state = random_state()
    write_bin(tmp_path, {key: value + 1 for key, value in state.items()})
    write_safetensors(tmp_path, state)
    assert_as_transformers(tmp_path)
    pickled = find(str(tmp_path), load_format="pt")
    wte = next(iter(load_weights(pickled, load_model_config(pickled)))).data
    np.testing.assert_array_equal(wte, state["transformer.wte.weight"].numpy() + 1)


def test_order_is_that_of_tensor_shapes(tmp_path: Path) -> None:
    write_sharded_safetensors(tmp_path, random_state())
    checkpoint = find(str(tmp_path))
    config = load_model_config(checkpoint)
    loaded = [(t.name, t.data.shape) for t in load_weights(checkpoint, config)]
    assert loaded == list(tensor_shapes(config).items())


# Names


def test_keys_without_prefix(tmp_path: Path) -> None:
    """OpenAI's own files: no `transformer.`, and the causal masks saved as buffers."""
    state = {key.removeprefix("transformer."): value for key, value in random_state().items()}
    for layer in range(2):
        state[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
        state[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    write_safetensors(tmp_path, state)
    loaded = assert_as_transformers(tmp_path)
    assert "h.0.attn.c_attn.bias" in loaded


def test_integer_buffers_are_dropped_unread(tmp_path: Path) -> None:
    state = random_state()
    state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16, dtype=torch.uint8)
    state["transformer.h.1.attn.bias"] = torch.ones(1, 1, 16, 16, dtype=torch.bool)
    for writer in ("safetensors", "bin"):
        WRITERS[writer](tmp_path / writer, state)
        assert len(load(tmp_path / writer)) == len(tensor_shapes(config_of()))


def test_keys_of_a_compiled_model(tmp_path: Path) -> None:
    state = random_state()
    write_safetensors(tmp_path / "plain", state)
    write_bin(tmp_path / "compiled", {f"_orig_mod.{key}": value for key, value in state.items()})
    plain, compiled = assert_as_transformers(tmp_path / "plain"), load(tmp_path / "compiled")
    assert compiled.keys() == plain.keys()
    for name, tensor in compiled.items():
        np.testing.assert_array_equal(tensor.data, plain[name].data)


@pytest.mark.parametrize("head", ["v_head.summary.weight", "multiple_choice_head.summary.weight"])
def test_other_heads_are_dropped_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, head: str
) -> None:
    bias = head.replace("weight", "bias")
    state = random_state() | {head: torch.ones(1, 24), bias: torch.ones(1)}
    write_safetensors(tmp_path, state)
    assert_as_transformers(tmp_path)
    ours = [r for r in caplog.records if r.name.startswith("nanoserve")]
    assert [r.levelname for r in ours] == ["WARNING"]
    assert f"{head}, {bias}" in caplog.text or f"{bias}, {head}" in caplog.text


def test_cross_attention_is_refused(tmp_path: Path) -> None:
    state = random_state() | {"transformer.h.0.crossattention.c_attn.weight": torch.ones(24, 48)}
    write_safetensors(tmp_path, state)
    with pytest.raises(ValueError, match=r"h\.0\.crossattention\.c_attn\.weight is cross-attent"):
        load(tmp_path)


def test_a_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    state = random_state()
    write_safetensors(tmp_path, state | {"wpe.weight": torch.ones(16, 24)})
    with pytest.raises(ValueError, match=r"wpe\.weight is there twice"):
        load(tmp_path)


# The head


def test_untied_head(tmp_path: Path) -> None:
    state = random_state(tie_word_embeddings=False)
    assert "lm_head.weight" in state
    write_safetensors(tmp_path, state, tie_word_embeddings=False)
    assert list(assert_as_transformers(tmp_path, tied=False))[-1] == "lm_head.weight"


def test_untied_without_head_is_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path, random_state(), tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight$"):
        load(tmp_path)


def test_tied_head_that_is_stored_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = random_state()
    state["lm_head.weight"] = state["transformer.wte.weight"].clone()
    write_safetensors(tmp_path, state)
    assert_as_transformers(tmp_path)
    assert not caplog.records


@pytest.mark.parametrize("writer", ["safetensors", "bin"])
def test_tied_head_that_differs_warns_and_wte_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5 would unite them neither: it keeps both and ignores the config."""
    monkeypatch.setattr(weights, "_COMPARED_ROWS", 16)  # so that the last row is in a later part
    state = random_state()
    state["lm_head.weight"] = state["transformer.wte.weight"].clone()
    state["lm_head.weight"][-1, -1] += 1
    WRITERS[writer](tmp_path, state)
    loaded = load(tmp_path)
    assert "lm_head.weight" not in loaded
    np.testing.assert_array_equal(loaded["wte.weight"].data, state["transformer.wte.weight"])
    assert "lm_head.weight differs from wte.weight although the config ties them" in caplog.text


def test_tied_head_of_another_shape_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_safetensors(tmp_path, random_state() | {"lm_head.weight": torch.ones(2, 24)})
    assert "lm_head.weight" not in load(tmp_path)
    assert "lm_head.weight differs" in caplog.text


def test_tied_weight_that_was_stored_as_the_head(tmp_path: Path) -> None:
    state = random_state()
    state["lm_head.weight"] = state.pop("transformer.wte.weight")
    write_safetensors(tmp_path, state)
    assert_as_transformers(tmp_path)


# Orientation


@pytest.mark.parametrize("n_inner", [40, 24, 96], ids=["oblong", "square MLP", "4 x width"])
@pytest.mark.parametrize("writer", ["safetensors", "bin"])
def test_linear_layout_is_transposed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, n_inner: int, writer: str
) -> None:
    """attn.c_proj is always square, and with n_inner == n_embd so are both MLP matrices."""
    state = random_state(n_inner=n_inner)
    square = {name for name, value in state.items() if value.shape[0] == value.shape[-1] == 24}
    assert any(name.endswith("attn.c_proj.weight") for name in square)
    WRITERS[writer](tmp_path / "conv", state, n_inner=n_inner)
    WRITERS[writer](tmp_path / "linear", linear(state), n_inner=n_inner)
    expected = assert_as_transformers(tmp_path / "conv")
    assert not caplog.records
    loaded = load(tmp_path / "linear")
    assert "torch Linear, as in nanoGPT" in caplog.text
    for name, tensor in loaded.items():
        np.testing.assert_array_equal(tensor.data, expected[name].data, err_msg=name)
        assert tensor.data.flags.c_contiguous, name


def test_mixed_orientations_are_refused(tmp_path: Path) -> None:
    state = random_state()
    name = "transformer.h.1.mlp.c_fc.weight"
    state[name] = state[name].t().contiguous()
    write_safetensors(tmp_path, state)
    with pytest.raises(ValueError, match=r"\[in, out\] and h\.1\.mlp\.c_fc\.weight \[out, in\]"):
        load(tmp_path)


# Config against weights


def test_rows_decide_over_the_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_safetensors(tmp_path, random_state(), vocab_size=50257, n_positions=1024, n_ctx=16)
    checkpoint = find(str(tmp_path))
    config = load_model_config(checkpoint)
    assert (config.vocab_size, config.n_positions) == (61, 16)
    assert "vocab_size 50257 but wte.weight has 61 rows" in caplog.text
    assert "n_positions 1024 but wpe.weight has 16 rows" in caplog.text
    assert len(list(load_weights(checkpoint, config))) == len(tensor_shapes(config))


def test_every_fault_is_listed(tmp_path: Path) -> None:
    state = random_state()
    del state["transformer.h.0.ln_1.bias"], state["transformer.ln_f.weight"]
    state |= {"score.weight": torch.ones(2, 24), "transformer.h.2.ln_1.bias": torch.ones(24)}
    state["transformer.h.1.attn.c_attn.bias"] = torch.ones(71)
    state["transformer.h.1.mlp.c_fc.weight"] = torch.ones(24, 41)
    state["transformer.h.0.ln_2.bias"] = torch.ones(24, dtype=torch.int8)
    write_safetensors(tmp_path, state)
    checkpoint = find(str(tmp_path))
    with pytest.raises(ValueError, match=r"do not fit config.json") as error:
        load_weights(checkpoint, load_model_config(checkpoint))
    text = str(error.value)
    assert "missing: h.0.ln_1.bias, ln_f.weight;" in text
    assert "unexpected: score.weight, transformer.h.2.ln_1.bias;" in text
    assert "h.1.attn.c_attn.bias is [71], config.json asks [72]" in text
    assert "h.1.mlp.c_fc.weight is [24, 41], config.json asks [24, 40]" in text
    assert "h.0.ln_2.bias is int8" in text or "h.0.ln_2.bias is I8" in text
    assert "\n" not in text


def test_shapes_are_checked_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_safetensors(tmp_path, random_state(), n_layer=3)
    checkpoint = find(str(tmp_path))

    def read(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(SafetensorsFile, "read", read)
    with pytest.raises(ValueError, match=r"missing: h\.2\.ln_1\.weight"):
        load_weights(checkpoint, load_model_config(checkpoint))


def test_dummy_checkpoints_have_no_weights_to_load(tmp_path: Path) -> None:
    write_config(tmp_path)
    checkpoint = find(str(tmp_path), load_format="dummy")
    config = load_model_config(checkpoint)
    with pytest.raises(ValueError, match="use dummy_weights"):
        load_weights(checkpoint, config)
    assert config.vocab_size == 61


# Broken files


@pytest.mark.parametrize("writer", ["safetensors", "bin", "old bin"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_that_are_not_finite(tmp_path: Path, writer: str, value: float, dtype: str) -> None:
    state = random_state(getattr(torch, dtype))
    state["transformer.h.1.mlp.c_fc.weight"][-1, -1] = value
    WRITERS[writer](tmp_path, state)
    with pytest.raises(ValueError, match=r"h\.1\.mlp\.c_fc\.weight holds NaN or infinity") as error:
        load(tmp_path)
    assert str(find(str(tmp_path)).weight_files[0]) in str(error.value)


def test_float64_beyond_float32_is_not_finite(tmp_path: Path) -> None:
    state = random_state(torch.float64)
    state["transformer.ln_f.bias"][0] = 1e300
    write_safetensors(tmp_path, state)
    with pytest.raises(ValueError, match=r"ln_f\.bias holds NaN or infinity"):
        load(tmp_path)


@pytest.mark.parametrize("writer", ["safetensors", "bin", "old bin"])
@pytest.mark.parametrize("kept", [0, 4, 8, 100, -100, -1])
def test_truncated_files(tmp_path: Path, writer: str, kept: int) -> None:
    WRITERS[writer](tmp_path, random_state())
    path = find(str(tmp_path)).weight_files[0]
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"truncated|corrupt") as error:
        load(tmp_path)
    assert str(path) in str(error.value)


def safetensors_header(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def corrupted(header: dict[str, Any], how: str) -> object:
    entry = header["transformer.wpe.weight"]
    first, last = entry["data_offsets"]
    if how == "not an object":
        return list(header)
    if how == "no dtype":
        del entry["dtype"]
    if how == "negative shape":
        entry["shape"] = [-16, -24]
    if how == "another shape":
        entry["shape"] = [16, 25]
    if how == "another dtype":
        entry["dtype"] = "F16"
    if how == "overlap":
        entry["data_offsets"] = [first - 4, last - 4]
    if how == "backwards":
        entry["data_offsets"] = [last, first]
    if how == "beyond the end":
        entry["data_offsets"] = [first + 10**9, last + 10**9]
    return header


@pytest.mark.parametrize(
    "how",
    [
        "not an object",
        "no dtype",
        "negative shape",
        "another shape",
        "another dtype",
        "overlap",
        "backwards",
        "beyond the end",
    ],
)
def test_safetensors_whose_header_lies(tmp_path: Path, how: str) -> None:
    write_safetensors(tmp_path, random_state())
    path = tmp_path / "model.safetensors"
    header, body = safetensors_header(path)
    text = json.dumps(corrupted(header, how)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    with pytest.raises(ValueError, match=r"corrupt|truncated"):
        load(tmp_path)


def test_safetensors_with_bytes_to_spare(tmp_path: Path) -> None:
    write_safetensors(tmp_path, random_state())
    with (tmp_path / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match=r"corrupt: its header describes \d+ bytes, it has \d+"):
        load(tmp_path)


def test_unaligned_tensors_are_read_aligned(tmp_path: Path) -> None:
    """Writers are asked to pad the header to 8 bytes; old ones did not."""
    write_safetensors(tmp_path, random_state())
    path = tmp_path / "model.safetensors"
    header, body = safetensors_header(path)
    text = json.dumps(header).encode()
    text += b" " * (1 + -len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    assert_as_transformers(tmp_path)


class Trap:
    """Unpickling it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("new_format", [True, False])
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path, new_format: bool) -> None:
    write_config(tmp_path)
    state: dict[str, object] = {**random_state(), "extra": Trap(tmp_path / "trapped")}
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=new_format)
    with pytest.raises(ValueError, match="objects that are not tensors; such a file is never run"):
        load(tmp_path)
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize(
    "content,words",
    [
        ({"model": {}, "step": 3}, "training checkpoint, not a state_dict: model, step .*nanogpt"),
        ([torch.ones(2)], "holds a list, not named tensors"),
    ],
)
def test_a_bin_that_is_no_state_dict(tmp_path: Path, content: object, words: str) -> None:
    write_config(tmp_path)
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=words):
        load(tmp_path)


def test_a_tensor_that_views_another(tmp_path: Path) -> None:
    """state_dicts of tied or split modules share storage; each tensor comes out its own."""
    state = random_state()
    both = torch.randn(2, 24)
    state["transformer.ln_f.weight"], state["transformer.ln_f.bias"] = both[0], both[1]
    state["transformer.wpe.weight"] = torch.randn(24, 16).t()
    for writer in ("bin", "old bin"):
        WRITERS[writer](tmp_path / writer, state)
        loaded = assert_as_transformers(tmp_path / writer)
        loaded["ln_f.weight"].data[:] = 0
        np.testing.assert_array_equal(loaded["ln_f.bias"].data, both[1])


# Without torch, and within memory


def run(script: str, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, args)], capture_output=True, text=True, check=False
    )


def test_torch_is_needed_for_bin_only(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "safe", random_state())
    write_bin(tmp_path / "pickled", random_state())
    result = run(
        """
import sys
sys.modules["torch"] = None
from nanoserve.model.hub import find
from nanoserve.model.weights import load_model_config, load_weights, dummy_weights
safe = find(sys.argv[1])
config = load_model_config(safe)
print(sum(t.data.size for t in load_weights(safe, config)))
print(sum(t.data.size for t in dummy_weights(config, 0)))
try:
    load_model_config(find(sys.argv[2]))
except ValueError as error:
    print(error)
""",
        tmp_path / "safe",
        tmp_path / "pickled",
    )
    loaded, dummy, message = result.stdout.splitlines()
    assert loaded == dummy == str(sum(v.numel() for v in random_state().values())), result.stderr
    assert "need torch to be read: pip install 'nanoserve[torch]'" in message


MEASURE = """
import sys
from pathlib import Path
from nanoserve.model.hub import find
from nanoserve.model.weights import as_float32, load_model_config, load_weights
def peak():  # not getrusage's: that one starts from what the parent had
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
checkpoint = find(sys.argv[1])
if checkpoint.weight_format == "pt":
    import nanoserve.model.pickled
before = peak()
tensors = load_weights(checkpoint, load_model_config(checkpoint))
kept = [as_float32(t) if sys.argv[2] == "cast" else t.data for t in tensors]
print(sum(a.nbytes for a in kept), peak() - before)
"""


@pytest.mark.parametrize(
    "writer,dtype,then",
    [
        ("safetensors", "float32", "keep"),
        ("safetensors", "float16", "cast"),
        ("bin", "float32", "keep"),
        ("bin", "float16", "cast"),
        ("old bin", "float16", "cast"),
    ],
)
def test_loading_takes_memory_for_the_weights_once(
    tmp_path: Path, writer: str, dtype: str, then: str
) -> None:
    """Peak memory of the process, over what it had before, within 1.3 x the weights it keeps."""
    shape = {"n_embd": 512, "n_head": 8, "n_inner": 2048, "n_layer": 16, "vocab_size": 4096}
    state = {
        f"transformer.{name}": torch.ones(size, dtype=getattr(torch, dtype))
        for name, size in tensor_shapes(config_of(**shape)).items()
    }
    WRITERS[writer](tmp_path, state, **shape)
    result = run(MEASURE, tmp_path, then)
    find(str(tmp_path)).weight_files[0].unlink()  # pytest keeps the folders of the last runs
    assert result.returncode == 0, result.stderr
    kept_bytes, peak_bytes = map(int, result.stdout.split())
    assert kept_bytes > 200e6
    assert 0.9 * kept_bytes < peak_bytes < 1.3 * kept_bytes


# Dummy weights


def test_dummy_weights_are_a_function_of_the_seed() -> None:
    config = config_of(tie_word_embeddings=False)
    first, again, other = (list(dummy_weights(config, seed)) for seed in (3, 3, 4))
    assert [(t.name, t.data.shape) for t in first] == list(tensor_shapes(config).items())
    assert all(np.array_equal(a.data, b.data) for a, b in zip(first, again, strict=True))
    matrices = [(a, b) for a, b in zip(first, other, strict=True) if a.data.ndim == 2]
    assert not any(np.array_equal(a.data, b.data) for a, b in matrices)
    drawn = [a.data.ravel()[:24].tobytes() for a, _ in matrices]
    assert len(set(drawn)) == len(drawn)
    assert {t.data.dtype for t in first} == {np.dtype(np.float32)}


def test_dummy_weights_do_not_depend_on_other_tensors() -> None:
    """A deeper model begins with the same layers, so shapes can be compared."""
    shallow = {t.name: t.data for t in dummy_weights(config_of(n_layer=1), 0)}
    deep = {t.name: t.data for t in dummy_weights(config_of(n_layer=3), 0)}
    assert all(np.array_equal(deep[name], data) for name, data in shallow.items())


def test_dummy_weights_have_the_deviations_they_claim() -> None:
    tensors = {t.name: t.data for t in dummy_weights(config_of(n_embd=120, n_inner=480), 1)}
    attention = tensors["h.0.attn.c_attn.weight"]
    assert np.std(tensors["wte.weight"]) == pytest.approx(0.02, rel=0.05)
    assert np.std(tensors["wpe.weight"]) == pytest.approx(0.1, rel=0.05)
    assert np.std(attention[:, :240]) == pytest.approx(0.08, rel=0.05)
    assert np.std(attention[:, 240:]) == pytest.approx(0.02, rel=0.05)
    assert abs(np.mean(attention)) < 0.002
    assert not tensors["h.0.attn.c_attn.bias"].any()
    assert (tensors["h.0.ln_1.weight"] == 1).all()


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, True, None])
def test_dummy_seed_must_be_in_range(seed: Any) -> None:
    with pytest.raises(ValueError, match="dummy seed must be an integer"):
        next(iter(dummy_weights(config_of(), seed)))


def with_weights(config: GPT2Config, tensors: Iterable[WeightTensor]) -> GPT2LMHeadModel:
    model = GPT2LMHeadModel(config).eval()
    for tensor in tensors:
        parameter = model.get_parameter(f"transformer.{tensor.name}")
        parameter.data.copy_(torch.from_numpy(tensor.data))
    return model


PROMPTS = [[7454, 2402, 257, 640], [50256] * 4, [464, 5417, 373, 9480], [11, 11, 11, 11]]


@torch.inference_mode()
def greedy(model: GPT2LMHeadModel, num_tokens: int) -> list[list[int]]:
    """The next tokens of each of PROMPTS, modulo the vocabulary, all prompts in one batch."""
    ids = torch.tensor(PROMPTS) % model.config.vocab_size
    cache, columns = DynamicCache(config=model.config), []
    for _ in range(num_tokens):
        ids = model(ids, cache=cache).logits[:, -1].argmax(-1, keepdim=True)
        columns.append(ids)
    return torch.cat(columns, dim=1).tolist()


@pytest.mark.parametrize("seed", [0, 1])
def test_greedy_text_of_a_small_dummy_stays_varied(seed: int) -> None:
    sizes = {"vocab_size": 512, "n_positions": 256, "n_embd": 64, "n_head": 4, "n_inner": 256}
    config = GPT2Config(**{**SIZES, **sizes})
    model = with_weights(config, dummy_weights(config_of(**sizes), seed))
    assert min(len(set(tokens)) for tokens in greedy(model, 200)) >= 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_greedy_text_of_the_dummy_gpt2_stays_varied(seed: int) -> None:
    checkpoint = find("gpt2", load_format="dummy")
    model = with_weights(GPT2Config(), dummy_weights(load_model_config(checkpoint), seed))
    assert min(len(set(tokens)) for tokens in greedy(model, 200)) >= 100


@pytest.mark.slow
def test_the_dummy_gpt2_is_drawn_fast() -> None:
    config = load_model_config(find("gpt2", load_format="dummy"))
    start = time.perf_counter()
    num_values = sum(t.data.size for t in dummy_weights(config, 0))
    assert num_values == 124_439_808
    assert time.perf_counter() - start < 10


def test_as_float32_is_exact() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    half = values.half()
    brain = values.bfloat16()
    of_half = as_float32(WeightTensor(name="x", data=half.numpy(), dtype="float16"))
    bits = brain.view(torch.int16).numpy().view(np.uint16)
    of_brain = as_float32(WeightTensor(name="x", data=bits, dtype="bfloat16"))
    np.testing.assert_array_equal(of_half, half.float().numpy())
    np.testing.assert_array_equal(of_brain, brain.float().numpy())
    single = WeightTensor(name="x", data=values.numpy(), dtype="float32")
    assert as_float32(single) is single.data
