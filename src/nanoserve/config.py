"""Configuration values: what the model is, how its cache is laid out, how requests share it.

Floor 0: the standard library only, frozen, no torch. The command line, the environment variables
and the Python API all take their defaults from the dataclasses below, so a default has one home.
Each class checks itself on construction and raises ValueError with what was got, the limit and the
option that moves it.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

Dtype = Literal["float32", "float16", "bfloat16"]
CacheDtype = Literal[Dtype, "int8"]
Quantization = Literal["int8", "int8-weight-only", "int4"]
QuantizationOption = Literal["none", Quantization]
Layout = Literal["recompute", "contiguous", "slots", "paged"]
LoadFormat = Literal["auto", "safetensors", "pt", "dummy"]
Device = Literal["auto", "cpu", "cuda"]
DtypeOption = Literal["auto", Dtype]
ExecutorName = Literal["auto", "eager", "graph", "native"]
Kernels = Literal["auto", "torch", "triton"]
Batching = Literal["continuous", "static"]
ContextOverflow = Literal["error", "slide"]
LogLevel = Literal["critical", "error", "warning", "info", "debug"]

DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
"""Bytes of one stored value, for every dtype that weights (int8: not these) or a cache may have."""


logger = logging.getLogger(__name__)

ACTIVATIONS: tuple[str, ...] = (
    "gelu_new",
    "gelu",
    "gelu_fast",
    "gelu_pytorch_tanh",
    "quick_gelu",
    "relu",
    "silu",
    "swish",
    "tanh",
)
"""Activations of the MLP, under Hugging Face's names."""

GPT2_DEFAULTS: dict[str, int] = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
}
"""What transformers' GPT2Config assumes where a config.json is silent."""

_FLAGS = (
    "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx",
    "reorder_and_upcast_attn",
    "tie_word_embeddings",
)

_ALIASES: dict[str, str] = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}

_ARCHITECTURES = frozenset(
    framework + name
    for framework in ("", "TF", "Flax")
    for name in ("GPT2Model", "GPT2LMHeadModel", "GPT2DoubleHeadsModel")
)

_NOT_GPT2: dict[str, str] = {
    "biogpt": "it scales its embeddings and offsets its positions",
    "gpt_neo": "every other layer attends over a local window, and its scores are not scaled",
    "gptj": "it has rotary positions and runs attention and MLP side by side",
    "gpt_neox": "it has rotary positions and runs attention and MLP side by side",
    "codegen": "it has rotary positions and runs attention and MLP side by side",
    "gpt_bigcode": "its query heads share one key and value head",
    "opt": "it offsets its positions and keeps q, k and v apart",
    "imagegpt": "its vocabulary is pixels and its layer norm subtracts no mean",
    "openai-gpt": "it normalises after each block, not before",
    "encoder-decoder": "its decoder attends over an encoder (cross-attention)",
    "vision-encoder-decoder": "its decoder attends over an encoder (cross-attention)",
}

