"""OpenVINO: GPT-2 built from its operations, with the stateful cache its documentation advises.

The graph is the one its converters give: keys and values in variables, gathered by `beam_idx`,
extended and attended by one fused operation; the head sees the rows that are asked for. Precision
is its own hint, the cache's included. int8 has two ways: activations quantised as they come, as in
our own core, or, as the variant `CALIBRATED`, to fixed ranges that a prompt was watched for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from nanoserve.bench.workload import prompt_token_ids
from nanoserve.config import ModelConfig

HINTS: Mapping[str, Mapping[str, str]] = {
    "float32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    "bfloat16": {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"},
    "int8": {"KV_CACHE_PRECISION": "u8"},
}
"""In int8 what is not quantised is computed in whatever the plugin likes best on this processor."""

CALIBRATION_TOKENS = 256
CALIBRATED = "calibrated"

Matrix = tuple[Floats, Floats]
"""[out, in] and its bias."""


class OpenVINOPeer(SteppingPeer):
    """See `Peer`."""

    def __init__(self, setup: Setup) -> None:
        self.library: Any = import_module("openvino")
        if setup.precision not in HINTS:
            raise UnsupportedError(f"OpenVINO is not run in {setup.precision}")
        self.config = setup.config()
        require_plain(self.config, "OpenVINO")
        self.vocab_size, self.precision = self.config.vocab_size, setup.precision
        self.is_calibrated = setup.variant == CALIBRATED
        self.threads = setup.threads
        self.core = self.library.Core()
        self.compiled = self.compile(self.graph(setup.weights()))

    def graph(self, weights: Mapping[str, Floats]) -> Graph:
        if self.precision != "int8":
            return Graph(self.config, weights)
        if not self.is_calibrated:
            return Graph(self.config, weights, quantize="weights")
        watched = Graph(self.config, weights, watch=True)
        ranges = self.calibrate(self.compile(watched), watched.num_watched)
        return Graph(self.config, weights, quantize="all", ranges=ranges)

    def compile(self, graph: Graph) -> Any:
        return self.core.compile_model(
            graph.model(),
            "CPU",
            {
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_NUM_THREADS": self.threads,
                **HINTS[self.precision],
            },
        )

    def calibrate(self, compiled: Any, num_watched: int) -> list[float]:
        """The largest value at the entry of each matrix, over a prompt of its own."""
        length = min(CALIBRATION_TOKENS, self.config.n_positions)
        prompt = prompt_token_ids(length, self.vocab_size, sequence=-1)
        request = compiled.create_infer_request()
        feed(request, np.array([prompt]), past=0, rows=np.arange(1))
        return [float(request.get_output_tensor(1 + i).data.max()) for i in range(num_watched)]

    def describe(self) -> Mapping[str, str]:
        hint = self.compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        activations = {"activations": "fixed ranges" if self.is_calibrated else "as they come"}
        return {
            "version": version("openvino"),
            **HINTS[self.precision],
            "INFERENCE_PRECISION_HINT": hint,
            **(activations if self.precision == "int8" else {}),
        }

    def begin(self, prompts: Sequence[Tokens]) -> Sequences:
        return VinoSequences(self.compiled, prompts)

    def logits(self, prompt: Tokens) -> Floats:
        request = self.compiled.create_infer_request()
        feed(request, np.array([prompt]), past=0, rows=np.arange(len(prompt)))
        return np.array(request.get_output_tensor(0).data[0])

    def prefill_arm(self, cell: Cell) -> Arm:
        (prompt,) = cell.prompts(self.vocab_size)
        request = self.compiled.create_infer_request()
        rows = np.arange(cell.context) if cell.all_logits else np.array([cell.context - 1])
        ids = np.array([prompt])
        return timed_prefill(request.reset_state, lambda: feed(request, ids, past=0, rows=rows))


def feed(request: Any, token_ids: NDArray[np.int64], *, past: int, rows: NDArray[np.int64]) -> None:
    """Run [B, L] tokens after `past` others, with logits of `rows` of the L."""
    num_seqs, num_new = token_ids.shape
    mask = np.zeros((1, 1, num_new, past + num_new), dtype=np.float32)
    if num_new > 1:
        mask[0, 0] = np.triu(np.full(mask.shape[2:], -np.inf, dtype=np.float32), past + 1)
    request.infer(
        {
            "input_ids": token_ids,
            "position_ids": np.arange(past, past + num_new),
            "mask": mask,
            "beam_idx": np.arange(num_seqs, dtype=np.int32),
            "rows": rows,
        },
        share_inputs=True,
        share_outputs=True,
    )


class VinoSequences:
    """See `Sequences`. Variables cannot be cut, so rewinding puts back what the prompt left."""

    def __init__(self, compiled: Any, prompts: Sequence[Tokens]) -> None:
        self._request = compiled.create_infer_request()
        self._length = len(prompts[0])
        last = np.array([self._length - 1])
        feed(self._request, np.array(prompts), past=0, rows=last)
        self._start = self._length
        self._kept = [np.array(state.state.data) for state in self._request.query_state()]
        self._library: Any = import_module("openvino")

    def step(self, token_ids: Tokens) -> None:
        ids = np.array(token_ids).reshape(-1, 1)
        feed(self._request, ids, past=self._length, rows=np.zeros(1, dtype=np.int64))
        self._length += 1

    def chosen(self) -> list[int]:
        return [int(t) for t in self._request.get_output_tensor(0).data[:, -1].argmax(-1)]

    def rewind(self, length: int) -> None:
        if length != self._start:
            raise UnsupportedError("OpenVINO's cache goes back to its prompt only")
        for state, kept in zip(self._request.query_state(), self._kept, strict=True):
            state.state = self._library.Tensor(kept)
        self._length = length


@dataclass
class Graph:
    """GPT-2 as an OpenVINO model.

    `quantize` "weights" stores matrices in int8, one scale an output channel, and leaves the
    activations to the plugin, which quantises them as it goes; "all" gives activations fixed
    scales from `ranges` as well. `watch` adds the largest entry of each matrix as outputs.
    """

    config: ModelConfig
    weights: Mapping[str, Floats]
    quantize: str | None = None
    ranges: Sequence[float] = ()
    watch: bool = False

    def __post_init__(self) -> None:
        self.ops: Any = import_module("openvino.opset15")
        self.library: Any = import_module("openvino")
        self._watched: list[Any] = []
        self._sinks: list[Any] = []
        self._num_matrices = 0

    @property
    def num_watched(self) -> int:
        return 4 * self.config.n_layer + 1

    def model(self) -> Any:
        ops = self.ops
        ids = ops.parameter([-1, -1], np.int64, name="input_ids")
        positions = ops.parameter([-1], np.int64, name="position_ids")
        mask = ops.parameter([1, 1, -1, -1], np.float32, name="mask")
        beams = ops.parameter([-1], np.int32, name="beam_idx")
        rows = ops.parameter([-1], np.int64, name="rows")
        inputs = [ids, positions, mask, beams, rows]
        for node in inputs:
            node.output(0).get_tensor().set_names({node.get_friendly_name()})
        wte = ops.constant(self.weights["wte.weight"])
        x = ops.add(  # [B, L, C]
            ops.gather(wte, ids, np.int64(0)),
            ops.gather(ops.constant(self.weights["wpe.weight"]), positions, np.int64(0)),
        )
        batch = ops.gather(ops.shape_of(ids), np.array([0]), np.int64(0))
        for layer in range(self.config.n_layer):
            x = self.block(x, f"h.{layer}", batch, beams, mask)
        x = self.norm(ops.gather(x, rows, np.int64(1)), "ln_f")
        head = self.product(x, self.weights["wte.weight"])
        results = [ops.result(node) for node in (head, *self._watched)]
        return self.library.Model(results, self._sinks, inputs, "gpt2")

    def block(self, x: Any, name: str, batch: Any, beams: Any, mask: Any) -> Any:
        ops, D = self.ops, self.config.head_size
        qkv = self.linear(self.norm(x, f"{name}.ln_1"), f"{name}.attn.c_attn")
        q, k, v = (self.heads(part) for part in ops.split(qkv, np.int64(2), 3).outputs())
        k = self.cached(k, f"{name}.key", batch, beams)
        v = self.cached(v, f"{name}.value", batch, beams)
        attended = ops.scaled_dot_product_attention(q, k, v, mask, np.float32(D**-0.5))
        merged = ops.reshape(
            ops.transpose(attended, np.array([0, 2, 1, 3])),
            np.array([0, 0, self.config.n_embd]),
            special_zero=True,
        )
        x = ops.add(x, self.linear(merged, f"{name}.attn.c_proj"))
        inner = self.linear(self.norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc")
        return ops.add(x, self.linear(ops.gelu(inner, "tanh"), f"{name}.mlp.c_proj"))

    def heads(self, x: Any) -> Any:
        """[B, L, C] to [B, H, L, D]."""
        shape = np.array([0, 0, self.config.n_head, self.config.head_size])
        split = self.ops.reshape(x, shape, special_zero=True)
        return self.ops.transpose(split, np.array([0, 2, 1, 3]))

    def cached(self, new: Any, name: str, batch: Any, beams: Any) -> Any:
        """What the variable `name` holds, then `new`; kept for the next call."""
        ops, (H, D) = self.ops, (self.config.n_head, self.config.head_size)
        shape = ops.concat([batch, ops.constant(np.array([H, 0, D]))], 0)
        empty = ops.broadcast(ops.constant(np.float32(0)), shape)
        past = ops.read_value(empty, name, np.float32, self.library.PartialShape([-1, H, -1, D]))
        whole = ops.concat([ops.gather(past, beams, np.int64(0)), new], 2)
        self._sinks.append(ops.assign(whole, name))
        return whole

    def norm(self, x: Any, name: str) -> Any:
        epsilon = self.config.layer_norm_epsilon
        plain = self.ops.mvn(x, np.array([-1]), True, epsilon, "inside_sqrt")
        scaled = self.ops.multiply(plain, self.ops.constant(self.weights[f"{name}.weight"]))
        return self.ops.add(scaled, self.ops.constant(self.weights[f"{name}.bias"]))

    def linear(self, x: Any, name: str) -> Any:
        matrix = np.ascontiguousarray(self.weights[f"{name}.weight"].T)
        bias = self.ops.constant(self.weights[f"{name}.bias"])
        return self.ops.add(self.product(x, matrix), bias)

    def product(self, x: Any, matrix: Floats) -> Any:
        """x [.., in] times `matrix` [out, in], its formats as `quantize` says."""
        ops, index = self.ops, self._num_matrices
        self._num_matrices += 1
        if self.watch:
            axes = np.arange(3)
            self._watched.append(ops.reduce_max(ops.abs(x), axes))
        if self.quantize is None:
            return ops.matmul(x, ops.constant(matrix), False, True)
        if self.quantize == "all":
            high = np.float32(self.ranges[index])
            low = np.float32(-high * 128 / 127)
            x = ops.fake_quantize(x, low, high, low, high, 256)
        scales = np.abs(matrix).max(axis=1, keepdims=True) / np.float32(127)
        whole = np.rint(matrix / np.where(scales == 0, 1, scales)).astype(np.int8)
        stored = ops.convert(ops.constant(whole), np.float32)
        return ops.matmul(x, ops.multiply(stored, ops.constant(scales)), False, True)
