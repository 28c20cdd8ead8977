"""What does HTTP cost on top of the engine?

The same requests, all at once: given to an engine in this process (`offline`, and again as A/A),
and streamed by `nanoserve serve` to a client, both in processes of their own, as serving is. Beside
the wall time: the processor time of the server's threads and of the client per token, and how long
after its birth a token is on the wire. Nothing is recorded unless both arms emit the same tokens;
in exact arithmetic every timed answer is held to them again. Before that the server lives through
thousands of short requests and hundreds of clients that leave; its memory and its gauges afterwards
go into the header.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from nanoserve.bench import machine
from nanoserve.bench.client import Answer, Ask
from nanoserve.bench.conduct import AAArms, Pace, Trial, VoidError, conduct
from nanoserve.bench.experiments.batch import make_trial
from nanoserve.bench.experiments.kvcache import Gate, Tokens, queue, write
from nanoserve.bench.findings.serving import beyond_engine_s
from nanoserve.bench.measure import Arm, Group, Rules, Stopwatch, now_s, plan_rounds, thread_cpu_s
from nanoserve.bench.metrics import min_samples
from nanoserve.bench.record import Record, Run
from nanoserve.bench.served import (
    Client,
    Server,
    asking,
    completion_body,
    serving,
    within_s,
)
from nanoserve.bench.session import Options, Screen, open_engine, weights_at_hand
from nanoserve.bench.workload import prompt_token_ids
from nanoserve.engine.engine import Engine
from nanoserve.request import TokenLogprob

QUESTION = "what does HTTP cost on top of the engine?"

AA = AAArms(arm="offline", same_arm="offline again", part="run")

SHORT_PROMPT, SHORT_OUTPUT = 4, 2
"""Tokens of a request whose only purpose is that there are many of them."""

LEFT_OUTPUT = 32
MAX_READS = 12
"""A client that leaves does so after 0 to this many reads of its answer."""

IDLE_S = 10.0
LEAVING_SEED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured. With the first of `streams` the offline arm runs twice (A/A).

    Of `num_short` requests memory is read after the first `num_settling`.
    """

    streams: tuple[int, ...]
    prompt: int
    output: int
    num_settling: int
    num_short: int
    num_leaving: int
    rules: Rules


