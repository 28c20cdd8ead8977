"""The native core's shared objects: which were built, which this CPU runs, and their C interface.

One object per instruction set is compiled from the same sources (see setup.py); all give the same
bits, so the choice is about speed alone: the strongest that is here and runs. NANOSERVE_CPU_ISA
names another. The structures below are `ns.h` word for word, and an object that was compiled from
another `ns.h` is refused. ctypes lets other Python threads run while a function of the core does.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, ClassVar

ISA_VARIABLE = "NANOSERVE_CPU_ISA"
ABI_VERSION = 4
MAX_TOP_LOGPROBS = 64
FOLDER = Path(__file__).parent

_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}

CPU_FLAGS: Mapping[str, frozenset[str]] = {
    "portable": frozenset(),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16_vnni": _AVX512 | {"avx512_bf16", "avx512_vnni"},
}
"""What each object needs of the CPU, by the names of /proc/cpuinfo; weakest first."""

STORED = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3}
"""`NsDtype`, by our names of dtypes."""

WEIGHTS = {"float32": 0, "bfloat16": 1, "int8": 2, "int8-weight-only": 3, "int4": 4}
"""`NsWeights`, by our names of dtypes and quantisations."""

ACTIVATIONS = {
    "gelu_new": 0,
    "gelu_fast": 0,
    "gelu_pytorch_tanh": 0,
    "gelu": 1,
    "quick_gelu": 2,
    "relu": 3,
    "silu": 4,
    "swish": 4,
    "tanh": 5,
}
"""`NsActivation`, by the names that checkpoints use."""

_ERROR_BYTES = 512
_NO_MEMORY = 2
_CACHE_FULL = 3


class UnavailableError(RuntimeError):
    """No native core can run here; the message says what is missing and what brings it."""


class Config(ctypes.Structure):
    """`NsConfig`: the model's shape, how it is stored and computed."""

    _fields_: ClassVar = [
        *((name, c_int32) for name in ("vocab_size", "n_positions", "n_embd")),
        *((name, c_int32) for name in ("n_layer", "n_head", "n_inner")),
        *((name, c_int32) for name in ("activation", "tie_word_embeddings")),
        ("layer_norm_epsilon", c_float),
        *((name, c_int32) for name in ("weights", "cache", "block_size", "num_blocks")),
        *((name, c_int32) for name in ("num_threads", "num_token_ids", "tile_rows")),
    ]


class Row(ctypes.Structure):
    """`NsRow`: how one row of logits becomes a token. Pointers are addresses or None."""

    _fields_: ClassVar = [
        *((name, c_double) for name in ("temperature", "top_p", "min_p")),
        *((f"{name}_penalty", c_double) for name in ("repetition", "presence", "frequency")),
        ("draw", c_double),
        *((name, c_void_p) for name in ("prompt", "output", "bias_ids", "biases", "masked")),
        *((f"num_{name}", c_int32) for name in ("prompt", "output", "biases", "masked")),
        *((name, c_int32) for name in ("top_k", "num_logprobs", "target", "reserved")),
    ]


class Batch(ctypes.Structure):
    """`NsBatch`: one step. Pointers are addresses or None."""

    _fields_: ClassVar = [
        *((f"num_{name}", c_int32) for name in ("tokens", "seqs")),
        ("table_width", c_int32),
        *((f"num_{name}", c_int32) for name in ("rows", "copies")),
        ("reserved", c_int32),
        *((name, c_void_p) for name in ("token_ids", "positions", "slot_mapping")),
        *((name, c_void_p) for name in ("query_starts", "context_lens", "block_tables")),
        *((name, c_void_p) for name in ("logit_rows", "block_copies", "rows")),
    ]


