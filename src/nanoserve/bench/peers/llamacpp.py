"""llama.cpp through its Python binding: a GGUF file written here, then the plain C interface.

Every matrix is in the precision asked for, the tied head included; norms, biases and positions stay
in float32. A set of sequences has a context of its own, so that attention never runs over another
cell's cache; the flags are the engine's defaults (flash attention and repacked weights as it sees
fit). K and V are float32 beside float32 weights, else float16, its default.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from nanoserve.bench.measure import Arm
from nanoserve.bench.peers.face import (
    Cell,
    Floats,
    Sequences,
    Setup,
    SteppingPeer,
    Tokens,
    UnsupportedError,
    require_plain,
    timed_prefill,
)
from nanoserve.config import ModelConfig

FORMATS: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
TENSORS = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
"""Of a block: GPT-2's names and GGUF's."""

CONTEXT_STEP = 256
"""Its contexts are whole multiples of this."""


class LlamaPeer(SteppingPeer):
    """See `Peer`."""

    def __init__(self, setup: Setup) -> None:
        self.library: Any = import_module("llama_cpp")
        config = setup.config()
        require_plain(config, "llama.cpp")
        if setup.precision not in FORMATS:
            raise UnsupportedError(f"llama.cpp has nothing like {setup.precision}")
        self.vocab_size, self.threads = config.vocab_size, setup.threads
        self.format = FORMATS[setup.precision]
        path = setup.scratch / f"llama-{self.format}.gguf"
        write_gguf(path, config, setup.weights(), self.format)
        parameters = self.library.llama_model_default_params()
        self.library.llama_backend_init()
        self.model = self.library.llama_model_load_from_file(str(path).encode(), parameters)
        if not self.model:
            raise UnsupportedError("llama.cpp refused the GGUF file")

    def describe(self) -> Mapping[str, str]:
        return {
            "version": f"llama-cpp-python {version('llama_cpp_python')}",
            "weights": self.format,
            "KV cache": "F32" if self.format == "F32" else "F16",
        }

    def new_context(self, num_seqs: int, num_positions: int) -> Any:
        """Room for `num_seqs` sequences of `num_positions`, as many outputs as tokens."""
        lib, tokens = self.library, num_seqs * num_positions
        parameters = lib.llama_context_default_params()
        each = -(-num_positions // CONTEXT_STEP) * CONTEXT_STEP
        parameters.n_ctx = num_seqs * each
        parameters.n_batch = parameters.n_ubatch = max(512, min(tokens, 2048))
        parameters.n_outputs_max = parameters.n_batch
        parameters.n_outputs_max_per_seq = max(num_positions, 1)
        parameters.n_seq_max = num_seqs
        parameters.n_threads = parameters.n_threads_batch = self.threads
        if self.format == "F32":
            parameters.type_k = parameters.type_v = 0  # GGML_TYPE_F32
        context = lib.llama_init_from_model(self.model, parameters)
        if not context:
            raise MemoryError(f"llama.cpp made no context of {parameters.n_ctx} positions")
        return context

    def begin(self, prompts: Sequence[Tokens]) -> Sequences:
        return LlamaSequences(self, prompts)

    def logits(self, prompt: Tokens) -> Floats:
        run = LlamaPrefill(self, prompt, all_logits=True)
        run.prepare()
        return np.array(run.work())

    def prefill_arm(self, cell: Cell) -> Arm:
        (prompt,) = cell.prompts(self.vocab_size)
        run = LlamaPrefill(self, prompt, all_logits=cell.all_logits)
        return timed_prefill(run.prepare, run.work)


class LlamaBatch:
    """Tokens of one call, in the engine's own arrays."""

    def __init__(self, peer: LlamaPeer, context: Any, num_tokens: int) -> None:
        self._peer, self._context = peer, context
        self._batch = peer.library.llama_batch_init(num_tokens, 0, 1)

    def fill(
        self, token_ids: Tokens, positions: Tokens, seqs: Tokens, wanted: Sequence[int]
    ) -> None:
        batch = self._batch
        batch.n_tokens = len(token_ids)
        places = zip(token_ids, positions, seqs, wanted, strict=True)
        for i, (token, position, seq, is_wanted) in enumerate(places):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, is_wanted
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = seq

    def decode(self, num_rows: int) -> Floats:
        """Logits [R, V] where the engine left them: until its next call. Raises RuntimeError."""
        lib = self._peer.library
        if code := lib.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode gave {code}")
        values = lib.llama_get_logits(self._context)
        pointer = ctypes.cast(values, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(pointer, shape=(num_rows, self._peer.vocab_size))


class LlamaPrefill:
    """One prompt, again and again in an empty cache."""

    def __init__(self, peer: LlamaPeer, prompt: Tokens, *, all_logits: bool) -> None:
        self._library, count = peer.library, len(prompt)
        self._context = peer.new_context(1, count)
        self._batch = LlamaBatch(peer, self._context, count)
        wanted = [1] * count if all_logits else [0] * (count - 1) + [1]
        self._batch.fill(prompt, range(count), [0] * count, wanted)
        self._num_rows = sum(wanted)

    def prepare(self) -> None:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), False)

    def work(self) -> Floats:
        return self._batch.decode(self._num_rows)


