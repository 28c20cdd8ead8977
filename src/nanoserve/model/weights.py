"""GPT-2 weights as named numpy arrays: read strictly from a checkpoint, or made up from a seed.

Names are Hugging Face's without `transformer.` (`h.0.attn.c_attn.weight`), matrices are `[in, out]`
(Conv1D), and the set of names is exactly what the config asks for, or an error lists the
difference. Key sets and shapes are settled from the files' headers before any weight is read; then
tensors are read one at a time and given away, so that loading holds the weights about once.
No torch here: bfloat16 comes as uint16 beside its dtype's name.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nanoserve.config import ModelConfig
from nanoserve.model.hub import Checkpoint

logger = logging.getLogger(__name__)

Array = NDArray[np.generic]
Header = Mapping[str, tuple[str, tuple[int, ...]]]
"""Of each tensor in a file: its dtype's name and its shape."""

_SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_STORAGE = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
_EXPONENT_BITS = {"float32": 0x7F80_0000, "float16": 0x7C00, "bfloat16": 0x7F80}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_CHUNK_VALUES = 1 << 20
_COMPARED_ROWS = 4096

_MASKS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
_OTHER_HEADS = ("v_head.", "multiple_choice_head.")
_MATRICES = tuple(f"{m}.weight" for m in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightTensor:
    """One weight: C-contiguous, writable and the receiver's own.

    `dtype` is float32, float16 or bfloat16; the last is stored in `data` as uint16.
    """

    name: str
    data: Array
    dtype: str


class TensorFile(Protocol):
    """A file of named tensors, whatever its format: what it holds, and one tensor at a time."""

    path: Path

    @property
    def header(self) -> Header: ...

    def read(self, key: str, rows: slice = ...) -> Array: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies, known before it is read. `key` is its name in `file`."""

    key: str
    file: TensorFile
    dtype: str
    shape: tuple[int, ...]

    def read(self, rows: slice = slice(None)) -> Array:
        """Its values (or some rows), float64 as float32.

        Raises ValueError, naming file and tensor, if a value is NaN or infinite.
        """
        data = self.file.read(self.key, rows)
        if self.dtype == "float64":
            with np.errstate(over="ignore"):  # what float32 cannot hold is refused below
                data = data.astype(np.float32)
        if not _is_finite(data, self.loaded_dtype):
            raise ValueError(f"{self.file.path}: {self.key} holds NaN or infinity")
        return data

    @property
    def loaded_dtype(self) -> str:
        """The dtype that `read` gives: no backend of ours computes in float64."""
        return "float32" if self.dtype == "float64" else self.dtype


def load_model_config(checkpoint: Checkpoint) -> ModelConfig:
    """The checkpoint's config, with vocabulary and positions as its weights have them.

    The rows of `wte` are the vocabulary and the rows of `wpe` the positions; where config.json says
    otherwise a warning says so. Raises ValueError for a config that is not GPT-2's and for files
    that cannot be read.
    """
    config = ModelConfig.from_hf(checkpoint.raw_config)
    if checkpoint.kind == "dummy":
        return config
    stored = _stored_tensors(checkpoint, tied=config.tie_word_embeddings)
    for name, size in (("wte.weight", "vocab_size"), ("wpe.weight", "n_positions")):
        table = stored.get(name)
        if table is None or len(table.shape) != 2 or table.shape[0] == getattr(config, size):
            continue
        logger.warning(
            "%s: config.json says %s %d but %s has %d rows; the rows count",
            checkpoint.name,
            size,
            getattr(config, size),
            name,
            table.shape[0],
        )
        config = replace(config, **{size: table.shape[0]})  # type: ignore[arg-type]
    return config


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight that a model of this config has, in the order they are loaded: name to shape.

    `lm_head.weight` is among them only if the head is not tied to `wte`.
    """
    C, inner = config.n_embd, config.n_inner
    block = {
        "ln_1.weight": (C,),
        "ln_1.bias": (C,),
        "attn.c_attn.weight": (C, 3 * C),
        "attn.c_attn.bias": (3 * C,),
        "attn.c_proj.weight": (C, C),
        "attn.c_proj.bias": (C,),
        "ln_2.weight": (C,),
        "ln_2.bias": (C,),
        "mlp.c_fc.weight": (C, inner),
        "mlp.c_fc.bias": (inner,),
        "mlp.c_proj.weight": (inner, C),
        "mlp.c_proj.bias": (C,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (config.vocab_size, C),
        "wpe.weight": (config.n_positions, C),
    }
    for layer in range(config.n_layer):
        shapes |= {f"h.{layer}.{name}": shape for name, shape in block.items()}
    shapes |= {"ln_f.weight": (C,), "ln_f.bias": (C,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, C)
    return shapes


def load_weights(checkpoint: Checkpoint, config: ModelConfig) -> Iterator[WeightTensor]:
    """The weights of `checkpoint`, exactly those of `tensor_shapes(config)`, in that order.

    Matrices stored `[out, in]` (torch's Linear) are recognised by their shapes and transposed.
    Keys and shapes are checked in this call, values as they are read. Raises ValueError for
    missing, unexpected or misshapen tensors (all of them listed), for files that are truncated or
    corrupt, and for values that are not finite.
    """
    if checkpoint.kind == "dummy":
        raise ValueError(f"{checkpoint.name} was found without weights; use dummy_weights")
    shapes = tensor_shapes(config)
    stored = _stored_tensors(checkpoint, tied=config.tie_word_embeddings)
    _drop_other_heads(checkpoint, stored)
    tied_head = stored.pop("lm_head.weight", None) if config.tie_word_embeddings else None
    is_linear = _is_linear(checkpoint, stored, shapes)
    _check(checkpoint, stored, shapes, is_linear=is_linear)
    if tied_head:
        _compare_tied_head(checkpoint, stored["wte.weight"], tied_head)
    return _read_in_order(stored, shapes, is_linear=is_linear)


def dummy_weights(config: ModelConfig, seed: int) -> Iterator[WeightTensor]:
    """Random float32 weights of this shape: a pure function of (config, seed).

    Each matrix is uniform with a set standard deviation, from a Philox stream keyed by the seed and
    its place in `tensor_shapes`; biases are 0 and norms 1, as GPT-2 starts. With GPT-2's own
    initial 0.02 everywhere, greedy decoding repeats a token at once, and then tests of equal tokens
    could not fail: so positions are drawn wider (0.1), and queries and keys are 4 times as large,
    which makes attention choose.

    Raises ValueError for a seed outside [0, 2^64).
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ValueError(f"the dummy seed must be an integer in [0, 2^64), got {seed!r}")
    for index, (name, shape) in enumerate(tensor_shapes(config).items()):
        if len(shape) == 1:
            data = np.full(shape, 1.0 if name.endswith("weight") else 0.0, dtype=np.float32)
        else:
            std = 0.1 if name == "wpe.weight" else 0.02
            key = np.array([seed, index], dtype=np.uint64)
            data = np.random.Generator(np.random.Philox(key=key)).random(shape, dtype=np.float32)
            data -= np.float32(0.5)
            data *= np.float32(std * math.sqrt(12))  # a unit interval's deviation is 1/sqrt(12)
            if name.endswith("c_attn.weight"):
                data[:, : 2 * config.n_embd] *= np.float32(4)
        yield WeightTensor(name=name, data=data, dtype="float32")


def as_float32(tensor: WeightTensor) -> NDArray[np.float32]:
    """The tensor's values in float32, exactly; its own array where they are so already."""
    if tensor.dtype == "bfloat16":
        return (tensor.data.astype(np.uint32) << 16).view(np.float32)
    return tensor.data.astype(np.float32, copy=False)


class SafetensorsFile:
    """One `.safetensors` file: an 8-byte length, a JSON header, then the tensors end to end.

    Read by hand, because the library's numpy side does not know bfloat16, and with plain reads
    rather than a mapping, because a read gives an array that is the receiver's own.
    Format: https://github.com/huggingface/safetensors#format. Raises ValueError, naming the file,
    if header and size do not fit together.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets: dict[str, int] = {}
        self.header: dict[str, tuple[str, tuple[int, ...]]] = {}
        entries, data_start = self._entries()
        expected = data_start
        for key, dtype, shape, start, stop in entries:
            self.header[key] = (_SAFETENSORS_DTYPES.get(dtype, dtype), shape)
            self._offsets[key] = data_start + start
            if data_start + start != expected or not self._fits(key, stop - start):
                raise ValueError(f"{path} is corrupt: the place of {key} in the file is impossible")
            expected = data_start + stop
        actual = path.stat().st_size
        if actual != expected:
            fault = "truncated" if actual < expected else "corrupt"
            raise ValueError(
                f"{path} is {fault}: its header describes {expected} bytes, it has {actual}"
            )

    def read(self, key: str, rows: slice = slice(None)) -> Array:
        """WeightTensor `key`, or some of its rows; bfloat16 as uint16."""
        dtype_name, shape = self.header[key]
        dtype = np.dtype(_STORAGE[dtype_name])
        row_values = math.prod(shape[1:])
        first, last, _ = rows.indices(shape[0] if shape else 1)
        count = max(0, last - first) * row_values
        offset = self._offsets[key] + first * row_values * dtype.itemsize
        data = np.fromfile(self.path, dtype=dtype, count=count, offset=offset)
        if data.size != count:
            raise ValueError(f"{self.path} is truncated: it ends inside {key}")
        return data.reshape(-1, *shape[1:]) if shape else data.reshape(())

    def _entries(self) -> tuple[list[tuple[str, str, tuple[int, ...], int, int]], int]:
        """[(key, dtype, shape, start, stop)] in the file's order, and where the data start."""
        with self.path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > min(_MAX_HEADER_BYTES, self.path.stat().st_size):
                raise ValueError(f"{self.path} is truncated or corrupt: its header is not whole")
            text = file.read(header_bytes)
        try:
            raw = json.loads(text)
            raw.pop("__metadata__", None)
            entries = [
                (key, str(e["dtype"]), tuple(map(int, e["shape"])), *map(int, e["data_offsets"]))
                for key, e in raw.items()
            ]
            entries.sort(key=lambda entry: entry[3:])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{self.path} is corrupt: its header cannot be read") from error
        return entries, 8 + header_bytes

    def _fits(self, key: str, num_bytes: int) -> bool:
        dtype, shape = self.header[key]
        if dtype not in _STORAGE:
            return num_bytes >= 0
        itemsize = np.dtype(_STORAGE[dtype]).itemsize
        return min(shape, default=1) >= 0 and num_bytes == math.prod(shape) * itemsize


def read_safetensors(paths: Iterable[Path]) -> list[TensorFile]:
    """The files' headers; the tensors follow one at a time."""
    return [SafetensorsFile(path) for path in paths]


def read_bin(paths: Iterable[Path]) -> list[TensorFile]:
    """The same of `.bin` files. Raises ValueError if torch is not installed."""
    # A lazy import of our own, the one beside executors and commands: reading a pickle takes torch,
    # and everything else about a model must work where torch is not installed.
    try:
        from nanoserve.model.pickled import PickledFile
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ValueError(
            f"{', '.join(map(str, paths))}: .bin files are pickles and need torch to be read: "
            "pip install 'nanoserve[torch]', or convert them to safetensors"
        ) from error
    return [PickledFile(path) for path in paths]


def _stored_tensors(checkpoint: Checkpoint, *, tied: bool) -> dict[str, StoredTensor]:
    """What the checkpoint holds, under canonical names, without the causal-mask buffers.

    Raises ValueError for a name that stands twice and for cross-attention.
    """
    stored: dict[str, StoredTensor] = {}
    read = read_safetensors if checkpoint.weight_format == "safetensors" else read_bin
    for file in read(checkpoint.weight_files):
        for key, (dtype, shape) in file.header.items():
            name = key.removeprefix("_orig_mod.").removeprefix("transformer.")
            if _MASKS.fullmatch(name):  # of old checkpoints; c_attn.bias is another matter
                continue
            if ".crossattention." in name or ".ln_cross_attn." in name:
                raise ValueError(
                    f"{file.path}: {key} is cross-attention: a decoder of an encoder, not GPT-2"
                )
            if name in stored:
                raise ValueError(f"{file.path}: {key} is there twice (as {stored[name].key})")
            stored[name] = StoredTensor(key=key, file=file, dtype=dtype, shape=shape)
    if tied and "wte.weight" not in stored and "lm_head.weight" in stored:
        # Writers that store a shared tensor once may keep it under either of its names.
        stored["wte.weight"] = stored.pop("lm_head.weight")
    return stored


def _drop_other_heads(checkpoint: Checkpoint, stored: dict[str, StoredTensor]) -> None:
    """Take heads of other tasks (reward models, multiple choice) out of `stored`; say so."""
    dropped = [name for name in stored if name.startswith(_OTHER_HEADS)]
    for name in dropped:
        del stored[name]
    if dropped:
        logger.warning(
            "%s: dropped %s: not of the language model", checkpoint.name, ", ".join(dropped)
        )


def _compare_tied_head(checkpoint: Checkpoint, wte: StoredTensor, head: StoredTensor) -> None:
    """Warn if a head that the config calls tied is not `wte`: `wte` is used all the same."""
    equal = wte.shape == head.shape and head.dtype in _STORAGE
    for first in range(0, wte.shape[0], _COMPARED_ROWS) if equal else ():
        rows = slice(first, first + _COMPARED_ROWS)
        equal = equal and np.array_equal(_float32_rows(wte, rows), _float32_rows(head, rows))
    if not equal:
        logger.warning(
            "%s: lm_head.weight differs from wte.weight although the config ties them; wte is "
            "used (tie_word_embeddings false in config.json would use the head)",
            checkpoint.name,
        )


def _float32_rows(stored: StoredTensor, rows: slice) -> NDArray[np.float32]:
    data = stored.read(rows)
    return as_float32(WeightTensor(name=stored.key, data=data, dtype=stored.loaded_dtype))


def _is_linear(
    checkpoint: Checkpoint,
    stored: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
) -> bool:
    """Whether the checkpoint's matrices are `[out, in]` as torch's Linear keeps them.

    A square matrix looks the same both ways, so the checkpoint has one answer for all: that of its
    matrices that are not square (`c_attn` never is). Raises ValueError if these disagree.
    """
    seen: dict[bool, str] = {}
    for name, shape in shapes.items():
        if name.endswith(_MATRICES) and name in stored:
            if stored[name].shape == shape != shape[::-1]:
                seen.setdefault(False, name)
            elif stored[name].shape == shape[::-1] != shape:
                seen.setdefault(True, name)
    if len(seen) == 2:
        raise ValueError(
            f"{checkpoint.name}: {seen[False]} is stored [in, out] and {seen[True]} [out, in]; "
            "a checkpoint must keep to one"
        )
    if True in seen:
        logger.warning(
            "%s: matrices are stored [out, in] (torch Linear, as in nanoGPT), seen on %s; all are "
            "transposed while reading",
            checkpoint.name,
            seen[True],
        )
    return True in seen


def _check(
    checkpoint: Checkpoint,
    stored: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    is_linear: bool,
) -> None:
    """Raise ValueError listing every missing, unexpected, misshapen and unreadable tensor."""
    missing = [name for name in shapes if name not in stored]
    unexpected = [stored[name].key for name in stored if name not in shapes]
    misshapen = []
    for name in shapes.keys() & stored.keys():
        shape = shapes[name][::-1] if is_linear and name.endswith(_MATRICES) else shapes[name]
        if stored[name].shape != shape:
            misshapen.append(
                f"{name} is {list(stored[name].shape)}, config.json asks {list(shape)}"
            )
    dtypes = [
        f"{name} is {stored[name].dtype}"
        for name in shapes
        if name in stored and stored[name].dtype not in _STORAGE
    ]
    faults = {
        "missing": missing,
        "unexpected": unexpected,
        "wrong shape": sorted(misshapen),
        "not floating-point weights": dtypes,
    }
    listed = [f"{fault}: {', '.join(names)}" for fault, names in faults.items() if names]
    if listed:
        where = checkpoint.weight_files[0].parent
        raise ValueError(f"the weights in {where} do not fit config.json: {'; '.join(listed)}")


def _read_in_order(
    stored: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]], *, is_linear: bool
) -> Iterator[WeightTensor]:
    for name in shapes:
        data = stored[name].read()
        if is_linear and name.endswith(_MATRICES):
            data = np.ascontiguousarray(data.T)
        yield WeightTensor(name=name, data=data, dtype=stored[name].loaded_dtype)
        del data  # or this frame would hold the last tensor while the next is read


def _is_finite(data: Array, dtype: str) -> bool:
    """Whether no value is NaN or infinite: those have all their exponent bits set."""
    bits = np.dtype(f"u{data.itemsize}")
    mask = bits.type(_EXPONENT_BITS[dtype])
    flat = data.reshape(-1).view(bits)
    chunks = (flat[i : i + _CHUNK_VALUES] for i in range(0, flat.size, _CHUNK_VALUES))
    return not any(np.any((chunk & mask) == mask) for chunk in chunks)
