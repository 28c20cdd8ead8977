"""`bench arrivals --url`: an open-loop load for any OpenAI-compatible server.

The process that is started sends and does nothing else, so a server on the same machine has its own
interpreter. Prompts are words, since nothing is known of the server's vocabulary; how many tokens
they were, and how many came, is what its usage says. Results are JSON lines like those of the
experiments, a record a request, without address, key or text.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, get_args

from nanoserve.bench import machine
from nanoserve.bench.arrivals import (
    DEFAULT_CV,
    Process,
    Schedule,
    TracePart,
    make_schedule,
    trace_part,
)
from nanoserve.bench.conduct import timestamp
from nanoserve.bench.findings.load import LoadFindings, load_findings
from nanoserve.bench.record import SCHEMA, Journal, Record, Run
from nanoserve.bench.sender import Sent, Target, fetch, parse_url, send_all
from nanoserve.bench.timed_stream import read_body
from nanoserve.bench.traces import Length, TraceName

URL_OPTION = "--url"
WORDS = (
    "a about after all and are as at be but by can day do down each find first for from go good "
    "had has have he her him his how if in into is it its like long look made make many may more "
    "my no not now of on one or other out over people said see she so some than that the them then "
    "there these they this time to two up use very was water way we were what when which who will "
    "with word would you your"
)
"""Short and common: near to a token each with most vocabularies."""

FETCH_S = 30.0
WINDOW = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What was typed. Either `rate`, in requests a second, or `load`, a share of saturation.

    `plain`: only what OpenAI's own documents name is sent, so answers may end early and the times
    of single tokens may not be known. Times are in seconds.
    """

    url: str
    model: str | None = None
    rate: float | None = None
    load: float | None = None
    saturating: int = 64
    requests: int = 100
    process: Process = "poisson"
    cv: float = DEFAULT_CV
    prompt_tokens: int = 64
    output_tokens: int = 32
    trace: TraceName | None = None
    divisor: int = 4
    seed: int = 0
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    api_key_env: str = "OPENAI_API_KEY"
    timeout: float = 300.0
    plain: bool = False
    out: Path = Path("results")

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.load is None):
            raise ValueError("say how much: --rate (requests a second) or --load (of saturation)")
        for option in ("saturating", "requests", "prompt_tokens", "output_tokens", "divisor"):
            check_positive(option, getattr(self, option), 1)
        for option in ("rate", "load", "cv", "timeout", "slo_ttft_ms", "slo_tpot_ms"):
            value = getattr(self, option)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{dashed(option)} must be more than 0 and finite, got {value:g}")
        if self.process == "trace" and self.trace is None:
            raise ValueError("--process trace replays a trace: name it with --trace-name")


