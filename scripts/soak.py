"""Mixed traffic against a real server for minutes on end: nothing lost, no 5xx, memory flat.

    python scripts/soak.py                  # ten minutes
    python scripts/soak.py --minutes 0.5    # what CI runs

Starts `nanoserve serve`, and clients beside it that stream, wait, walk away, send nonsense, send
long prompts and, now and then, come all at once. Every request must end as it should: an answer
that is whole and right, a 400 for nonsense, a 429 (with the time to wait) beyond the queue. One
seeded request comes again and again and must always say the same. At the end the gauges are 0, the
books balance, and SIGTERM in the middle of a stream ends it in order. Only the standard library is
needed here; exit code 0 means that nothing was found.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NUM_SLOTS = 8
MAX_QUEUE = 16
BURST = 48
BURST_EVERY_S = 10.0
PATIENCE_S = 60.0
MAX_GROWTH_BYTES = 24 << 20
SEEDED = {"prompt": "Once upon a time", "seed": 41, "max_tokens": 24, "top_p": 0.9}
WORDS = ("the", "sea", "was", "calm", "and", "an", "old", "man", "went", "down", "to", "his boat")
NONSENSE: tuple[Any, ...] = (
    b"",
    b"{",
    b"[]",
    b"[" * 50_000,
    {"model": "mini"},
    {"model": "mini", "prompt": []},
    {"model": "mini", "prompt": [-1]},
    {"model": "mini", "prompt": [2**40]},
    {"model": "mini", "prompt": "x", "n": 0},
    {"model": "mini", "prompt": "x", "temperature": -1},
    {"model": "mini", "prompt": "x", "stop": [""]},
    {"model": "mini", "prompt": "x", "logit_bias": {"x": 1}},
    {"model": "mini", "prompt": "x " * 4000},
)


class Problem(Exception):
    """Something that must not happen."""


class RefusedError(Exception):
    """429: come again after so many seconds."""

    def __init__(self, after_s: float) -> None:
        super().__init__(f"429, {after_s} s")
        self.after_s = after_s


def expect(holds: object, words: str) -> None:
    if not holds:
        raise Problem(words)


@dataclass(slots=True)
class Ledger:
    """What every request came to."""

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, outcome: str) -> None:
        with self.lock:
            self.outcomes[outcome] += 1

    def complain(self, words: str) -> None:
        with self.lock:
            self.problems.append(words)

    def run(self, name: str, traffic: Callable[[], str]) -> None:
        """One request (or burst), whose outcome is noted whatever it is."""
        try:
            self.note(f"{name}: {traffic()}")
        except RefusedError as refused:
            self.note(f"{name}: 429")
            time.sleep(min(refused.after_s, 2.0))
        except (Problem, OSError, http.client.HTTPException, ValueError, KeyError) as error:
            self.note(f"{name}: PROBLEM")
            self.complain(f"{name}: {type(error).__name__}: {error}")


class Client:
    """Requests to one server, each on a connection of its own."""

    def __init__(self, port: int, seed: int) -> None:
        self.port = port
        self.dice = random.Random(seed)

    @contextmanager
    def answer(
        self, method: str, path: str, body: object = None
    ) -> Iterator[http.client.HTTPResponse]:
        """The response, not read yet; leaving closes the connection, read or not."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            with response:
                yield response
        finally:
            connection.close()

    def get(self, path: str) -> tuple[int, bytes]:
        with self.answer("GET", path) as response:
            return response.status, response.read()

    def body(self, **fields: Any) -> dict[str, Any]:
        """A completion that asks for something ordinary."""
        dice = self.dice
        return {
            "model": "mini",
            "prompt": " ".join(dice.choices(WORDS, k=dice.randint(1, 40))),
            "max_tokens": dice.randint(1, 64),
            "temperature": dice.choice((0, 0.7, 1)),
            "n": dice.choice((1, 1, 1, 2, 3)),
            "stop": dice.choice((None, [" king", "."], "zzz")),
            **fields,
        }

    def plain(self) -> str:
        body = self.body()
        with self.answer("POST", "/v1/completions", body) as response:
            answer = read_answer(response)
        expect(len(answer["choices"]) == body["n"], f"{len(answer['choices'])} choices")
        for choice in answer["choices"]:
            expect(choice["finish_reason"] in ("stop", "length"), str(choice))
        num_tokens = answer["usage"]["completion_tokens"]
        expect(1 <= num_tokens <= body["n"] * body["max_tokens"], f"usage {answer['usage']}")
        return "whole"

    def seeded(self) -> str:
        with self.answer("POST", "/v1/completions", {"model": "mini", **SEEDED}) as response:
            return str(read_answer(response)["choices"][0]["text"])

    def streamed(self) -> str:
        body = self.body(stream=True, stream_options={"include_usage": True})
        path = "/v1/completions"
        if self.dice.random() < 0.5:
            path = "/v1/chat/completions"
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        with self.answer("POST", path, body) as response:
            check_status(response)
            events = list(read_events(response))
        ends = Counter(
            choice["index"]
            for event in events
            for choice in event["choices"]
            if choice["finish_reason"]
        )
        expect(ends == Counter(range(body["n"])), f"finish chunks by index: {dict(ends)}")
        expect(events[-1]["choices"] == [], "no usage chunk at the end")
        return "whole"

    def leaving(self) -> str:
        """Reads a little of a long answer, and goes."""
        stream = self.dice.random() < 0.7
        body = self.body(stream=stream, max_tokens=900, ignore_eos=True, stop=None)
        if not stream:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
            connection.request("POST", "/v1/completions", json.dumps(body).encode())
            time.sleep(self.dice.random() * 0.2)
            connection.close()
            return "left"
        with self.answer("POST", "/v1/completions", body) as response:
            check_status(response)
            for _ in range(self.dice.randint(0, 12)):
                response.readline()
        return "left"

    def nonsense(self) -> str:
        with self.answer("POST", "/v1/completions", self.dice.choice(NONSENSE)) as response:
            error = json.loads(response.read())["error"]
            if response.status == 429:
                raise RefusedError(0.1)
            expect(response.status == 400, f"{response.status}: {error}")
            expect(set(error) == {"message", "type", "param", "code"}, f"error shape {error}")
        return "400"

    def lengthy(self) -> str:
        prompt = [self.dice.randrange(4000) for _ in range(self.dice.randint(500, 1000))]
        body = self.body(prompt=prompt, max_tokens=8, n=1, stop=None)
        with self.answer("POST", "/v1/completions", body) as response:
            answer = read_answer(response)
        expect(answer["usage"]["prompt_tokens"] == len(prompt), f"usage {answer['usage']}")
        return "whole"

    def burst(self) -> str:
        """More at once than slots and queue hold: some are refused at once, the others served."""
        ledger = Ledger()
        clients = [Client(self.port, self.dice.randrange(2**32)) for _ in range(BURST)]
        threads = [
            threading.Thread(target=ledger.run, args=("burst", client.plain)) for client in clients
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expect(not ledger.problems, "; ".join(ledger.problems[:3]))
        expect(ledger.outcomes["burst: 429"] > 0, f"nobody was refused: {ledger.outcomes}")
        expect(ledger.outcomes["burst: whole"] > 0, f"nobody was served: {ledger.outcomes}")
        return f"{BURST} at once"


def check_status(response: http.client.HTTPResponse) -> None:
    """Raise RefusedError for a 429 that says when to come back, Problem for all else but 200."""
    if response.status == 429:
        after_s = float(response.headers["retry-after"])
        after_ms = float(response.headers["retry-after-ms"])
        expect(0 < after_ms <= 1000 * after_s <= 120_000, f"retry-after {after_s} s, {after_ms} ms")
        raise RefusedError(after_ms / 1000)
    expect(response.status == 200, f"status {response.status}")


def read_answer(response: http.client.HTTPResponse) -> dict[str, Any]:
    check_status(response)
    answer: dict[str, Any] = json.loads(response.read())
    return answer


def read_events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream, which must end by `[DONE]` and hold no error."""
    for line in response:
        if line == b"data: [DONE]\n":
            expect(response.read() == b"\n", "something follows [DONE]")
            return
        if line.startswith(b"data: "):
            event = json.loads(line.removeprefix(b"data: "))
            expect("error" not in event, f"an error in the stream: {event}")
            yield event
    raise Problem("the stream was cut off before [DONE]")


def memory_of(pid: int) -> int:
    """Anonymous memory of a process, in RAM and swapped out, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB", status, re.MULTILINE)
    return 1024 * sum(map(int, found))


def start_server(port: int, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "nanoserve", "serve", "--model", "mini", "--device", "cpu"]
    command += ["--port", str(port), "--max-num-seqs", str(NUM_SLOTS)]
    command += ["--max-queue", str(MAX_QUEUE), "--shutdown-timeout", "2"]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


def wait_until_healthy(client: Client, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        expect(process.poll() is None, f"the server ended with {process.returncode}")
        try:
            if client.get("/health")[0] == 200:
                return
        except ConnectionError:
            pass
        time.sleep(0.1)
    raise Problem("the server never got ready")


def keep_asking(client: Client, ledger: Ledger, expected: str, until_s: float) -> None:
    """One client: one request after another, of all kinds."""

    def seeded() -> str:
        text = client.seeded()
        expect(text == expected, f"the seeded request said {text!r}, at first {expected!r}")
        return "the same"

    kinds: dict[str, tuple[Callable[[], str], float]] = {
        "plain": (client.plain, 4),
        "streamed": (client.streamed, 6),
        "leaving": (client.leaving, 3),
        "nonsense": (client.nonsense, 2),
        "lengthy": (client.lengthy, 1),
        "seeded": (seeded, 2),
    }
    weights = [weight for _, weight in kinds.values()]
    while time.monotonic() < until_s:
        (name,) = client.dice.choices(list(kinds), weights)
        ledger.run(name, kinds[name][0])


def keep_watching(client: Client, ledger: Ledger, pid: int, until_s: float) -> None:
    """Once a second: is it healthy, and how much memory has it? Bursts come from here, too."""
    next_burst_s = time.monotonic() + BURST_EVERY_S / 2
    while time.monotonic() < until_s:
        ledger.run("health", lambda: str(client.get("/health")[0]))
        ledger.memory_bytes.append(memory_of(pid))
        if time.monotonic() > next_burst_s:
            ledger.run("burst", client.burst)
            next_burst_s += BURST_EVERY_S
        time.sleep(1.0)


def soak(process: subprocess.Popen[bytes], port: int, options: argparse.Namespace) -> Ledger:
    ledger = Ledger()
    first = Client(port, options.seed)
    expected = first.seeded()
    until_s = time.monotonic() + 60 * options.minutes
    clients = [Client(port, options.seed + 1 + number) for number in range(options.clients)]
    threads = [
        threading.Thread(target=keep_asking, args=(client, ledger, expected, until_s))
        for client in clients
    ]
    threads.append(
        threading.Thread(target=keep_watching, args=(first, ledger, process.pid, until_s))
    )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ledger


def check_idle(client: Client) -> str:
    """Nothing runs, nothing waits, no block is in use, and the books balance."""
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    deadline = time.monotonic() + 5
    while True:
        text = client.get("/metrics")[1].decode()
        values = {
            name: float(re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)[0])
            for name in gauges
        }
        if not any(values.values()):
            break
        expect(time.monotonic() < deadline, f"not idle: {values}")
        time.sleep(0.05)
    status, body = client.get("/debug/invariants")
    expect(status == 200, f"/debug/invariants: {status} {body!r}")
    responses = re.findall(r'^nanoserve:http_responses_total{.*status="(5\d\d)".*} (\S+)', text)
    expect(not any(float(count) for _, count in responses), f"5xx: {responses}")
    return "idle"


def check_memory(memory_bytes: list[int]) -> str:
    """From the middle of the run on, memory does not grow."""
    num = len(memory_bytes)
    middle = statistics.median(memory_bytes[int(0.4 * num) : int(0.6 * num)])
    end = statistics.median(memory_bytes[int(0.8 * num) :])
    words = f"{middle / 2**20:.1f} MiB in the middle, {end / 2**20:.1f} MiB at the end"
    expect(end - middle <= MAX_GROWTH_BYTES, f"memory grows: {words}")
    return words


def check_farewell(client: Client, process: subprocess.Popen[bytes]) -> str:
    """SIGTERM in the middle of a stream: it ends in order, and the exit code is 0."""
    body = client.body(stream=True, max_tokens=1000, ignore_eos=True, stop=None, n=8)
    with client.answer("POST", "/v1/completions", body) as response:
        check_status(response)
        response.readline()
        process.send_signal(signal.SIGTERM)
        lines = [line for line in response if line.startswith(b"data: ")]
    expect(lines[-1] == b"data: [DONE]\n", f"the stream ends by {lines[-1]!r}")
    expect(process.wait(30) == 0, f"exit code {process.returncode}")
    return "in order"


def report(ledger: Ledger) -> None:
    for outcome, count in sorted(ledger.outcomes.items()):
        print(f"{count:8}  {outcome}")
    for words, count in Counter(ledger.problems).most_common(20):
        print(f"PROBLEM ({count}x)  {words}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    client = Client(port, options.seed)
    with tempfile.TemporaryDirectory(prefix="nanoserve-soak-") as folder:
        log = Path(folder) / "server.log"
        process = start_server(port, log)
        try:
            wait_until_healthy(client, process)
            ledger = soak(process, port, options)
            ledger.run("afterwards", lambda: check_idle(client))
            ledger.run("memory", lambda: check_memory(ledger.memory_bytes))
            ledger.run("farewell", lambda: check_farewell(client, process))
        finally:
            process.kill()
            process.wait()
        if "Traceback" in log.read_text(errors="replace"):
            ledger.complain(f"the server logged a traceback:\n{log.read_text()[-4000:]}")
    report(ledger)
    return 1 if ledger.problems else 0


if __name__ == "__main__":
    sys.exit(main())