FULL = Scale(
    streams=(32, 16),
    prompt=32,
    output=64,
    num_settling=500,
    num_short=2000,
    num_leaving=500,
    rules=Rules(min_rounds=6, budget_s=240.0),
)
QUICK = Scale(
    streams=(32,),
    prompt=4,
    output=12,
    num_settling=16,
    num_short=32,
    num_leaving=16,
    rules=Rules(dropped_rounds=1, min_rounds=2, max_rounds=12, budget_s=8.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """So many streams of the same length, and what each of them must say."""

    prompts: tuple[tuple[int, ...], ...]
    output: int
    expected: tuple[str, ...]
    is_exact: bool

    @property
    def streams(self) -> int:
        return len(self.prompts)

    @property
    def num_tokens(self) -> int:
        return self.streams * self.output

    def asks(self, **more: object) -> list[Ask]:
        """One for each prompt."""
        return [Ask(body=completion_body(p, self.output, **more)) for p in self.prompts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arms:
    """The engine of this process, a server with another like it, and the client."""

    engine: Engine
    server: Server
    client: Client


def check_answers(answers: Sequence[Answer | None], output: int) -> list[Answer]:
    """All of them. Raises VoidError unless each is whole and has `output` tokens."""
    found = []
    for number, answer in enumerate(answers):
        if answer is None or not answer.is_whole or answer.num_tokens != output:
            raise VoidError(f"answer {number} is not whole, nothing is recorded: {answer}")
        found.append(answer)
    return found


# --- the gate -------------------------------------------------------------------------------------


def gated_load(arms: Arms, streams: int, scale: Scale, gate: Gate) -> Load:
    """A load of which both arms emit the same tokens. Raises VoidError for one that they do not."""
    vocab_size = arms.engine.model_config.vocab_size
    prompts = tuple(tuple(prompt_token_ids(scale.prompt, vocab_size, i)) for i in range(streams))
    load = Load(
        prompts=prompts, output=scale.output, expected=(), is_exact=arms.engine.spec.is_exact
    )
    written = write(arms.engine, prompts, scale.output, num_logprobs=gate.num_logprobs)
    report = arms.client.run(arms.server, load.asks(return_token_ids=True), at_once=streams)
    answers = check_answers(report.answers, scale.output)
    served = [
        rated_by(tokens, answer.token_ids) for tokens, answer in zip(written, answers, strict=True)
    ]
    where = f"{streams} streams"
    gate.compare(where, written, served, names=("the engine offline", "the server"))
    return replace(load, expected=tuple(answer.text for answer in answers))


def rated_by(tokens: Tokens, token_ids: Sequence[int]) -> Tokens:
    """`token_ids` with what the offline arm thought of each: its own rating, its alternatives.

    Until the two part they continue one text, so the ratings are those of the other arm's model as
    well. Raises VoidError if one is longer than the other.
    """
    if len(tokens) != len(token_ids):
        raise VoidError(f"{len(token_ids)} tokens came through HTTP, {len(tokens)} offline")
    rated = []
    for token, token_id in zip(tokens, token_ids, strict=True):
        known = {token.token_id: token.logprob, **dict(token.top)}
        logprob = known.get(token_id, -float("inf"))
        rated.append(TokenLogprob(token_id=token_id, logprob=logprob, top=token.top))
    return rated


# --- the arms -------------------------------------------------------------------------------------


def run_offline(engine: Engine, load: Load) -> list[str]:
    """The texts, each put together from what the engine's steps gave."""
    pieces: list[list[str]] = [[] for _ in load.prompts]
    queue(engine, load.prompts, load.output)
    while engine.has_unfinished:
        for delta in engine.step():
            pieces[int(delta.request_id)].append(delta.text)
    return ["".join(texts) for texts in pieces]


def offline_arm(engine: Engine, load: Load) -> Arm:
    """ "run": from the first request to the last token; "engine cpu": this thread's share."""

    def arm(watch: Stopwatch) -> None:
        before_s = thread_cpu_s()
        texts = watch.time("run", lambda: run_offline(engine, load))
        watch.seconds["engine cpu"] = thread_cpu_s() - before_s
        check_texts(load, texts, "offline")

    return arm


def http_arm(arms: Arms, load: Load) -> Arm:
    """ "run": by the client's clock, connecting included; the processor time of all who took part;
    and the bounds within which half and 99 % of the tokens were on the wire after their birth."""

    def arm(watch: Stopwatch) -> None:
        asks = load.asks()
        before = arms.server.readings()
        report = arms.client.run(arms.server, asks, at_once=load.streams)
        spent = arms.server.readings() - before
        answers = check_answers(report.answers, load.output)
        check_texts(load, [answer.text for answer in answers], "http")
        watch.seconds |= {
            "run": report.wall_s,
            "client cpu": report.cpu_s,
            "server cpu": spent.process_cpu_s,
            "engine cpu": spent.engine_cpu_s,
            "event loop cpu": spent.event_loop_cpu_s,
            **delivery_seconds(spent.delivered),
        }

    return arm


def check_texts(load: Load, texts: Sequence[str], arm: str) -> None:
    """Raise VoidError for a text that is not the gate's; half precision may end near ties anew."""
    if load.is_exact and tuple(texts) != load.expected:
        first = next(n for n, text in enumerate(texts) if text != load.expected[n])
        raise VoidError(f"{arm}: the text of stream {first} is not the one that passed the gate")


def delivery_seconds(delivered: Mapping[float, float]) -> dict[str, float]:
    """Bounds of the median and, with enough tokens, of the 99th percentile.

    Raises VoidError for a token that came later than the server's counters reach.
    """
    count = max(delivered.values(), default=0.0)
    shares = {"delivery p50": 0.5, "delivery p99": 0.99}
    found = {
        name: within_s(delivered, share)
        for name, share in shares.items()
        if count >= min_samples(share)
    }
    if math.inf in found.values():
        raise VoidError("tokens were on the wire later than the server's last bucket reaches")
    return found


# --- what is predicted ----------------------------------------------------------------------------


def rehearse(group: Group, synchronize: Callable[[], object]) -> dict[str, Mapping[str, float]]:
    """Each arm once, uncounted: what it says, and as "all" what the repetition cost.

    The second offline arm is the first and need not be run for that.
    """
    found: dict[str, Mapping[str, float]] = {}
    for name, arm in group.arms.items():
        if name != AA.same_arm:
            watch, whole = Stopwatch(synchronize), Stopwatch(synchronize)
            whole.time("all", functools.partial(arm, watch))
            found[name] = {**watch.seconds, **whole.seconds}
    return found


def predict(
    rehearsed: Mapping[str, Mapping[str, float]], load: Load, *, threads: int, cores: int
) -> Record:
    """From processor time alone, no wall time of the HTTP arm.

    The server's threads take turns under the interpreter's lock, so what the others need the engine
    waits for; and for the client as well where its threads leave no core free. Tokens of one step
    are written one after another, so the last is on the wire after all the others.
    """
    http = rehearsed["http"]
    offline_s = rehearsed["offline"]["run"]
    taken_s = beyond_engine_s(http, threads) + http["client cpu"] * (threads >= cores)
    return {
        "share": offline_s / (offline_s + taken_s),
        "delivery_s": load.streams * beyond_engine_s(http, threads) / load.num_tokens,
    }


# --- what the server lives through ----------------------------------------------------------------


def endure(arms: Arms, scale: Scale, at_once: int, screen: Screen) -> Record:
    """Many short requests and many clients that leave; what is left of them afterwards."""
    title = f"the server lives through {scale.num_short:,} requests and {scale.num_leaving} leavers"
    with screen.progress(title, 3.0) as advance:
        short = short_asks(arms.engine, scale.num_short)
        memory = []
        for part in (short[: scale.num_settling], short[scale.num_settling :]):
            report = arms.client.run(arms.server, part, at_once=at_once)
            check_answers(report.answers, SHORT_OUTPUT)
            memory.append(arms.server.anonymous_bytes())
            advance(1.0)
        leaving = leaving_asks(arms.engine, scale.num_leaving)
        left = arms.client.run(arms.server, leaving, at_once=at_once).answers.count(None)
        gauges = arms.server.wait_until_idle(IDLE_S)
        arms.server.get("/debug/invariants")  # anything but 200 voids the run
        advance(1.0)
    return {
        "num_settling": scale.num_settling,
        "num_short": scale.num_short,
        "anonymous_bytes": memory,
        "num_leaving": scale.num_leaving,
        "num_left": left,
        "leaving_seed": LEAVING_SEED,
        "gauges": gauges,
    }


def short_asks(engine: Engine, count: int) -> list[Ask]:
    """Requests that share nothing."""
    vocab_size = engine.model_config.vocab_size
    prompts = [prompt_token_ids(SHORT_PROMPT, vocab_size, 1000 + i) for i in range(count)]
    return [Ask(body=completion_body(prompt, SHORT_OUTPUT)) for prompt in prompts]


def leaving_asks(engine: Engine, count: int) -> list[Ask]:
    """Clients that go at any moment: before the answer begins, in it, politely or not."""
    generator = random.Random(LEAVING_SEED)
    vocab_size = engine.model_config.vocab_size
    return [
        Ask(
            body=completion_body(prompt_token_ids(SHORT_PROMPT, vocab_size, i), LEFT_OUTPUT),
            leaves_after=generator.randint(0, MAX_READS),
            resets=generator.random() < 0.5,
        )
        for i in range(count)
    ]


# --- the experiment -------------------------------------------------------------------------------


def make_group(arms: Arms, load: Load, *, with_again: bool) -> Group:
    """Both arms under one load, the offline one again where it is the A/A pair."""
    offline = offline_arm(arms.engine, load)
    group = {AA.arm: offline, "http": http_arm(arms, load)}
    if with_again:
        group[AA.same_arm] = offline
    labels = {
        "streams": load.streams,
        "prompt": len(load.prompts[0]),
        "output": load.output,
        "num_tokens": load.num_tokens,
        "threads": num_threads(arms.engine),
    }
    return Group(name=f"{load.streams} streams", arms=group, labels=labels)


def num_threads(engine: Engine) -> int:
    """Threads that compute."""
    return int(engine.executor.describe()["threads"])


def round_cost_s(group: Group, rehearsed: Mapping[str, Mapping[str, float]]) -> float:
    """Seconds that all arms of a group take once."""
    return sum(rehearsed.get(name, rehearsed[AA.arm])["all"] for name in group.arms)


def prepare(arms: Arms, scale: Scale, gate: Gate, screen: Screen) -> Trial:
    """Gate, rehearsal and predictions, and what the server has to live through; then the trial."""
    threads, cores = num_threads(arms.engine), machine.num_usable_cores()
    groups, predictions, costs_s = [], {}, {}
    with screen.progress("gate and rehearsal", float(len(scale.streams))) as advance:
        for streams in scale.streams:
            load = gated_load(arms, streams, scale, gate)
            group = make_group(arms, load, with_again=streams == scale.streams[0])
            rehearsed = rehearse(group, arms.engine.executor.synchronize)
            groups.append(group)
            predictions[group.name] = predict(rehearsed, load, threads=threads, cores=cores)
            costs_s[group.name] = round_cost_s(group, rehearsed)
            advance(1.0)
    header = {
        "predictions": predictions,
        "endurance": endure(arms, scale, scale.streams[0], screen),
    }
    trial = make_trial("serving", arms.engine, gate, groups, scale.rules, AA, header)
    return replace(trial, pace=Pace(costs_s=costs_s, rounds=plan_rounds(costs_s, scale.rules)))


def measure(options: Options, screen: Screen) -> Run:
    """The whole experiment; its complete run.

    Raises VoidError for a failed gate or A/A check, for a server that does not come up or loses an
    answer, and for blocks that its invariants find lost.
    """
    scale = QUICK if options.quick else FULL
    load_format, remark = weights_at_hand(options)
    if remark:
        screen.say(remark)
    started_s = now_s()
    engine = open_engine(
        options,
        load_format,
        layout="paged",
        max_num_seqs=max(scale.streams),
        max_num_batched_tokens=None,
    )
    load_s = now_s() - started_s
    gate = Gate(is_exact=engine.spec.is_exact)
    screen.say("starting a server with the same engine")
    with serving(engine) as server, asking() as client:
        ready_s = now_s() - started_s - load_s
        arms = Arms(engine=engine, server=server, client=client)
        trial = prepare(arms, scale, gate, screen)
        header = {"load_s": load_s, "server_ready_s": ready_s, **trial.header}
        return conduct(replace(trial, header=header), options, screen)