_HARMLESS_KEYS = """
architectures auto_map model_type transformers_version _name_or_path name_or_path _commit_hash
torch_dtype dtype _attn_implementation attn_implementation _attn_implementation_autoset
attn_pdrop embd_pdrop resid_pdrop summary_first_dropout hidden_dropout_prob classifier_dropout
attention_probs_dropout_prob initializer_range gradient_checkpointing use_cache output_past
summary_type summary_use_proj summary_activation summary_proj_to_labels n_special
predict_special_tokens id2label label2id num_labels _num_labels problem_type finetuning_task
task_specific_params tokenizer_class add_prefix_space model_max_length chunk_size_feed_forward
output_attentions output_hidden_states output_scores return_dict return_dict_in_generate
torchscript use_bfloat16 xla_device tf_legacy_loss loss_type is_decoder
bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id
decoder_start_token_id forced_bos_token_id forced_eos_token_id bad_words_ids suppress_tokens
begin_suppress_tokens max_length min_length max_new_tokens min_new_tokens do_sample
early_stopping num_beams num_beam_groups num_return_sequences diversity_penalty temperature
top_k top_p min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
encoder_no_repeat_ngram_size exponential_decay_length_penalty remove_invalid_values prefix
"""
"""Keys of a config.json that leave the logits of inference alone: names, heads for training,
dropout, and generation settings (those that count are read from generation_config.json)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Every GPT-2 config flag that changes the maths, under Hugging Face's own names.

    Raises ValueError for a size that is not a positive integer, a flag that is not a bool, an
    activation outside `ACTIVATIONS`, and a width that the heads do not divide.
    """

    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    n_inner: int
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        for name in (*GPT2_DEFAULTS, "n_inner"):
            _check_size(name, getattr(self, name))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.activation_function not in ACTIVATIONS:
            raise ValueError(
                f"activation_function {self.activation_function!r} is not supported; "
                f"supported: {', '.join(ACTIVATIONS)}"
            )
        _check_epsilon(self.layer_norm_epsilon)
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd must be a multiple of n_head, got n_embd {self.n_embd} and "
                f"n_head {self.n_head}"
            )

    @classmethod
    def from_hf(cls, raw: Mapping[str, object]) -> ModelConfig:
        """The config that a Hugging Face `config.json` (as a mapping) describes.

        Silent keys take GPT2Config's defaults, `n_inner` null means 4 * n_embd, and `n_positions`
        may be called `n_ctx`. Raises ValueError, naming key and reason, for a model that is not
        GPT-2 and for a key that may change the maths and is not understood here. Code that
        `auto_map` names is never run.
        """
        _refuse_other_models(raw)
        known = {_ALIASES.get(key, key): value for key, value in raw.items()}
        for alias, name in _ALIASES.items():
            if alias in raw and name in raw and raw[alias] != raw[name]:
                raise ValueError(
                    f"config.json gives {name} {raw[name]!r} and {alias} {raw[alias]!r}, "
                    "two names of one size: remove the wrong one"
                )
        _refuse_unknown_keys(known)
        values: dict[str, Any] = dict(GPT2_DEFAULTS)
        values |= {f.name: known[f.name] for f in fields(cls) if f.name in known}
        values["n_positions"] = _positions(known)
        if values.get("n_inner") is None:
            _check_size("n_embd", values["n_embd"])
            values["n_inner"] = 4 * values["n_embd"]
        return cls(**values)

    @property
    def head_size(self) -> int:
        """D: values in one head of one query, key or value."""
        return self.n_embd // self.n_head

    def attention_scale(self, layer: int) -> float:
        """What q.k is multiplied by in `layer` (counted from 0).

        1/sqrt(D) if `scale_attn_weights`; divided again by (layer + 1) if
        `scale_attn_by_inverse_layer_idx` (Mistral's GPT-2 runs, CodeParrot).
        """
        scale = self.head_size**-0.5 if self.scale_attn_weights else 1.0
        return scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale


def _check_size(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def _check_epsilon(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"layer_norm_epsilon must be a number, got {value!r}")
    if not 0 < value < math.inf:
        raise ValueError(f"layer_norm_epsilon must be positive and finite, got {value!r}")


def _positions(known: Mapping[str, object]) -> object:
    """`n_positions`, else `n_ctx`, else GPT-2's 1024; where both stand and differ, says so."""
    named = [known[key] for key in ("n_positions", "n_ctx") if known.get(key) is not None]
    if len(named) == 2 and named[0] != named[1]:
        logger.warning(
            "config.json gives n_positions %r and n_ctx %r; n_positions is used, and the rows of "
            "wpe decide once the weights are there",
            *named,
        )
    return named[0] if named else GPT2_DEFAULTS["n_positions"]


def _refuse_other_models(raw: Mapping[str, object]) -> None:
    """Raise ValueError, saying why, unless `raw` claims to be a plain GPT-2 language model."""
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list):
        raise ValueError(f"architectures must be a list of names, got {architectures!r}")
    model_type = raw.get("model_type")
    if model_type is None and not architectures:
        raise ValueError(
            "config.json has neither model_type nor architectures, so nothing says that this is "
            'GPT-2; if it is, add "model_type": "gpt2"'
        )
    if model_type not in (None, "gpt2"):
        reason = _NOT_GPT2.get(str(model_type), "only GPT-2's architecture is implemented")
        raise ValueError(f"model_type {model_type!r} is not GPT-2: {reason}")
    names = [str(name) for name in architectures]
    foreign = [name for name in names if name not in _ARCHITECTURES and "ValueHead" not in name]
    if foreign:
        raise ValueError(
            f"architecture {', '.join(foreign)} is not a GPT-2 language model; "
            "supported: GPT2LMHeadModel, GPT2Model, GPT2DoubleHeadsModel, and value heads on them"
        )
    if raw.get("auto_map") and not (model_type == "gpt2" and architectures):
        raise ValueError(
            "auto_map names code of the repository's own, which is never run, and config.json "
            "does not say that the model is plain GPT-2 (model_type and architectures)"
        )
    if raw.get("add_cross_attention"):
        raise ValueError("add_cross_attention: a decoder that attends over an encoder is not GPT-2")
    if raw.get("quantization_config"):
        raise ValueError(
            "quantization_config: weights quantised by another tool are not read; give the "
            "original weights and choose --quantization here"
        )


