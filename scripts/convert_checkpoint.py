"""Convert a checkpoint of nanoGPT or llm.c into a folder that `nanoserve --model` takes.

    python scripts/convert_checkpoint.py nanogpt out/ckpt.pt --out build/mymodel
    python scripts/convert_checkpoint.py llmc log124M/model_19560.bin --out build/mymodel

The kind is named, never guessed, because neither file says all that matters: both keep matrices
[out, in] where GPT-2 keeps [in, out], nanoGPT's GELU is the exact one where llm.c's is the tanh
form (`--activation` overrides), nanoGPT may leave out every bias (which is the same as biases of
zero), and llm.c pads the vocabulary. What was assumed is printed. `--tokenizer FOLDER` copies
tokenizer files in. nanoGPT's file is a pickle: reading it takes torch, and runs none of its code.
"""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoserve.config import ACTIVATIONS, ModelConfig
from nanoserve.model.hub import SMALL_FILES
from nanoserve.model.weights import WeightTensor, tensor_shapes

Array = NDArray[np.generic]
Read = Callable[[str], WeightTensor]
"""From a canonical name to its tensor, matrices already [in, out]."""

LLMC_MAGIC = 20240326
LLMC_HEADER_INTS = 256
LLMC_VERSIONS = {3: "float32", 5: "bfloat16"}
NANOGPT_SIZES = {
    "vocab_size": "vocab_size",
    "block_size": "n_positions",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
}
STORED_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
NUMPY_DTYPES = {"float32": "<f4", "bfloat16": "<u2"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("kind", choices=sorted(SOURCES), help="what wrote the checkpoint")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="a folder that is new or empty")
    parser.add_argument(
        "--activation", choices=ACTIVATIONS, help="default: gelu for nanogpt, gelu_new for llmc"
    )
    parser.add_argument("--tokenizer", type=Path, help="a folder to copy tokenizer files from")
    options = parser.parse_args(argv)
    try:
        convert(
            options.kind,
            options.checkpoint,
            options.out,
            activation=options.activation,
            tokenizer=options.tokenizer,
        )
    except (ValueError, FileNotFoundError) as error:
        print(f"convert_checkpoint: {error}", file=sys.stderr)
        return 2
    return 0


def convert(
    kind: str,
    source: Path,
    out: Path,
    *,
    activation: str | None = None,
    tokenizer: Path | None = None,
) -> None:
    """Write config.json, model.safetensors and what `tokenizer` holds into the folder `out`.

    Raises ValueError for a checkpoint that is not of this kind, or is not plain GPT-2.
    """
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out {out} is not empty")
    open_source, default_activation = SOURCES[kind]
    config, read, assumed = open_source(source, activation or default_activation)
    copied = [name for name in SMALL_FILES if tokenizer and (tokenizer / name).is_file()]
    if tokenizer and not copied:
        raise ValueError(f"--tokenizer {tokenizer} holds none of {', '.join(SMALL_FILES)}")
    out.mkdir(parents=True, exist_ok=True)
    write_safetensors(out / "model.safetensors", (read(name) for name in tensor_shapes(config)))
    (out / "config.json").write_text(json.dumps(hf_config(config), indent=2) + "\n")
    for name in copied:
        shutil.copyfile(Path(tokenizer or ".") / name, out / name)
    for line in (f"activation {config.activation_function}", *assumed):
        print(f"assumed: {line}")
    print(f"{out}: {config.n_layer} layers of width {config.n_embd}; tokenizer: {copied or 'none'}")


def hf_config(config: ModelConfig) -> dict[str, object]:
    """A config.json that says the same as `config`."""
    values = {name: getattr(config, name) for name in ModelConfig.__dataclass_fields__}
    return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **values}


def write_safetensors(path: Path, tensors: Iterable[WeightTensor]) -> None:
    """Tensors end to end, then the header that describes them before them.

    The length of a header is not known before its offsets are, so the tensors go through a file of
    their own: a model is never held whole.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = path.with_suffix(".body")
    with body.open("wb") as file:
        for tensor in tensors:
            start = file.tell()
            file.write(np.ascontiguousarray(tensor.data).data)
            header[f"transformer.{tensor.name}"] = {
                "dtype": STORED_DTYPES[tensor.dtype],
                "shape": list(tensor.data.shape),
                "data_offsets": [start, file.tell()],
            }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format asks for tensors that start on a multiple of 8
    with path.open("wb") as file, body.open("rb") as tensors_file:
        file.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(tensors_file, file, 1 << 24)
    body.unlink()


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether both formats keep it as a Linear's [out, in]: all but embeddings and vectors."""
    return len(shape) == 2 and name.startswith("h.")