def dashed(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def check_positive(option: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{dashed(option)} must be at least {least}, got {value}")


# --- what is asked --------------------------------------------------------------------------------


def lengths_part(options: LoadOptions, count: int) -> TracePart:
    """Where the lengths come from: a trace, or all alike."""
    if options.trace is not None:
        return trace_part(options.trace, WINDOW, divisor=options.divisor)
    length = Length(prompt=options.prompt_tokens, output=options.output_tokens)
    return TracePart(
        name="conv",
        transform=f"{length.prompt} words + {length.output} tokens each",
        lengths=(length,) * count,
        times_s=(),
    )


def prompt_text(num_words: int, seed: str) -> str:
    """Words that no other request begins with, so that no cache of prefixes helps."""
    generator, words = random.Random(seed), WORDS.split()
    return " ".join(generator.choice(words) for _ in range(num_words))


def make_bodies(
    lengths: Sequence[Length], model: str, salt: str, *, plain: bool
) -> list[dict[str, Any]]:
    """Greedy streamed completions."""
    more: dict[str, Any] = {} if plain else {"ignore_eos": True}
    usage = {"include_usage": True} | ({} if plain else {"continuous_usage_stats": True})
    return [
        {
            "model": model,
            "prompt": prompt_text(length.prompt, f"{salt}:{number}"),
            "max_tokens": length.output,
            "temperature": 0.0,
            "stream": True,
            "stream_options": usage,
            **more,
        }
        for number, length in enumerate(lengths)
    ]


def served_model(target: Target) -> str:
    """The first model that the server lists. Raises ValueError if it lists none."""
    body = read_body(fetch(target, "models", FETCH_S))
    try:
        if body is None or body.status != 200:
            raise ValueError
        return str(json.loads(body.content)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        status = "no HTTP" if body is None else f"status {body.status}"
        raise ValueError(
            f"the server does not list its models ({status}): name one with --model"
        ) from None


# --- sending --------------------------------------------------------------------------------------


def saturating_rate(target: Target, options: LoadOptions, model: str) -> float:
    """Requests a second that come out when all are sent at once.

    Raises ValueError if none is answered.
    """
    lengths = lengths_part(options, options.saturating).first(options.saturating)
    bodies = make_bodies(lengths, model, f"saturating:{options.seed}", plain=options.plain)
    sent = send_all(target, bodies, [0.0] * len(bodies), options.timeout)
    ends = [each.answer.token_s[-1] for each in sent if not each.answer.problem]
    if not ends:
        raise ValueError(f"the server answers nothing: {sent[0].answer.problem}")
    return len(ends) / max(ends)


def make_load(options: LoadOptions, rate: float) -> Schedule:
    """The schedule that was asked for."""
    part = lengths_part(options, options.requests)
    return make_schedule(
        options.process, part, options.requests, rate, cv=options.cv, seed=options.seed
    )


def apply_load(
    options: LoadOptions, say: Callable[[str], None] = lambda remark: None
) -> LoadFindings:
    """Send everything, record it, and conclude.

    Raises ValueError for a wrong request, OSError for a server that cannot be reached.
    """
    target = parse_url(options.url, os.environ.get(options.api_key_env) or None)
    model = options.model or served_model(target)
    saturation = None
    if options.load is not None:
        say(f"saturating the server with {options.saturating} requests at once")
        saturation = saturating_rate(target, options, model)
    rate = options.rate or (options.load or 0.0) * (saturation or 0.0)
    schedule = make_load(options, rate)
    span_s = schedule.arrivals[-1].at_s
    say(f"sending {options.requests} requests over {span_s:.0f} s, {rate:.4g} a second")
    bodies = make_bodies(schedule.lengths, model, str(options.seed), plain=options.plain)
    due_s = [arrival.at_s for arrival in schedule.arrivals]
    sent = send_all(target, bodies, due_s, options.timeout)
    header = make_header(options, target, model, schedule, saturation)
    return load_findings(keep(options, header, sent))


def make_header(
    options: LoadOptions, target: Target, model: str, schedule: Schedule, saturation: float | None
) -> Record:
    """Who sent what, when; nothing that says where the server is."""
    fingerprint = machine.fingerprint()
    started = timestamp()
    return {
        "kind": "run",
        "schema": SCHEMA,
        "experiment": "load",
        "name": options.process,
        "machine_id": machine.machine_id(fingerprint),
        "run": f"{started}-{secrets.token_hex(3)}",
        "started": started,
        "model": model.rpartition("/")[2],
        "server": "local" if target.is_local else "remote",
        "saturation": saturation,
        "load": options.load,
        "plain": options.plain,
        "slo": {
            "ttft_s": in_seconds(options.slo_ttft_ms),
            "tpot_s": in_seconds(options.slo_tpot_ms),
        },
        "schedule": schedule.to_json(),
        "setup": {"machine": fingerprint, "quick": False},
    }


def in_seconds(value_ms: float | None) -> float | None:
    return None if value_ms is None else value_ms / 1e3


def load_path(options: LoadOptions) -> Path:
    """Loads have a file for each process; every run is appended."""
    return options.out / machine.slug() / f"load-{options.process}.jsonl"


def keep(options: LoadOptions, header: Record, sent: Sequence[Sent]) -> Run:
    """Write the whole run; as it is read back."""
    named = {name: header[name] for name in ("schema", "experiment", "name", "run", "machine_id")}
    records = [request_record(number, each, named) for number, each in enumerate(sent)]
    end = {"kind": "end", **named, "status": "complete", "ended": timestamp()}
    with Journal(load_path(options)) as journal:
        journal.append([header, *records, end])
    return Run(header=header, records=(*records, end))


def request_record(number: int, sent: Sent, named: Mapping[str, Any]) -> Record:
    """One request: times in seconds since the schedule began, and what the usage counted."""
    answer = sent.answer
    return {
        "kind": "request",
        **named,
        "number": number,
        "due_s": sent.due_s,
        "sent_s": sent.sent_s,
        "status": answer.status,
        "problem": answer.problem,
        "token_s": [round(at_s, 7) for at_s in answer.token_s],
        "num_prompt_tokens": answer.num_prompt_tokens,
        "is_exact": answer.is_exact,
    }


# --- the command ----------------------------------------------------------------------------------


class LoadParser(argparse.ArgumentParser):
    """argparse, with errors as one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """The options of `bench arrivals --url`, their defaults from `LoadOptions`."""
    made = LoadParser(
        prog="nanoserve bench arrivals",
        description="An open-loop load for any OpenAI-compatible server (/v1/completions).",
        allow_abbrev=False,
    )
    default = LoadOptions(url="", rate=1.0)
    made.add_argument("name", choices=["arrivals"], help=argparse.SUPPRESS)
    made.add_argument(URL_OPTION, required=True, help="as http://host:port")
    made.add_argument("--model", help="default: the first that the server lists")
    made.add_argument("--rate", type=float, help="requests a second")
    made.add_argument("--load", type=float, help="share of what a burst is measured to saturate")
    made.add_argument("--saturating", type=int, default=default.saturating, help="of that burst")
    made.add_argument("--requests", type=int, default=default.requests)
    made.add_argument("--process", choices=get_args(Process), default=default.process)
    made.add_argument("--cv", type=float, default=default.cv, help="of gamma gaps")
    made.add_argument("--prompt-tokens", type=int, default=default.prompt_tokens)
    made.add_argument("--output-tokens", type=int, default=default.output_tokens)
    made.add_argument(
        "--trace-name", dest="trace", choices=get_args(TraceName), help="lengths of a real trace"
    )
    made.add_argument("--divisor", type=int, default=default.divisor, help="of those lengths")
    made.add_argument("--seed", type=int, default=default.seed)
    made.add_argument("--slo-ttft-ms", type=float, help="objective for goodput")
    made.add_argument("--slo-tpot-ms", type=float, help="objective for goodput")
    made.add_argument("--api-key-env", default=default.api_key_env, metavar="NAME")
    made.add_argument("--timeout", type=float, default=default.timeout, help="seconds a request")
    made.add_argument(
        "--plain", action="store_true", help="send nothing that OpenAI does not document"
    )
    made.add_argument("--out", type=Path, default=default.out, metavar="DIR")
    return made


def is_load(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for a load on a server instead of an experiment."""
    return any(word.partition("=")[0] == URL_OPTION for word in arguments)


def read_options(arguments: Sequence[str]) -> LoadOptions:
    """What was typed. Raises ValueError, or ends with code 2 for what argparse refuses."""
    given = vars(parser().parse_args(arguments))
    given.pop("name")
    return replace(LoadOptions(url="", rate=1.0), **given)