def _refuse_unknown_keys(known: Mapping[str, object]) -> None:
    """Raise ValueError naming each key that is neither understood, nor harmless, nor off."""
    understood = set(_HARMLESS_KEYS.split()) | {f.name for f in fields(ModelConfig)} | {"n_ctx"}
    unknown = sorted(key for key, value in known.items() if key not in understood and value)
    if unknown:
        raise ValueError(
            f"config.json has keys that may change the maths and are not GPT-2's: "
            f"{', '.join(f'{key}={known[key]!r}' for key in unknown)}; if they do not change "
            "the logits, remove them from config.json"
        )


def _check_choice(option: str, value: object, choices: object) -> None:
    """Raise ValueError unless `value` is one of the words of a Literal."""
    if value not in get_args(choices):
        raise ValueError(f"{option} must be one of {', '.join(get_args(choices))}, got {value!r}")


def _check_limit(option: str, value: object) -> None:
    """Raise ValueError unless `value` is an integer of at least 1, or None (chosen elsewhere)."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{option} must be at least 1, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How keys and values are laid out and stored.

    `dtype` None means "the model's"; int8 keeps a scale for each token and head beside the values.
    `memory_bytes` None means "sized from the machine".
    `block_size`, in tokens, is read by `paged` alone: the other layouts have a size of their own.
    """

    layout: Layout = "paged"
    dtype: CacheDtype | None = None
    block_size: int = 16
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_choice("--kv-layout", self.layout, Layout)
        if self.dtype is not None:
            _check_choice("--kv-cache-dtype", self.dtype, CacheDtype)
        _check_limit("--block-size", self.block_size)
        _check_limit("--kv-cache-memory-bytes", self.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How requests share the steps and the cache.

    `max_num_batched_tokens` None means "auto": chosen by the engine for the machine.
    `max_model_len` None means the model's `n_positions`. `slide_window` None means half of it; it
    goes with `context_overflow="slide"` only, and `strict_context` with "error" only.
    `batching_timeout`, in seconds and with `batching="static"` only: a batch begins when it is full
    or when its oldest request has waited so long; None: at once, with whoever is there.
    """

    batching: Batching = "continuous"
    batching_timeout: float | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    context_overflow: ContextOverflow = "error"
    slide_window: int | None = None
    strict_context: bool = False

    def __post_init__(self) -> None:
        _check_choice("--batching", self.batching, Batching)
        _check_choice("--context-overflow", self.context_overflow, ContextOverflow)
        _check_limit("--max-num-seqs", self.max_num_seqs)
        _check_limit("--max-num-batched-tokens", self.max_num_batched_tokens)
        _check_limit("--max-model-len", self.max_model_len)
        _check_limit("--slide-window", self.slide_window)
        if self.batching_timeout is not None:
            _check_seconds("--batching-timeout", self.batching_timeout)
            if self.batching != "static":
                raise ValueError(
                    f"--batching-timeout {self.batching_timeout:g} needs --batching static, "
                    f"got --batching {self.batching}: otherwise no request waits for others"
                )
        slides = self.context_overflow == "slide"
        if self.slide_window is not None and not slides:
            raise ValueError(
                f"--slide-window {self.slide_window} needs --context-overflow slide, "
                f"got --context-overflow {self.context_overflow}"
            )
        if self.strict_context and slides:
            raise ValueError(
                "--strict-context contradicts --context-overflow slide: a window that slides cuts "
                "no request short, so there is nothing to refuse"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything needed to build an engine; `nanoserve serve`, `LLM` and `bench` all make one.

    `quantization` None keeps the weights in `dtype`. `threads` None means the backend's choice.
    `kernels` store K and V and attend in the PyTorch executors. `kv_audit` is the share of requests
    that also run with a full-precision cache, to be compared with.
    """

    model: str = "mini"
    revision: str | None = None
    load_format: LoadFormat = "auto"
    dummy_seed: int = 0
    tokenizer: str | None = None
    device: Device = "auto"
    dtype: DtypeOption = "auto"
    quantization: Quantization | None = None
    executor: ExecutorName = "auto"
    kernels: Kernels = "auto"
    threads: int | None = None
    kv_audit: float = 0.0
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()

    def __post_init__(self) -> None:
        _check_choice("--load-format", self.load_format, LoadFormat)
        _check_choice("--device", self.device, Device)
        _check_choice("--dtype", self.dtype, DtypeOption)
        if self.quantization is not None:
            _check_choice("--quantization", self.quantization, Quantization)
        _check_choice("--executor", self.executor, ExecutorName)
        _check_choice("--kernels", self.kernels, Kernels)
        _check_limit("--threads", self.threads)
        _check_share("--kv-audit", self.kv_audit)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How an engine is reached over HTTP, and by whom. Times are in seconds.

    `served_model_name` None means the model's own; `api_key` None lets everyone in; `max_queue` are
    HTTP requests beyond `max_num_seqs`; `request_timeout` None sets no deadline; no page of another
    origin may read an answer unless `allowed_origins` names it ("*": all). `chat_template` is Jinja
    source or a file of it, None the tokenizer's own. `port` 0 takes a free one.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    max_queue: int = 128
    request_timeout: float | None = None
    shutdown_timeout: float = 30.0
    allowed_origins: tuple[str, ...] = ()
    chat_template: str | None = None
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        _check_choice("--log-level", self.log_level, LogLevel)
        _check_count("--port", self.port, 65535)
        _check_count("--max-queue", self.max_queue)
        if self.request_timeout is not None:
            _check_seconds("--request-timeout", self.request_timeout)
            if self.request_timeout == 0:
                raise ValueError("--request-timeout 0 leaves no time: leave it out for no deadline")
        _check_seconds("--shutdown-timeout", self.shutdown_timeout)
        for option, text in (
            ("--api-key", self.api_key),
            ("--served-model-name", self.served_model_name),
            ("--host", self.host),
        ):
            if text is not None and not text.strip():
                raise ValueError(f"{option} is empty: give a value or leave it out")
        if self.root_path and not self.root_path.startswith("/"):
            raise ValueError(f"--root-path must begin with /, got {self.root_path!r}")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("--ssl-keyfile and --ssl-certfile go together: one of them is missing")


def _check_count(option: str, value: object, high: int | None = None) -> None:
    """Raise ValueError unless `value` is an integer from 0 on, and at most `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{option} must be at least 0, got {value!r}")
    if high is not None and value > high:
        raise ValueError(f"{option} must be at most {high}, got {value}")


def _check_share(option: str, value: object) -> None:
    """Raise ValueError unless `value` is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{option} must be between 0 and 1, got {value!r}")


def _check_seconds(option: str, value: object) -> None:
    """Raise ValueError unless `value` is a finite number of seconds from 0 on."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{option} must be a number of seconds, got {value!r}")
    if not 0 <= value <= sys.float_info.max:  # an int may be larger, and is no time either
        raise ValueError(f"{option} must be a finite number of seconds from 0 on, got {value}")