def open_llmc(path: Path, activation: str) -> tuple[ModelConfig, Read, list[str]]:
    """llm.c's `.bin`: 256 int32, then each parameter of all layers together, in GPT-2's order."""
    header = np.fromfile(path, dtype="<i4", count=LLMC_HEADER_INTS)
    if header.size < LLMC_HEADER_INTS or header[0] != LLMC_MAGIC:
        raise ValueError(f"{path} is not a model of llm.c: its first number is not {LLMC_MAGIC}")
    dtype = LLMC_VERSIONS.get(int(header[1]))
    if dtype is None:
        raise ValueError(f"{path} has llm.c version {header[1]}; versions 3 and 5 are read")
    n_positions, vocab_size, n_layer, n_head, n_embd, padded = map(int, header[2:8])
    config = ModelConfig(
        vocab_size=vocab_size,
        n_positions=n_positions,
        n_embd=n_embd,
        n_layer=n_layer,
        n_head=n_head,
        n_inner=4 * n_embd,
        activation_function=activation,
    )
    shapes = tensor_shapes(config) | {"wte.weight": (padded, n_embd)}
    data = np.memmap(path, dtype=NUMPY_DTYPES[dtype], mode="r", offset=4 * LLMC_HEADER_INTS)
    offsets = llmc_offsets(shapes, n_layer)
    if data.size != offsets["end"]:
        raise ValueError(
            f"{path} holds {data.size} values after its header, which describes {offsets['end']}"
        )

    def read(name: str) -> WeightTensor:
        shape = shapes[name]
        flat = data[offsets[name] :][: int(np.prod(shape))]
        values = flat.reshape(shape[::-1]).T if is_matrix(name, shape) else flat.reshape(shape)
        values = values[:vocab_size] if name == "wte.weight" else values
        return WeightTensor(name=name, data=np.array(values, order="C"), dtype=dtype)

    return config, read, [f"a vocabulary of {vocab_size}, padded to {padded} in the file"]


def llmc_offsets(shapes: Mapping[str, tuple[int, ...]], n_layer: int) -> dict[str, int]:
    """Where each tensor starts, in values; "end" is where the last one ends."""
    kinds = [name.removeprefix("h.0.") for name in shapes if name.startswith("h.0.")]
    order = ["wte.weight", "wpe.weight"]
    order += [f"h.{layer}.{kind}" for kind in kinds for layer in range(n_layer)]
    order += ["ln_f.weight", "ln_f.bias"]
    ends = np.cumsum([0] + [int(np.prod(shapes[name])) for name in order])
    return dict(zip([*order, "end"], map(int, ends), strict=True))


def open_nanogpt(path: Path, activation: str) -> tuple[ModelConfig, Read, list[str]]:
    """nanoGPT's `ckpt.pt`: a dict with the state_dict in "model" and the sizes in "model_args"."""
    import torch

    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{path} cannot be read as tensors alone: {reason}") from error
    if not isinstance(saved, dict) or not {"model", "model_args"} <= saved.keys():
        raise ValueError(f"{path} is not a checkpoint of nanoGPT: it lacks model or model_args")
    config = nanogpt_config(saved["model_args"], activation)
    state = {
        key.removeprefix("_orig_mod.").removeprefix("transformer."): value
        for key, value in saved["model"].items()
        if not key.endswith((".attn.bias", ".attn.masked_bias"))
    }
    check_nanogpt(state, tensor_shapes(config))

    def read(name: str) -> WeightTensor:
        shape = tensor_shapes(config)[name]
        if name not in state:
            return WeightTensor(name=name, data=np.zeros(shape, np.float32), dtype="float32")
        tensor = state[name].t() if is_matrix(name, shape) else state[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        bits = tensor.contiguous().view(torch.int16) if dtype == "bfloat16" else tensor.contiguous()
        return WeightTensor(name=name, data=bits.numpy(), dtype=dtype)

    without_bias = [name for name in tensor_shapes(config) if name not in state]
    assumed = [f"{len(without_bias)} biases that the file leaves out are 0"]
    return config, read, assumed if without_bias else []


def nanogpt_config(model_args: Mapping[str, Any], activation: str) -> ModelConfig:
    """Raises ValueError for an argument that nanoGPT lacks: a fork may compute otherwise."""
    strange = sorted(
        key
        for key, value in model_args.items()
        if key not in {*NANOGPT_SIZES, "bias", "dropout"} and value
    )
    missing = sorted(NANOGPT_SIZES.keys() - model_args.keys())
    if strange or missing:
        raise ValueError(f"model_args are not nanoGPT's: unknown {strange}, missing {missing}")
    sizes = {ours: model_args[theirs] for theirs, ours in NANOGPT_SIZES.items()}
    return ModelConfig(**sizes, n_inner=4 * sizes["n_embd"], activation_function=activation)


def check_nanogpt(state: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Take the tied head out of `state`; raise ValueError unless the rest is what GPT-2 has."""
    head = state.pop("lm_head.weight", None)
    if head is not None and "wte.weight" in state and not head.equal(state["wte.weight"]):
        raise ValueError("lm_head.weight is not wte.weight, though nanoGPT ties them")
    faults = [f"unexpected {name}" for name in state if name not in shapes]
    for name, shape in shapes.items():
        expected = shape[::-1] if is_matrix(name, shape) else shape
        if name not in state and not name.endswith(".bias"):
            faults.append(f"missing {name}")
        elif name in state and tuple(state[name].shape) != expected:
            faults.append(f"{name} is {list(state[name].shape)}, not {list(expected)}")
        elif name in state and str(state[name].dtype).removeprefix("torch.") not in STORED_DTYPES:
            faults.append(f"{name} is {state[name].dtype}")
    if faults:
        raise ValueError(f"the weights are not plain GPT-2: {'; '.join(faults)}")


SOURCES = {"nanogpt": (open_nanogpt, "gelu"), "llmc": (open_llmc, "gelu_new")}

if __name__ == "__main__":
    sys.exit(main())
