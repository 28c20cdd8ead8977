"""A bench on which time is fake: clocks, engines and yardsticks whose speed is known beforehand.

Whole experiments run on them in milliseconds, and their findings can be computed by hand.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from nanoserve.bench import measure
from nanoserve.bench.conduct import AAArms, Trial
from nanoserve.bench.measure import Group, Rules, Sample, Stopwatch
from nanoserve.config import ModelConfig
from nanoserve.request import FinishReason, RequestDelta, SamplingParams, TokenLogprob


@dataclass
class FakeClock:
    """Nanoseconds that pass only when something says so."""

    now_ns: int = 0

    def __call__(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


def nothing() -> None:
    """A device that is always done."""


def sample(
    arm: str, number: int, seconds: float, *, group: str = "g", dropped: bool = False
) -> Sample:
    return Sample(
        group=group, arm=arm, round=number, position=0, dropped=dropped, seconds={"step": seconds}
    )


@dataclass
class FakeBench:
    """A trial of two equal arms, of which the second is slower in the first attempts."""

    clock: FakeClock
    slower_in: Sequence[int] = ()
    stop_after: int | None = None
    num_runs: int = 0

    def trial(self, **values: Any) -> Trial:
        rules = Rules(warmups=1, dropped_rounds=1, min_rounds=8, max_rounds=8)
        trial = Trial(
            experiment="fake",
            name="x",
            groups=[Group(name="g", arms={"a": self.arm(0.0), "b": self.arm(0.5)})],
            rules=rules,
            aa=AAArms(arm="a", same_arm="b", part="step"),
            synchronize=nothing,
            identity={"executor": "fake", "device": "cpu", "dtype": "float32"},
        )
        return replace(trial, **values)

    def arm(self, handicap: float) -> measure.Arm:
        """One second, and the handicap where it applies.

        The arm that comes first takes a little more or a little less in turn, so that both signs
        occur among any few ratios and equal arms are never told apart by chance.
        """

        def run(watch: Stopwatch) -> None:
            if self.stop_after == self.num_runs:
                raise KeyboardInterrupt
            pair, place = divmod(self.num_runs, 2)
            attempt = 0 if pair < 1 + 9 else 1  # one pair of warm-ups, nine rounds
            jitter = 0.0 if place else (-0.01, 0.01)[pair % 2]
            extra = handicap if attempt in self.slower_in else 0.0
            self.num_runs += 1
            watch.time("step", lambda: self.clock.sleep(1.0 + jitter + extra))

        return run


MODEL = ModelConfig(vocab_size=211, n_positions=256, n_embd=32, n_layer=2, n_head=2, n_inner=128)
FAKE_READ_BYTES_PER_S = 1e9


@dataclass
class FakeEngine:
    """Greedy "text" that is a hash of what came before; a step takes time by what it computes."""

    clock: FakeClock
    keeps: bool
    wrong_at: int | None = None
    dtype: str = "float32"
    model_config: ModelConfig = MODEL
    texts: dict[str, list[int]] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)
    generator: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self.spec = SimpleNamespace(
            device="cpu",
            dtype=self.dtype,
            cache_dtype=self.dtype,
            is_exact=self.dtype == "float32",
        )
        self.config = SimpleNamespace(dummy_seed=0)
        checkpoint = SimpleNamespace(kind="dummy", name="/somewhere/tiny", weight_files=())
        self.parts = SimpleNamespace(checkpoint=checkpoint)
        self.executor = SimpleNamespace(
            describe=lambda: {"executor": "eager", "kernels": "fake", "threads": "1"},
            synchronize=nothing,
        )

    @property
    def has_unfinished(self) -> bool:
        return bool(self.texts)

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        assert params.temperature == 0.0
        assert params.ignore_eos
        assert params.max_tokens is not None
        assert len(prompt) + params.max_tokens <= self.model_config.n_positions
        self.texts[request_id] = list(prompt)
        self.left[request_id] = params.max_tokens
        self.computed[request_id] = 0

    def step(self) -> list[RequestDelta]:
        num_new = sum(len(text) - self.computed[i] for i, text in self.texts.items())
        jitter = self.generator.uniform(0.99, 1.01)
        self.clock.sleep((1e-3 + 1e-4 * max(0, num_new - 10)) * jitter)
        return [self.advance(request_id) for request_id in list(self.texts)]

    def advance(self, request_id: str) -> RequestDelta:
        text = self.texts[request_id]
        digest = hashlib.sha256(json.dumps(text).encode()).digest()
        token_id = digest[0] % self.model_config.vocab_size
        best = TokenLogprob(
            token_id=token_id, logprob=-1.0, top=((token_id, -1.0), (token_id + 1, -1.05))
        )
        if len(text) == self.wrong_at:
            best = TokenLogprob(
                token_id=token_id + 1, logprob=-1.0, top=((token_id + 1, -1.0), (token_id, -1.05))
            )
        if self.keeps:
            self.computed[request_id] = len(text)
        text.append(best.token_id)
        self.left[request_id] -= 1
        reason = None if self.left[request_id] else FinishReason.LENGTH
        if reason:
            del self.texts[request_id], self.left[request_id], self.computed[request_id]
        return RequestDelta(
            request_id=request_id,
            index=0,
            token_ids=(best.token_id,),
            text="",
            logprobs=(best,),
            finish_reason=reason,
        )


@dataclass
class FakeYardsticks:
    """A machine whose ceilings are known."""

    clock: FakeClock
    device: str = "cpu"

    def fastest(self, samples: object, dtype: str) -> list[Group]:
        return [
            Group(
                name=f"ceiling: {unit}",
                arms={"fake": slow_arm_named(self.clock, 1e-3)},
                labels={
                    "unit": unit,
                    "amount": amount,
                    "dtype": dtype if unit == "flops" else None,
                },
            )
            for unit, amount in (("bytes", 1_000_000), ("flops", 5_000_000))
        ]


def slow_arm_named(clock: FakeClock, seconds: float) -> measure.Arm:
    return lambda watch: watch.time("run", lambda: clock.sleep(seconds))


def ceiling_samples() -> list[Sample]:
    loads = [
        ("read", "bytes", 1_000_000, None),
        ("matmul float32 x", "flops", 5_000_000, "float32"),
        ("matmul float16 x", "flops", 5_000_000, "float16"),
        ("dispatch", "operations", 1000, None),
    ]
    return [
        Sample(
            group=group,
            arm="fake",
            round=0,
            position=0,
            dropped=False,
            seconds={"run": 1e-3},
            labels={"unit": unit, "amount": amount, "dtype": dtype},
        )
        for group, unit, amount, dtype in loads
    ]
