"""A request: what was asked, how far it has come, and what comes out.

Floor 0: the standard library only. A `Request` is one sequence (one of a request's `n` choices) and
keeps one invariant: the first `num_computed_tokens` tokens of its window have K and V in the cache,
the rest have not. Prefill, chunk, decode and recompute after preemption are all "advance by q".
"""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_LOGPROBS = 64
MAX_CHOICES = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 10_000


class FinishReason(enum.StrEnum):
    """Why a sequence ended. The first two are OpenAI's words on the wire."""

    STOP = "stop"  # end-of-text, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # the caller went away
    TIMEOUT = "timeout"  # its deadline passed
    ERROR = "error"  # its row of logits was not finite, or its step failed


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen; vLLM's names, the Python API's defaults.

    `temperature` 0 is greedy. `top_k` None, 0 or -1 is off. `max_tokens` None means to the end of
    the context. `seed` None draws one. `logprobs` k reports each token's log-probability and its k
    best alternatives, `prompt_logprobs` the same for the prompt. `best_of` None means `n`.
    `skip_special_tokens` leaves special tokens out of the text; the one that ends it never shows.
    `stop` is a string or up to 64 of them, of up to 10,000 characters each. Containers are copied.
    Raises ValueError, naming the field, for a value of another kind or outside its range (NaN
    always is), and for None where the field's type does not offer it.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None

    def __post_init__(self) -> None:
        self._check_containers()
        self._copy_containers()
        self._check_limits()
        self._check_sampling()
        self._check_ends()

    def _check_containers(self) -> None:
        """Refuse what is no container, so that what follows may look inside."""
        if not isinstance(self.stop, Sequence):
            raise ValueError(f"stop must be a string or a sequence of them, got {self.stop!r}")
        if not isinstance(self.stop_token_ids, Sequence) or isinstance(self.stop_token_ids, str):
            raise ValueError(
                f"stop_token_ids must be a sequence of integers, got {self.stop_token_ids!r}"
            )
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")

    def _copy_containers(self) -> None:
        """What the caller does to its own lists and dicts later must change nothing here."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if type(self.top_k) is int and self.top_k in (0, -1):  # False == 0, and is refused
            object.__setattr__(self, "top_k", None)

    def _check_limits(self) -> None:
        """How much is generated and reported, and from which seed."""
        check_range("max_tokens", self.max_tokens, 0, math.inf, integer=True, optional=True)
        check_range("min_tokens", self.min_tokens, 0, math.inf, integer=True)
        check_range("seed", self.seed, -(2**63), 2**63 - 1, integer=True, optional=True)
        check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS, integer=True, optional=True)
        check_range(
            "prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, integer=True, optional=True
        )
        check_range("n", self.n, 1, MAX_CHOICES, integer=True)
        check_range("best_of", self.best_of, self.n, MAX_CHOICES, integer=True, optional=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )

    def _check_sampling(self) -> None:
        check_range("temperature", self.temperature, 0.0, math.inf)
        check_range("top_p", self.top_p, 0.0, 1.0)
        check_range("top_k", self.top_k, 1, math.inf, integer=True, optional=True)
        check_range("min_p", self.min_p, 0.0, 1.0)
        check_range("repetition_penalty", self.repetition_penalty, 1e-6, math.inf)
        check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token_id, bias in self.logit_bias.items():
            check_range("logit_bias key", token_id, 0, math.inf, integer=True)
            check_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)

    def _check_ends(self) -> None:
        for name in ("include_stop_str_in_output", "skip_special_tokens", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for token_id in self.stop_token_ids:
            check_range("stop_token_ids entry", token_id, 0, math.inf, integer=True)
        if any(not isinstance(string, str) or not string for string in self.stop):
            raise ValueError(f"stop must hold non-empty strings, got {list(self.stop)!r}")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(
                f"stop must hold at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}"
            )
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_CHARS:
            raise ValueError(
                f"stop strings must have at most {MAX_STOP_CHARS} characters, got one of {longest}"
            )

    @property
    def penalises(self) -> bool:
        """Whether a logit depends on what was said already."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def num_choices(self) -> int:
        """Sequences to run: `best_of`, or `n`."""
        return self.best_of if self.best_of is not None else self.n


