"""Does our load generator say what an independent one says? `bench arrivals --url` beside guidellm.

A server of ours is offered half of what saturates it: by ours, by guidellm, by guidellm, by ours.
In a run all send the same prompts at the same Poisson times (guidellm replays them), so that each
request has a partner in every other load, and each generator a second load to tell the noise by.
Prefixes are not cached: the second load would find those of the first. Clocks differ, and all are
shown: ours counts the first token from when a request was due, guidellm from when it begins to
write it, however late that is.

With --paced the server is scripts/paced_server.py, so that what each adds of its own is known.
Every call appends one run to results/<machine>/load_agreement.json; the table is of all runs there.

    SERVER_PYTHON=.venv/bin/python .venv-clients/bin/python scripts/load_agreement.py
    .venv-clients/bin/python scripts/load_agreement.py --paced
    .venv-clients/bin/python scripts/load_agreement.py --show
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import paced_server

from nanoserve.bench import machine
from nanoserve.bench.arrivals import Schedule
from nanoserve.bench.client import HOST
from nanoserve.bench.conduct import check_out, timestamp
from nanoserve.bench.findings import Table
from nanoserve.bench.findings.load import LoadFindings, load_findings
from nanoserve.bench.load import (
    LoadOptions,
    load_path,
    make_bodies,
    make_load,
    saturating_rate,
    served_model,
)
from nanoserve.bench.metrics import RequestTimes, median_interval, throughput_out, tpot, ttft
from nanoserve.bench.record import SCHEMA, Record, encode, read_runs
from nanoserve.bench.sender import parse_url
from nanoserve.bench.served import child_environment, free_port, served_by
from nanoserve.bench.session import Options, TerminatedError, unwinding_on_sigterm

EXPERIMENT = "load_agreement"
OURS, THEIRS = "nanoserve", "guidellm"
ORDER = (OURS, THEIRS, THEIRS, OURS)
PACE = paced_server.Pace(first_s=0.3, gap_s=0.04)
TOLERANCE = 0.05

PRIME_S = 2.0
"""guidellm builds its HTTP client while the first request waits. One is sent so long ahead of the
others, and not counted; else those of the first second would all go out at once."""

PATIENCE_S = 300.0
NUM_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One request as a generator tells of it; seconds since the schedule began.

    `start_s` is where its clock of the first token starts. Of the tokens between the first and the
    last one nothing is told by guidellm, so nothing is kept.
    """

    due_s: float
    sent_s: float
    start_s: float
    first_s: float
    last_s: float
    num_tokens: int
    num_prompt_tokens: int

    def times(self, start_s: float | None = None) -> RequestTimes:
        """With the clock of the generator, or started at `start_s`; tokens are put evenly."""
        step_s = (self.last_s - self.first_s) / max(1, self.num_tokens - 1)
        between = (self.first_s + number * step_s for number in range(self.num_tokens - 1))
        return RequestTimes(
            arrival_s=self.start_s if start_s is None else start_s,
            first_scheduled_s=self.sent_s,
            token_s=(*between, self.last_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one generator says of a server: medians in milliseconds, tokens a second.

    `num_prompt_tokens` is the mean of what the server counted.
    """

    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float
    num_prompt_tokens: float

    def differences(self, other: Seen) -> dict[str, float]:
        """Relative, of this against the other."""
        names = [field.name for field in fields(self)]
        return {name: ratio(getattr(self, name), getattr(other, name)) - 1 for name in names}


def seen(replies: Sequence[Reply]) -> Seen:
    times = [reply.times() for reply in replies]
    return Seen(
        ttft_ms=1e3 * statistics.median(map(ttft, times)),
        tpot_ms=1e3 * statistics.median(gap for t in times if (gap := tpot(t)) is not None),
        tokens_per_s=throughput_out(times),
        num_prompt_tokens=statistics.fmean(reply.num_prompt_tokens for reply in replies),
    )


def schedule_of(load: LoadOptions) -> Schedule:
    """When a load with a rate sends what."""
    assert load.rate is not None
    return make_load(load, load.rate)


def paced_truth(load: LoadOptions, pace: paced_server.Pace) -> Seen:
    """What is so of that load on the paced server."""
    due_s = [arrival.at_s for arrival in schedule_of(load).arrivals]
    return Seen(
        ttft_ms=1e3 * pace.first_s,
        tpot_ms=1e3 * pace.gap_s,
        tokens_per_s=pace.tokens_per_s(due_s, load.output_tokens),
        num_prompt_tokens=paced_server.count_prompt("word " * load.prompt_tokens),
    )


# --- the two generators ---------------------------------------------------------------------------


def run_program(command: Sequence[str], **env: str) -> None:
    """Raises RuntimeError, with all that it said, unless it ends with 0 and in time.

    However this is left, nothing of it runs on: it has a process group, for its workers' sake.
    """
    environment = {**child_environment(), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", **env}
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            said = "\n".join(process.communicate(timeout=PATIENCE_S))
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{command} did not end within {PATIENCE_S:g} s") from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}:\n{said}")


def load_words(load: LoadOptions) -> list[str]:
    """A load with a rate, as it is typed."""
    values = {
        "--url": load.url,
        "--process": load.process,
        "--rate": load.rate,
        "--requests": load.requests,
        "--prompt-tokens": load.prompt_tokens,
        "--output-tokens": load.output_tokens,
        "--seed": load.seed,
        "--out": load.out,
    }
    return [str(word) for pair in values.items() for word in pair]


def by_nanoserve(load: LoadOptions) -> list[Reply]:
    """By `bench arrivals --url`, in a process of its own, as it is on record."""
    run_program([sys.executable, "-m", "nanoserve.bench", "arrivals", *load_words(load)])
    findings = load_findings(read_runs(load_path(load))[0][-1])
    if len(findings.requests) < load.requests:
        raise RuntimeError(f"{OURS}: {dict(findings.problems)}")
    return replies_of(findings)


def replies_of(findings: LoadFindings) -> list[Reply]:
    """What our generator says of each request that was answered."""
    return [
        Reply(
            due_s=times.arrival_s,
            sent_s=times.first_scheduled_s,
            start_s=times.arrival_s,
            first_s=times.token_s[0],
            last_s=times.token_s[-1],
            num_tokens=len(times.token_s),
            num_prompt_tokens=num_prompt_tokens,
        )
        for times, num_prompt_tokens in zip(
            findings.requests, findings.num_prompt_tokens, strict=True
        )
    ]


def by_guidellm(load: LoadOptions) -> list[Reply]:
    """The same prompts at the same times by `guidellm`, as it says in its report.

    Now and then it loses a request on the way from its worker; then the whole load is sent again.
    """
    found: list[Reply] = []
    for _ in range(NUM_ATTEMPTS):
        report = guidellm_report(load)
        try:
            found = guidellm_replies(report)
        except (KeyError, TypeError) as error:
            raise RuntimeError(f"{THEIRS} reports in a form not known here: {error!r}") from error
        if len(found) == load.requests:
            return found
    raise RuntimeError(f"{THEIRS} tells of {len(found)} requests out of {load.requests}")


def guidellm_report(load: LoadOptions) -> Record:
    """All that it says of one load."""
    rows, report = load.out / "rows.jsonl", load.out / "guidellm.json"
    load.out.mkdir(parents=True, exist_ok=True)
    rows.write_text("".join(json.dumps(row) + "\n" for row in replay_rows(load)), encoding="utf-8")
    backend = {
        "kind": "openai_http",
        "target": load.url,
        "request_format": "/v1/completions",
        "extras": {"body": {"temperature": 0.0}},
    }
    run_program(
        [
            *(sys.executable, "-m", "guidellm", "run", "--disable-console"),
            *("--backend", json.dumps(backend)),
            *("--data", f"kind=json_file,path={rows}"),
            *("--profile", "kind=replay,schedule_turn=timestamp"),
            *("--constraint", f"kind=max_requests,count={load.requests + 1}"),
            *("--output", f"kind=json,path={report}"),
        ],
        GUIDELLM__MAX_WORKER_PROCESSES="1",  # each is a Python that imports torch
    )
    found: Record = json.loads(report.read_text(encoding="utf-8"))
    return found


def replay_rows(load: LoadOptions) -> list[Record]:
    """What guidellm replays: the load, after one request that is not counted."""
    schedule = schedule_of(load)
    bodies = make_bodies(schedule.lengths, "", str(load.seed), plain=False)
    due_s = [PRIME_S + arrival.at_s for arrival in schedule.arrivals]
    return [
        {"relative_timestamp": at_s, "prompt": prompt, "output_tokens_count": num_tokens}
        for at_s, prompt, num_tokens in [
            (0.0, "The first of all", 2),
            *((at_s, b["prompt"], b["max_tokens"]) for at_s, b in zip(due_s, bodies, strict=True)),
        ]
    ]


def guidellm_replies(report: Record) -> list[Reply]:
    """What it tells of all requests but the one that is not counted, in order."""
    (benchmark,) = report["benchmarks"]
    found = [guidellm_reply(request) for request in benchmark["requests"]["successful"]]
    return sorted((r for r in found if r.due_s > -PRIME_S / 2), key=lambda reply: reply.due_s)


def guidellm_reply(request: Record) -> Reply:
    """Its own figures: what it calls TTFT and, a mean per request, ITL (our TPOT)."""
    info, num_tokens = request["info"], request["output_tokens"]
    began_s = info["scheduler_start_time"] + PRIME_S
    sent_s = request["request_start_time"] - began_s
    first_s = sent_s + request["time_to_first_token_ms"] / 1e3
    return Reply(
        due_s=info["timings"]["targeted_start"] - began_s,
        sent_s=sent_s,
        start_s=sent_s,
        first_s=first_s,
        last_s=first_s + (num_tokens - 1) * request["inter_token_latency_ms"] / 1e3,
        num_tokens=num_tokens,
        num_prompt_tokens=request["prompt_tokens"],
    )


GENERATORS = {OURS: by_nanoserve, THEIRS: by_guidellm}

# --- a run ----------------------------------------------------------------------------------------


@contextmanager
def serving(options: Sequence[str]) -> Iterator[str]:
    """The URL of `nanoserve serve` by SERVER_PYTHON, ready. Raises VoidError if it is not."""
    python, port = os.environ.get("SERVER_PYTHON", sys.executable), free_port()
    command = [python, "-m", "nanoserve", "serve", "--port", str(port), *options]
    with served_by(command, port):
        yield f"http://{HOST}:{port}"


def server_options(given: argparse.Namespace) -> list[str]:
    """What both the record and the server are told."""
    values = {
        "--model": given.model,
        "--load-format": given.load_format,
        "--device": "cpu",
        "--executor": given.executor,
        "--threads": given.threads,
    }
    words = [str(word) for pair in values.items() for word in pair]
    return [*words, "--no-enable-prefix-caching"]


def at_half_load(given: argparse.Namespace, load: LoadOptions) -> Record:
    """Four loads on a server of ours, at a share of what a burst is measured to saturate."""
    words = server_options(given)
    with serving(words) as url:
        load = replace(load, url=url)
        target = parse_url(url)
        saturation = saturating_rate(target, load, served_model(target))
        load = replace(load, rate=given.load * saturation)
        print(f"saturation {saturation:.3g} requests/s, load {given.load:g}", file=sys.stderr)
        loads = apply_loads(load)
    return {
        "server": words,
        "saturation": saturation,
        "load": given.load,
        "schedule": schedule_of(load).to_json(),
        "loads": loads,
    }


def at_known_pace(given: argparse.Namespace, load: LoadOptions) -> Record:
    """The same on a server whose times are known."""
    with paced_server.running(PACE) as url:
        load = replace(load, url=url, rate=given.rate)
        loads = apply_loads(load)
    return {
        "server": "paced",
        "truth": asdict(paced_truth(load, PACE)),
        "schedule": schedule_of(load).to_json(),
        "loads": loads,
    }


def apply_loads(load: LoadOptions) -> list[Record]:
    """All four, one after the other; each says on standard error that it is done."""
    loads = []
    for name in ORDER:
        replies = GENERATORS[name](load)
        print(f"{name}: {seen(replies)}", file=sys.stderr)
        loads.append({"generator": name, "replies": [recorded(reply) for reply in replies]})
    return loads


def recorded(reply: Reply) -> Record:
    """To the microsecond."""
    return {name: round(value, 6) for name, value in asdict(reply).items()}


def check_given(given: argparse.Namespace) -> None:
    """Raise ValueError for what would be refused only after a server was started, or not at all."""
    if not 0 < given.load < float("inf"):
        raise ValueError(f"--load must be more than 0 and finite, got {given.load:g}")
    if given.threads < 1:
        raise ValueError(f"--threads must be at least 1, got {given.threads}")
    if given.output_tokens < 2:
        raise ValueError(
            f"--output-tokens must be at least 2, got {given.output_tokens}: one token has no TPOT"
        )


def measure(given: argparse.Namespace) -> Record:
    """One run, as recorded. Raises ValueError for a wrong request, before anything is started."""
    check_given(given)
    check_out(Options(out=given.out))
    fingerprint, started, their_version = machine.fingerprint(), timestamp(), version(THEIRS)
    with tempfile.TemporaryDirectory() as folder:
        load = LoadOptions(
            url="",
            rate=given.rate,
            saturating=given.saturating,
            requests=given.requests,
            prompt_tokens=given.prompt_tokens,
            output_tokens=given.output_tokens,
            seed=given.seed,
            out=Path(folder),
        )
        found = (at_known_pace if given.paced else at_half_load)(given, load)
    return {
        "started": started,
        "machine_id": machine.machine_id(fingerprint),
        "machine": fingerprint,
        THEIRS: their_version,
        **found,
    }


# --- the record -----------------------------------------------------------------------------------


def record_path(out: Path) -> Path:
    return out / machine.slug() / f"{EXPERIMENT}.json"


def read_record(path: Path) -> Record:
    """What was recorded so far; without runs if there is nothing.

    Raises ValueError for a file that is anything else, so that it is neither shown nor replaced.
    """
    if not path.exists():
        return {"schema": SCHEMA, "experiment": EXPERIMENT, "runs": []}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON ({error}): move it away") from None
    if not isinstance(found, dict) or found.get("experiment") != EXPERIMENT:
        raise ValueError(f"{path.name} is no record of {EXPERIMENT}: move it away")
    if found.get("schema") != SCHEMA:
        raise ValueError(
            f"{path.name} has schema {found.get('schema')}, this version reads {SCHEMA}"
        )
    if not isinstance(runs := found.get("runs"), list) or not all(map(is_whole, runs)):
        raise ValueError(f"{path.name} holds runs that are not whole: move it away")
    return found


def is_whole(run: Record) -> bool:
    """Whether a run has what `show` reads: a server, and two loads of each generator, all alike."""
    try:
        loads = [load for name in GENERATORS for load in loads_of(run, name)]
        words = [run["server"]] if isinstance(run["server"], str) else [*run["server"]]
        numbers = [run["truth"]["ttft_ms"]] if words == ["paced"] else []
    except (KeyError, TypeError):
        return False
    numbers += [number for load in loads for reply in load for number in asdict(reply).values()]
    sizes = [len(load) for load in loads]
    return (
        sizes == [max(1, *sizes)] * len(ORDER)
        and all(isinstance(word, str) for word in words)
        and all(isinstance(number, int | float) for number in numbers)
    )


def append_run(path: Path, run: Record) -> Record:
    """The record with one more run, written whole or not at all."""
    record = read_record(path)
    record["runs"].append(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_bytes(encode(record))
    new.replace(path)
    return record


# --- what it says ---------------------------------------------------------------------------------

Values = list[float]
"""Of one load: one a request, or one for all."""


def of_each(value: Callable[[Reply], float]) -> Callable[[Sequence[Reply]], Values]:
    return lambda replies: [value(reply) for reply in replies]


METRICS: dict[str, Callable[[Sequence[Reply]], Values]] = {
    "TTFT, ms, by its own clock": of_each(lambda reply: 1e3 * ttft(reply.times())),
    "TTFT, ms, since it was due": of_each(lambda reply: 1e3 * ttft(reply.times(reply.due_s))),
    "TTFT, ms, since it was sent": of_each(lambda reply: 1e3 * ttft(reply.times(reply.sent_s))),
    "TPOT, ms": of_each(lambda reply: 1e3 * (tpot(reply.times()) or 0.0)),
    "output tokens/s": lambda replies: [throughput_out([reply.times() for reply in replies])],
}
HEADLINES = ("TTFT, ms, by its own clock", "TPOT, ms", "output tokens/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One metric over some runs: medians of all loads, and ratios of partners.

    `pairs` are ours over guidellm's, of the two first and the two last loads of each run; `equal`
    are one load over the other of the same generator, so what they spread over is noise.
    """

    ours: float
    theirs: float
    pairs: tuple[float, ...]
    equal: tuple[float, ...]

    @property
    def difference(self) -> float:
        """Relative, of the medians."""
        return ratio(self.ours, self.theirs) - 1


def ratio(value: float, other: float) -> float:
    """`value` over `other`. Tokens that came in one piece are 0 apart: two such are equal."""
    if other == 0:
        return 1.0 if value == 0 else math.inf
    return value / other


def ratios(values: Values, others: Values) -> list[float]:
    return [ratio(value, other) for value, other in zip(values, others, strict=True)]


def agreement(runs: Sequence[Record], values_of: Callable[[Sequence[Reply]], Values]) -> Agreement:
    """Of all of these runs, which must be of one server."""
    ours, theirs, pairs, equal = [], [], [], []
    for run in runs:
        first, last = (values_of(replies) for replies in loads_of(run, OURS))
        their_first, their_last = (values_of(replies) for replies in loads_of(run, THEIRS))
        ours += first + last
        theirs += their_first + their_last
        pairs += ratios(first, their_first) + ratios(last, their_last)
        equal += ratios(last, first) + ratios(their_last, their_first)
    return Agreement(
        ours=statistics.median(ours),
        theirs=statistics.median(theirs),
        pairs=tuple(pairs),
        equal=tuple(equal),
    )


def ratio_text(values: Sequence[float]) -> str:
    """Median, and its 95 % interval where there are enough of them."""
    interval = median_interval(values)
    middle = f"{statistics.median(values):.3f}"
    return middle if interval is None else f"{middle} [{interval.low:.3f}, {interval.high:.3f}]"


def table(runs: Sequence[Record]) -> Table:
    """A row a metric."""
    heads = ["", OURS, THEIRS, "apart", "ratio of a pair [95 %]", "of equals [95 %]"]
    rows = []
    for name, values_of in METRICS.items():
        found = agreement(runs, values_of)
        numbers = [f"{found.ours:.2f}", f"{found.theirs:.2f}", f"{found.difference:+.1%}"]
        rows.append([name, *numbers, ratio_text(found.pairs), ratio_text(found.equal)])
    return heads, rows


def loads_of(run: Record, generator: str) -> list[list[Reply]]:
    """The two of one generator, in order."""
    return [
        [Reply(**reply) for reply in load["replies"]]
        for load in run["loads"]
        if load["generator"] == generator
    ]


def late_ms(runs: Sequence[Record], generator: str) -> float:
    """Median of how long after its time each request was sent."""
    replies = [reply for run in runs for load in loads_of(run, generator) for reply in load]
    return 1e3 * statistics.median(reply.sent_s - reply.due_s for reply in replies)


def conclusion(runs: Sequence[Record]) -> str:
    """What it comes to, in sentences."""
    num_requests = sum(len(load["replies"]) for run in runs for load in run["loads"])
    worst = max(abs(agreement(runs, METRICS[name]).difference) for name in HEADLINES)
    verdict = "They agree" if worst <= TOLERANCE else "They do NOT agree"
    late = ", ".join(f"{late_ms(runs, name):.2f} by {name}" for name in GENERATORS)
    apart = f"TTFT, TPOT and throughput are {worst:.1%} apart at most"
    text = (
        f"{num_requests} requests in {len(runs)} runs, sent late by (median, ms) {late}. "
        f"{verdict} within {TOLERANCE:.0%}: {apart}."
    )
    return text if runs[0]["server"] != "paced" else f"{text} {truth_text(runs)}"


def truth_text(runs: Sequence[Record]) -> str:
    """What each generator adds to times that are known."""
    found = agreement(runs, METRICS[HEADLINES[0]])
    truth_ms = runs[0]["truth"]["ttft_ms"]
    return (
        f"The first token came after {truth_ms:g} ms: {OURS} adds {found.ours - truth_ms:.2f} ms, "
        f"{THEIRS} {found.theirs - truth_ms:.2f} ms."
    )


def by_server(record: Record) -> dict[str, list[Record]]:
    """The runs of each server, in order, named as it was started."""
    found: dict[str, list[Record]] = {}
    for run in record["runs"]:
        words = run["server"]
        found.setdefault(words if isinstance(words, str) else " ".join(words), []).append(run)
    return found


def show(record: Record) -> None:
    """On standard output, server by server."""
    if not record["runs"]:
        print("nothing is recorded yet", file=sys.stderr)
    for server, runs in by_server(record).items():
        heads, rows = table(runs)
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        print(f"\n{server}")
        for row in (heads, *rows):
            print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        print(conclusion(runs))


# --- the command ----------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--model", default="gpt2")
    made.add_argument("--load-format", default="dummy", help="dummy: random weights")
    made.add_argument("--executor", default="native")
    made.add_argument("--threads", type=int, default=1, help="of the server: one core stays free")
    made.add_argument("--load", type=float, default=0.5, help="share of what saturates it")
    made.add_argument("--saturating", type=int, default=32, help="requests of that burst")
    made.add_argument("--requests", type=int, default=40, help="of each of the four loads")
    made.add_argument("--prompt-tokens", type=int, default=64, help="words")
    made.add_argument("--output-tokens", type=int, default=16)
    made.add_argument("--seed", type=int, default=0, help="of prompts and times")
    made.add_argument("--paced", action="store_true", help="against times that are known")
    made.add_argument("--rate", type=float, default=8.0, help="requests a second, if --paced")
    made.add_argument("--show", action="store_true", help="measure nothing")
    made.add_argument("--out", type=Path, default=Path("results"), metavar="DIR")
    return made


def main() -> int:
    """Measure one run, record it, and show all that are recorded.

    1 if there is nothing to show, 2 for a wrong request or a record that cannot be added to, 130
    for Ctrl-C, 143 for SIGTERM.
    """
    given = parser().parse_args()
    path = record_path(given.out)
    try:
        record = read_record(path)  # before minutes of measuring
        if not given.show:
            with unwinding_on_sigterm():
                record = append_run(path, measure(given))
    except ValueError as error:
        return complain(error, 2)
    except (OSError, RuntimeError, PackageNotFoundError) as error:
        return complain(error, 1)
    except KeyboardInterrupt:
        return complain("interrupted; nothing was recorded", 130)
    except TerminatedError:
        return complain("terminated; nothing was recorded", 143)
    show(record)
    return 0 if record["runs"] else 1


def complain(why: object, code: int) -> int:
    """On standard error; the code."""
    print(f"load_agreement: {why}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