class Result(ctypes.Structure):
    """`NsResult`: where a step writes. Pointers are addresses or None."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("token_ids", "logprobs", "finite")),
        *((name, c_void_p) for name in ("top_ids", "top_logprobs", "logits")),
    ]


_WHY = (c_char_p, c_int32)  # where an error is written, and how much room there is

_FUNCTIONS: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "ns_open": (c_int32, (POINTER(Config), POINTER(c_float), POINTER(c_void_p), *_WHY)),
    "ns_share": (c_int32, (c_void_p, POINTER(Config), POINTER(c_float), POINTER(c_void_p), *_WHY)),
    "ns_put": (c_int32, (c_void_p, c_char_p, c_void_p, c_int32, c_int64, c_int64, *_WHY)),
    "ns_ready": (c_int32, (c_void_p, *_WHY)),
    "ns_step": (c_int32, (c_void_p, POINTER(Batch), POINTER(Result), *_WHY)),
    "ns_attend": (c_int32, (c_void_p, POINTER(Batch), *(c_void_p,) * 4, *_WHY)),
    "ns_resize_cache": (c_int32, (c_void_p, c_int32, c_int32, *_WHY)),
    "ns_poison": (None, (c_void_p, c_void_p, c_int32)),
    "ns_close": (None, (c_void_p,)),
    "ns_weights_bytes": (c_int64, (c_void_p,)),
    "ns_cache_bytes": (c_int64, (c_void_p,)),
    "ns_scratch_bytes": (c_int64, (c_void_p,)),
    "ns_sample": (c_int32, (c_void_p, c_int32, c_int32, POINTER(Row), POINTER(Result))),
    "ns_open_probe": (c_int32, (c_int32, POINTER(c_void_p), *_WHY)),
    "ns_probe_read": (None, (c_void_p, c_void_p, c_int64, c_int32)),
    "ns_put_product": (c_int32, (c_void_p, *(c_int32,) * 4, *_WHY)),
    "ns_probe_product": (c_int32, (c_void_p, *_WHY)),
    "ns_close_probe": (None, (c_void_p,)),
    "ns_isa": (c_char_p, ()),
    "ns_abi_version": (c_int32, ()),
}


class Library:
    """One loaded object: its functions as attributes of `call`, and errors as Python's own."""

    def __init__(self, path: Path) -> None:
        self.call: Any = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self.call, name)
            function.restype, function.argtypes = result, arguments
        found = self.call.ns_abi_version()
        if found != ABI_VERSION:
            raise UnavailableError(
                f"{path.name} speaks version {found} of the native interface, this package "
                f"{ABI_VERSION}: build it again (pip install .)"
            )
        self.isa: str = self.call.ns_isa().decode()

    def check(self, function: Callable[..., int], *arguments: object) -> None:
        """Call a function that gives a status.

        Raises MemoryError, RuntimeError for a step that the cache has no room for, and ValueError
        for any other refusal, in the core's own words.
        """
        why = ctypes.create_string_buffer(_ERROR_BYTES)
        status = function(*arguments, why, _ERROR_BYTES)
        if status == 0:
            return
        words = why.value.decode(errors="replace")
        if status == _NO_MEMORY:
            raise MemoryError(words)
        raise RuntimeError(words) if status == _CACHE_FULL else ValueError(words)

    def open(self, config: Config, attention_scales: Sequence[float], donor: int | None) -> int:
        """A model without weights, or over those of `donor`. Raises as `check` does.

        What it gives is an address, to be closed with `ns_close`.
        """
        scales = (c_float * len(attention_scales))(*attention_scales)
        opened = c_void_p()
        where = (ctypes.byref(config), scales, ctypes.byref(opened))
        if donor is None:
            self.check(self.call.ns_open, *where)
        else:
            self.check(self.call.ns_share, donor, *where)
        assert opened.value is not None
        return opened.value

    def open_probe(self, num_threads: int) -> int:
        """Threads that measure this machine, to be closed with `ns_close_probe`."""
        opened = c_void_p()
        self.check(self.call.ns_open_probe, num_threads, ctypes.byref(opened))
        assert opened.value is not None
        return opened.value


def path_of(isa: str) -> Path:
    """Where the build puts the object of an instruction set."""
    return FOLDER / f"libns_{isa}.so"


@functools.cache
def cpu_flags() -> frozenset[str]:
    """What the first CPU says of itself; nothing where the system has no /proc."""
    try:
        with Path("/proc/cpuinfo").open("rb") as file:
            text = file.read(1 << 14).decode(errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def available() -> tuple[str, ...]:
    """The instruction sets that were built and that this CPU has, weakest first."""
    return tuple(
        isa for isa, needed in CPU_FLAGS.items() if needed <= cpu_flags() and path_of(isa).exists()
    )


def named() -> str | None:
    """What NANOSERVE_CPU_ISA says, which nobody checked yet."""
    return os.environ.get(ISA_VARIABLE) or None


def choose() -> str:
    """The instruction set to use: NANOSERVE_CPU_ISA, or the strongest.

    Raises UnavailableError where none was built or the one that was named cannot run.
    """
    here, wanted = available(), named()
    if wanted and wanted not in CPU_FLAGS:
        raise UnavailableError(
            f"{ISA_VARIABLE} must be one of {', '.join(CPU_FLAGS)}, got {wanted!r}"
        )
    if wanted and wanted not in here:
        lacking = sorted(CPU_FLAGS[wanted] - cpu_flags())
        why = f"this CPU has no {', '.join(lacking)}" if lacking else "it was not built"
        raise UnavailableError(
            f"{ISA_VARIABLE}={wanted}: {why} (here: {', '.join(here) or 'none'})"
        )
    if not here:
        raise UnavailableError(
            "the native core was not built: install nanoserve again where a C++17 compiler is "
            "(gcc or clang), or use a wheel"
        )
    return wanted or here[-1]


def check_whole(path: Path) -> None:
    """Raise OSError for an ELF file that ends before its section table, which is written last.

    The system's loader maps such a file and then kills the process (SIGBUS) as it reads the rest.
    """
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or not header.startswith(b"\x7fELF\x02\x01"):
        return  # of another format, or so short that the loader says it
    (start,) = struct.unpack_from("<Q", header, 0x28)
    size, number = struct.unpack_from("<HH", header, 0x3A)
    if path.stat().st_size < start + size * number:
        raise OSError(f"{path}: the file is cut short")


def load(isa: str | None = None) -> Library:
    """The object of `isa`, None for `choose()`; loaded once. Raises UnavailableError."""
    return _load(isa or choose())


@functools.cache
def _load(isa: str) -> Library:
    try:
        check_whole(path_of(isa))
        return Library(path_of(isa))
    except OSError as error:
        raise UnavailableError(f"the native core for {isa} cannot be loaded: {error}") from error
    except AttributeError as error:
        raise UnavailableError(f"the native core for {isa} was not built whole: {error}") from error