def check_range(
    name: str,
    value: object,
    low: float,
    high: float,
    *,
    integer: bool = False,
    optional: bool = False,
) -> None:
    """Raise ValueError unless `value` is a finite number (an int if `integer`) in [low, high].

    None passes only if `optional`; a bool is no number, and neither is an int that no float holds.
    """
    if value is None and optional:
        return
    kind = "an integer" if integer else "a number"
    if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)):
        raise ValueError(f"{name} must be {kind}, got {value!r}")
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        # Its digits would fill the message, and Python prints no more than 4300 of them.
        raise ValueError(f"{name} is too large: got an integer of {value.bit_length()} bits")
    if not low <= value <= high or (isinstance(value, float) and math.isinf(value)):
        raise ValueError(f"{name} must be {range_words(low, high)}, got {value}")


def range_words(low: float, high: float) -> str:
    """What a finite number in [low, high] is said to be."""
    if high < math.inf:
        return f"between {low} and {high}"
    return f"at least {low}" if low > -math.inf else "finite"


class RequestStatus(enum.Enum):
    """Where a sequence is; only the scheduler moves it."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One sequence of one caller's request, as scheduler and engine carry it.

    `max_tokens` is resolved (never None): the cap after the context's end was taken into account.
    `window_start` is 0 unless the context slid (`context_overflow="slide"`): the tokens from there
    on are the window, positions count from its start, and so does `num_computed_tokens`.
    """

    request_id: str
    choice: int = 0
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    seed: int = 0
    arrival_s: float = 0.0
    priority: int = 0  # lower runs first
    deadline_s: float | None = None
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    window_start: int = 0
    num_cached_tokens: int = 0  # prompt tokens that a prefix hit or a fork spared, first admission
    num_preemptions: int = 0
    num_slides: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output together, whether still in the window or not."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_window_tokens(self) -> int:
        """Tokens the model may attend to: N once all are computed."""
        return self.num_tokens - self.window_start

    @property
    def num_uncomputed_tokens(self) -> int:
        """Window tokens that still need K and V; 1 in steady decode. Asked of all at every step."""
        num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)
        return num_tokens - self.window_start - self.num_computed_tokens

    def window_tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at window positions [start, stop)."""
        first, last = self.window_start + start, self.window_start + stop
        num_prompt = len(self.prompt_token_ids)
        if first >= num_prompt:
            return self.output_token_ids[first - num_prompt : last - num_prompt]
        tail = self.output_token_ids[: max(0, last - num_prompt)]
        return [*self.prompt_token_ids[first:last], *tail]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One token's log-probability under the raw model, and the best alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One finished (or running) choice."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None  # the stop string or stop id that matched
    logprobs: tuple[TokenLogprob, ...] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVAudit:
    """How the logits of a reduced KV cache compare with a full-precision one's, token by token.

    KL(full || reduced) is in nats; `num_agreed` of `num_tokens` rows have the same best token;
    `max_logit_error` is the largest difference of any logit. `mean_kl` is None where no token was
    drawn.
    """

    num_tokens: int
    num_agreed: int
    mean_kl: float | None
    max_kl: float
    max_logit_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """When things happened (seconds on the engine's clock), and what they cost.

    `num_cached_tokens` are the prompt tokens that the first choice found in the cache when it was
    first admitted, so fewer than the prompt has: siblings share its prompt and do not count again.
    `num_preemptions` and `num_slides` are totals over all choices. `kv_audit` is None unless the
    request was one of those that --kv-audit watches.
    """

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_slides: int = 0
    kv_audit: KVAudit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What `LLM.generate` returns for one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    seed: int
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDelta:
    """What one step added to one choice: `Engine.step` returns these, `LLM.stream` yields them.

    `prompt_logprobs`, where asked for, come with the first delta of choice 0.
    """

    request_id: str
    index: int
    token_ids: Sequence[int]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    output: RequestOutput | None = None  # the whole request, on the delta that ends its last choice
