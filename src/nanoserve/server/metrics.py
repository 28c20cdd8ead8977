"""What the server counts, and how Prometheus reads it: vLLM's names, so that its dashboards work.

Counting is plain additions on the event loop, a few for each step and none that locks; only a
scrape builds prometheus-client's values. The registry belongs to one app. Names that vLLM does not
have begin with `nanoserve:`. A choice counts as one end in `request_success_total`, whose labels
also tell how many did not succeed.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from nanoserve.request import FinishReason, KVAudit, RequestDelta, RequestOutput
from nanoserve.server.engine_thread import Load
from nanoserve.server.tickets import Item, Ticket

FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0),
)
DELIVERY_S = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01),
    *(0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0),
)
REQUEST_S = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0),
)
KL_NATS = tuple(10.0**power for power in range(-8, 2))
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


class Histogram:
    """Counts of what was observed, by upper bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str, model: str) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        names = [*(f"{float(bound)}" for bound in self._bounds), "+Inf"]
        family.add_metric(
            [model],
            [(name, float(n)) for name, n in zip(names, accumulate(self._counts), strict=True)],
            self._sum,
        )
        return family


class ServerMetrics(Collector):
    """The numbers of one server, labelled by `model_name`. `load` is the engine's last word."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.load = Load()
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_refused = 0
        self.num_disconnects = 0
        self.num_broken = 0
        self.ends: Counter[str] = Counter({reason.value: 0 for reason in FinishReason})
        self.statuses: Counter[str] = Counter()
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.inter_token_s = Histogram(TOKEN_S)
        self.delivery_s = Histogram(DELIVERY_S)
        self.request_s = Histogram(REQUEST_S)
        self.queue_s = Histogram(REQUEST_S)
        self.prefill_s = Histogram(REQUEST_S)
        self.decode_s = Histogram(REQUEST_S)
        self.audit_kl = Histogram(KL_NATS)
        self.num_audited_tokens = 0
        self.num_audited_disagreements = 0
        self.max_audited_logit_error = 0.0
        self.request_prompt_tokens = Histogram(TOKENS)
        self.request_generated_tokens = Histogram(TOKENS)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)

    def ended(self, reason: FinishReason, count: int = 1) -> None:
        self.ends[reason.value] += count

    def observe(self, ticket: Ticket, index: int, delta: RequestDelta, now_s: float) -> None:
        """Take what a step added to prompt `index` of `ticket`. Times are on the engine's clock."""
        if delta.token_ids:
            self._observe_tokens(ticket, (index, delta.index), len(delta.token_ids), now_s)
        if delta.finish_reason is not None:
            self.ended(delta.finish_reason)
        if delta.output is not None:
            self._observe_end(delta.output, now_s)

    def delivered(self, items: Iterable[Item], now_s: float) -> None:
        """These were handed to the network; `now_s` is on the engine's clock."""
        for item in items:
            if item.delta.token_ids:
                self.delivery_s.observe(now_s - item.born_s)

    def _observe_tokens(
        self, ticket: Ticket, choice: tuple[int, int], num_tokens: int, now_s: float
    ) -> None:
        self.num_generated_tokens += num_tokens
        last_s = ticket.last_token_s.get(choice)
        ticket.last_token_s[choice] = now_s
        if last_s is None:
            self.first_token_s.observe(now_s - ticket.arrival_s)
        else:
            self.inter_token_s.observe(now_s - last_s)

    def _observe_end(self, output: RequestOutput, now_s: float) -> None:
        times = output.metrics
        num_generated = sum(len(choice.token_ids) for choice in output.outputs)
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.request_prompt_tokens.observe(len(output.prompt_token_ids))
        self.request_generated_tokens.observe(num_generated)
        self.request_s.observe(now_s - times.arrival_s)
        if times.kv_audit is not None:
            self._observe_audit(times.kv_audit)
        if times.first_scheduled_s is None:
            return
        self.queue_s.observe(times.first_scheduled_s - times.arrival_s)
        if times.first_token_s is not None and times.last_token_s is not None:
            self.prefill_s.observe(times.first_token_s - times.first_scheduled_s)
            self.decode_s.observe(times.last_token_s - times.first_token_s)

    def _observe_audit(self, audit: KVAudit) -> None:
        """How the cache of one request compared with a full-precision one."""
        self.num_audited_tokens += audit.num_tokens
        self.num_audited_disagreements += audit.num_tokens - audit.num_agreed
        self.max_audited_logit_error = max(self.max_audited_logit_error, audit.max_logit_error)
        if audit.mean_kl is not None:
            self.audit_kl.observe(audit.mean_kl)

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        load = self.load
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences in the running batch.", load.num_running),
            ("vllm:num_requests_waiting", "Sequences that wait for it.", load.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of the cache in use; 1 is all.", load.cache_usage),
            (
                "nanoserve:kv_audit_logit_error",
                "Largest difference of a logit that --kv-audit found.",
                self.max_audited_logit_error,
            ),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self.model_name], value)
            yield gauge

    def _counters(self) -> Iterator[Metric]:
        load = self.load
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens of finished requests.", self.num_prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", self.num_generated_tokens),
            ("vllm:num_preemptions", "Preemptions.", load.counters.num_preemptions),
            (
                "vllm:prefix_cache_queries",
                "Tokens looked up in the prefix cache.",
                load.counters.prefix_query_tokens,
            ),
            (
                "vllm:prefix_cache_hits",
                "Tokens found in the prefix cache.",
                load.counters.prefix_hit_tokens,
            ),
            ("nanoserve:failed_steps", "Steps that could not be computed.", load.num_failed_steps),
            ("nanoserve:broken_rows", "Choices whose logits were not finite.", self.num_broken),
            ("nanoserve:kv_audit_tokens", "Compared by --kv-audit.", self.num_audited_tokens),
            (
                "nanoserve:kv_audit_disagreements",
                "Of those, tokens whose best differs.",
                self.num_audited_disagreements,
            ),
            ("nanoserve:refused_requests", "Answered 429: queue full.", self.num_refused),
            ("nanoserve:disconnects", "Clients that left early.", self.num_disconnects),
            # prometheus-client's own process_cpu_seconds_total moves in steps of 10 ms
            ("nanoserve:cpu_seconds", "Processor time of the process.", time.process_time()),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self.model_name], value)
            yield counter
        yield self._by_label(
            "vllm:request_success", "Choices by how they ended.", "finished_reason", self.ends
        )
        # A scrape runs on the event loop, so this is its thread's time.
        threads = {"engine": load.cpu_s, "event_loop": time.thread_time()}
        yield self._by_label("nanoserve:thread_cpu_seconds", "Processor time.", "thread", threads)
        yield self._by_label(
            "nanoserve:http_responses", "Responses by status.", "status", self.statuses
        )

    def _by_label(self, name: str, text: str, label: str, counts: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name", label])
        for value, count in counts.items():
            family.add_metric([self.model_name, value], count)
        return family

    def _histograms(self) -> Iterator[Metric]:
        yield self.delivery_s.family(
            "nanoserve:token_delivery_seconds",
            "From a streamed token's birth to its hand-over to the network.",
            self.model_name,
        )
        yield self.audit_kl.family(
            "nanoserve:kv_audit_kl_nats",
            "KL(full-precision cache || this one), the mean of a request that --kv-audit watched.",
            self.model_name,
        )
        for histogram, name, text in (
            (self.first_token_s, "time_to_first_token_seconds", "From arrival."),
            (self.inter_token_s, "inter_token_latency_seconds", "Between tokens of a choice."),
            (self.request_s, "e2e_request_latency_seconds", "From arrival to the end."),
            (self.queue_s, "request_queue_time_seconds", "From arrival to the first step."),
            (self.prefill_s, "request_prefill_time_seconds", "First step to first token."),
            (self.decode_s, "request_decode_time_seconds", "First token to last."),
            (self.request_prompt_tokens, "request_prompt_tokens", "Of finished requests."),
            (self.request_generated_tokens, "request_generation_tokens", "Over all choices."),
        ):
            yield histogram.family(f"vllm:{name}", text, self.model_name)