class LlamaSequences:
    """See `Sequences`."""

    def __init__(self, peer: LlamaPeer, prompts: Sequence[Tokens]) -> None:
        self._library, self._num_seqs = peer.library, len(prompts)
        self._context = peer.new_context(len(prompts), 2 * len(prompts[0]) + 32)
        self._batch = LlamaBatch(peer, self._context, max(len(p) for p in prompts) + len(prompts))
        self._logits = np.zeros((0, 0), dtype=np.float32)
        self._length = len(prompts[0])
        lasts = [self._prefill(seq, prompt) for seq, prompt in enumerate(prompts)]
        self._logits = np.stack(lasts)

    def _prefill(self, seq: int, prompt: Tokens) -> Floats:
        count = len(prompt)
        self._batch.fill(prompt, range(count), [seq] * count, [0] * (count - 1) + [1])
        return np.array(self._batch.decode(1)[0])

    def step(self, token_ids: Tokens) -> Floats:
        count = self._num_seqs
        self._batch.fill(token_ids, [self._length] * count, range(count), [1] * count)
        self._length += 1
        self._logits = self._batch.decode(count)
        return self._logits

    def chosen(self) -> list[int]:
        return [int(token) for token in self._logits.argmax(-1)]

    def rewind(self, length: int) -> None:
        memory = self._library.llama_get_memory(self._context)
        for seq in range(self._num_seqs):
            self._library.llama_memory_seq_rm(memory, seq, length, -1)
        self._length = length


def write_gguf(path: Path, model: ModelConfig, weights: Mapping[str, Floats], form: str) -> None:
    """GPT-2 as llama.cpp reads it. `form` is the type of the matrices; there is no tokenizer."""
    gguf: Any = import_module("gguf")
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_block_count(model.n_layer)
    writer.add_context_length(model.n_positions)
    writer.add_embedding_length(model.n_embd)
    writer.add_feed_forward_length(model.n_inner)
    writer.add_head_count(model.n_head)
    writer.add_layer_norm_eps(model.layer_norm_epsilon)
    writer.add_vocab_size(model.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    for name, values in weights.items():
        is_matrix = values.ndim == 2 and name != "wpe.weight"
        turned = values.T if is_matrix and name.startswith("h.") else values
        kind = gguf.GGMLQuantizationType[form if is_matrix else "F32"]
        data = gguf.quants.quantize(np.ascontiguousarray(turned), kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """`blk.3.attn_qkv.weight` for `h.3.attn.c_attn.weight`."""
    outside = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"}
    stem, _, ending = name.rpartition(".")
    if stem in outside:
        return f"{outside[stem]}.{ending}"
    _, layer, place = stem.split(".", 2)
    return f"blk.{layer}.{TENSORS[place]}.{ending}"
