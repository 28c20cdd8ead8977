"""The options that several commands share, each defined once: what an engine is, how it samples.

A command takes a group whole (`engine: EngineOptions`), and `@spread` shows its fields as options
of their own. Defaults are read off the dataclasses of `config` and `request`, which also check the
values, so neither a default nor a limit is written down twice. Every option of an engine or of the
server has an environment variable, NANOSERVE_<OPTION>, which an option that was typed overrides.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from nanoserve.config import (
    Batching,
    CacheConfig,
    CacheDtype,
    ContextOverflow,
    Device,
    DtypeOption,
    EngineConfig,
    ExecutorName,
    Kernels,
    Layout,
    LoadFormat,
    LogLevel,
    QuantizationOption,
    SchedulerConfig,
    ServerConfig,
)
from nanoserve.planner.memory import parse_bytes
from nanoserve.request import SamplingParams

_ENGINE = EngineConfig()
_CACHE = CacheConfig()
_SCHEDULER = SchedulerConfig()
_SAMPLING = SamplingParams()
_SERVER = ServerConfig()


def _config_option(declaration: str, help_text: str, unset: str | bool = True) -> Any:
    """An option of engine or server, and its environment variable; `unset`: what None means."""
    name = declaration.partition("/")[0].lstrip("-")
    return typer.Option(
        declaration,
        help=help_text,
        envvar=f"NANOSERVE_{name.replace('-', '_').upper()}",
        show_default=unset,
    )


def _sampling_option(declaration: str, help_text: str, unset: object = None) -> Any:
    """A sampling option; `unset` is what `SamplingParams` has where it is not typed."""
    return typer.Option(
        declaration,
        help=help_text,
        show_default=False if unset is None else f"the model's, else {unset}",
    )


Model = Annotated[
    str, _config_option("--model", "The embedded model, a local folder or a hub name.")
]
Dtype = Annotated[
    DtypeOption,
    _config_option("--dtype", "Of the weights; auto: float32 on a CPU, float16 on a GPU."),
]
KVCacheDtype = Annotated[
    Literal["auto", CacheDtype],
    _config_option("--kv-cache-dtype", "Of K and V; auto: as --dtype."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What an engine is built from: the fields of `EngineConfig` and the configs within, flat."""

    model: Model = _ENGINE.model
    revision: Annotated[
        str | None, _config_option("--revision", "Branch, tag or commit of a hub repository.")
    ] = _ENGINE.revision
    load_format: Annotated[
        LoadFormat,
        _config_option("--load-format", "Which weight files to read; dummy: random weights."),
    ] = _ENGINE.load_format
    dummy_seed: Annotated[int, _config_option("--dummy-seed", "Seed of the random weights.")] = (
        _ENGINE.dummy_seed
    )
    tokenizer: Annotated[
        str | None,
        _config_option("--tokenizer", "Folder or model to take it from.", "the model's own"),
    ] = _ENGINE.tokenizer
    device: Annotated[Device, _config_option("--device", "auto: a GPU where there is one.")] = (
        _ENGINE.device
    )
    dtype: Dtype = _ENGINE.dtype
    kv_layout: Annotated[
        Layout,
        _config_option("--kv-layout", "Where K and V live; recompute keeps none: the naive way."),
    ] = _CACHE.layout
    kv_cache_dtype: KVCacheDtype = _CACHE.dtype or "auto"
    quantization: Annotated[
        QuantizationOption,
        _config_option("--quantization", "Of the weights, while they are loaded."),
    ] = _ENGINE.quantization or "none"
    executor: Annotated[
        ExecutorName,
        _config_option(
            "--executor",
            "What computes the steps; auto: native on a CPU where it runs, else eager.",
        ),
    ] = _ENGINE.executor
    kernels: Annotated[
        Kernels,
        _config_option("--kernels", "Of attention, if PyTorch computes; auto: triton on a GPU."),
    ] = _ENGINE.kernels
    max_model_len: Annotated[
        int | None,
        _config_option("--max-model-len", "Tokens of the longest context.", "all the model has"),
    ] = _SCHEDULER.max_model_len
    max_num_seqs: Annotated[
        int, _config_option("--max-num-seqs", "Sequences that run at once.")
    ] = _SCHEDULER.max_num_seqs
    max_num_batched_tokens: Annotated[
        int | None,
        _config_option("--max-num-batched-tokens", "Token rows of one step.", "chosen here"),
    ] = _SCHEDULER.max_num_batched_tokens
    block_size: Annotated[int, _config_option("--block-size", "Tokens of a block, if paged.")] = (
        _CACHE.block_size
    )
    kv_cache_memory_bytes: Annotated[
        str | None,
        _config_option(
            "--kv-cache-memory-bytes", "What the cache may take, as 512MiB.", "from free memory"
        ),
    ] = None if _CACHE.memory_bytes is None else str(_CACHE.memory_bytes)
    enable_prefix_caching: Annotated[
        bool,
        _config_option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            "Compute a beginning that prompts share only once.",
        ),
    ] = _SCHEDULER.enable_prefix_caching
    batching: Annotated[
        Batching, _config_option("--batching", "static: a batch drains before the next begins.")
    ] = _SCHEDULER.batching
    batching_timeout: Annotated[
        float | None,
        _config_option(
            "--batching-timeout", "Seconds a static batch waits until it is full.", "not at all"
        ),
    ] = _SCHEDULER.batching_timeout
    context_overflow: Annotated[
        ContextOverflow,
        _config_option("--context-overflow", "At its end: stop, or slide the window and go on."),
    ] = _SCHEDULER.context_overflow
    slide_window: Annotated[
        int | None,
        _config_option("--slide-window", "Tokens that stay when the window slides.", "half of it"),
    ] = _SCHEDULER.slide_window
    strict_context: Annotated[
        bool,
        _config_option(
            "--strict-context/--no-strict-context",
            "Refuse a request that the context would cut short.",
        ),
    ] = _SCHEDULER.strict_context
    threads: Annotated[
        int | None, _config_option("--threads", "Of the CPU.", "the executor's choice")
    ] = _ENGINE.threads
    kv_audit: Annotated[
        float,
        _config_option("--kv-audit", "Share of requests compared with a full-precision cache."),
    ] = _ENGINE.kv_audit

    def values(self) -> dict[str, Any]:
        """Arguments of `LLM` and `engine_config`. Raises ValueError for a size that is none."""
        values = asdict(self)
        if self.kv_cache_memory_bytes is not None:
            values["kv_cache_memory_bytes"] = parse_bytes(
                self.kv_cache_memory_bytes, option="--kv-cache-memory-bytes"
            )
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The fields of `ServerConfig`; origins are typed as one text, parted by commas."""

    host: Annotated[
        str, _config_option("--host", "Address to listen at; 0.0.0.0: every network.")
    ] = _SERVER.host
    port: Annotated[int, _config_option("--port", "0: a free one.")] = _SERVER.port
    served_model_name: Annotated[
        str | None,
        _config_option("--served-model-name", "What clients call the model.", "the model's own"),
    ] = _SERVER.served_model_name
    api_key: Annotated[
        str | None, _config_option("--api-key", "Asked of every client.", "none asked")
    ] = _SERVER.api_key
    max_queue: Annotated[
        int, _config_option("--max-queue", "Requests beyond --max-num-seqs; then 429.")
    ] = _SERVER.max_queue
    request_timeout: Annotated[
        float | None,
        _config_option("--request-timeout", "Seconds a request may take.", "as long as it takes"),
    ] = _SERVER.request_timeout
    shutdown_timeout: Annotated[
        float,
        _config_option("--shutdown-timeout", "Seconds that requests have left after SIGTERM."),
    ] = _SERVER.shutdown_timeout
    allowed_origins: Annotated[
        str | None,
        _config_option(
            "--allowed-origins", "Web pages that may ask, as https://a.example,...", "none"
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        _config_option("--chat-template", "Jinja source or a file of it.", "the tokenizer's"),
    ] = _SERVER.chat_template
    root_path: Annotated[
        str, _config_option("--root-path", "Where a proxy shows this server, as /llm.", "/")
    ] = _SERVER.root_path
    ssl_keyfile: Annotated[
        str | None, _config_option("--ssl-keyfile", "Private key, for HTTPS.", "none")
    ] = _SERVER.ssl_keyfile
    ssl_certfile: Annotated[
        str | None, _config_option("--ssl-certfile", "Its certificate.", "none")
    ] = _SERVER.ssl_certfile
    log_level: Annotated[LogLevel, _config_option("--log-level", "Of the server's log.")] = (
        _SERVER.log_level
    )

    def config(self) -> ServerConfig:
        """Raises ValueError naming the option."""
        values = asdict(self)
        origins = (self.allowed_origins or "").split(",")
        values["allowed_origins"] = tuple(o.strip() for o in origins if o.strip())
        return ServerConfig(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """The fields of `SamplingParams` that can be typed; None where nothing was."""

    max_tokens: Annotated[
        int | None,
        _sampling_option("--max-tokens", "Tokens to generate at most.", _SAMPLING.max_tokens),
    ] = None
    min_tokens: Annotated[
        int | None,
        _sampling_option("--min-tokens", "No end before so many.", _SAMPLING.min_tokens),
    ] = None
    temperature: Annotated[
        float | None,
        _sampling_option("--temperature", "0 is greedy.", _SAMPLING.temperature),
    ] = None
    top_p: Annotated[
        float | None,
        _sampling_option("--top-p", "Keep the likeliest that reach this share.", _SAMPLING.top_p),
    ] = None
    top_k: Annotated[
        int | None,
        _sampling_option("--top-k", "Keep the k likeliest; 0: all.", _SAMPLING.top_k or "all"),
    ] = None
    min_p: Annotated[
        float | None,
        _sampling_option(
            "--min-p", "Drop what is less likely than this share of the likeliest.", _SAMPLING.min_p
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        _sampling_option(
            "--repetition-penalty",
            "Over 1: avoid tokens of prompt and output.",
            _SAMPLING.repetition_penalty,
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        _sampling_option("--presence-penalty", "Over 0: avoid tokens of the output."),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        _sampling_option("--frequency-penalty", "The same, for each time a token came."),
    ] = None
    stop: Annotated[
        list[str] | None,
        _sampling_option("--stop", "End before this text. May be given several times."),
    ] = None
    seed: Annotated[
        int | None, _sampling_option("--seed", "Of the request: equal seeds, equal draws.")
    ] = None
    logprobs: Annotated[
        int | None,
        _sampling_option("--logprobs", "With --json: log-probabilities, and the k likeliest."),
    ] = None
    n: Annotated[int | None, _sampling_option("--n", "Choices to generate.")] = None
    best_of: Annotated[
        int | None, _sampling_option("--best-of", "Generate so many and keep the n likeliest.")
    ] = None
    ignore_eos: Annotated[
        bool, _sampling_option("--ignore-eos", "Go on after the end of the text.")
    ] = _SAMPLING.ignore_eos

    def typed(self) -> dict[str, Any]:
        """The options that were given, under the names of `SamplingParams`."""
        return {name: value for name, value in asdict(self).items() if value not in (None, [])}

    def check(self) -> None:
        """Raise ValueError for a value that no model could honour: asked before one is loaded."""
        _sampling_params({"max_tokens": None, **self.typed()})

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """`defaults` (the model's), and over them what was typed. Raises ValueError."""
        return _sampling_params({**defaults, **self.typed()})


def _sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """`SamplingParams`, whose errors begin with a field's name: here with the option's."""
    try:
        return SamplingParams(**values)
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        if name not in values:
            raise
        raise ValueError(f"--{name.replace('_', '-')} {rest}") from error


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the fields of its option groups as parameters, where typer can see them.

    A group is a parameter whose type is a dataclass; the command gets it whole.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += _parameters_of(parameter.annotation)
        else:
            parameters.append(parameter)

    @functools.wraps(command)
    def spread_out(**values: Any) -> None:
        whole = {
            name: group(**{f.name: values.pop(f.name) for f in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **whole)

    spread_out.__annotations__ = {p.name: p.annotation for p in parameters}
    spread_out.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return spread_out


def _parameters_of(group: Any) -> list[inspect.Parameter]:
    """The fields as keyword-only parameters, each with a parser of ours: see `_read_by_us`."""
    hints = get_type_hints(group, include_extras=True)
    for hint in hints.values():
        _read_by_us(*get_args(hint))
    return [
        inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name]
        )
        for f in fields(group)
    ]


def _read_by_us(kind: Any, option: Any) -> None:
    """Let numbers and choices be read by functions below, which say what they got."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    words = next((k for k in kinds if get_origin(k) is Literal), None)
    if int in kinds:
        option.parser, option.metavar = integer, "INTEGER"
    elif float in kinds:
        option.parser, option.metavar = number, "NUMBER"
    elif words is not None:
        option.parser, option.metavar = one_of(get_args(words)), "|".join(get_args(words))
    elif bool not in kinds:
        option.metavar = "TEXT"


def one_of(choices: Sequence[str]) -> Callable[[str], str]:
    """A reader of one of a few words. It raises BadParameter that says what was got."""

    def read(text: str) -> str:
        if text not in choices:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return read


def integer(text: str) -> int:
    """A typed whole number. Raises BadParameter that says what was got."""
    try:
        return int(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not an integer") from error


def number(text: str) -> float:
    """A typed number. Raises BadParameter that says what was got."""
    try:
        return float(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a number") from error
