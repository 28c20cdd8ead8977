"""Faults that real servers and engines had, asked of this one over HTTP.

Each test carries the number of its report. Reports that concern the engine or the model alone are
tested there:

    B12  positions after the window slid             test_engine.py
    B32  the usage chunk as real clients parse it    tests/clients (its shape: S06 in test_wire.py)
    B36  half precision over the whole context       test_model.py, test_kv.py (a NaN row: here)
    B49  closing a generator                         test_llm.py
    B50  checkpoints of every layout                 test_weights.py, test_hub.py

Not built, so not tested: B37 (an int8 cache) and B38 (CUDA graphs).
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from server_fixture import (
    EOS,
    NUM_POSITIONS,
    VOCAB_SIZE,
    Gate,
    Server,
    answered,
    concurrently,
    gpt2_tokenizer,
    ids_of,
    mini_engine,
    running,
    scripted_engine,
    serve,
    strict_json,
    wait_until,
)

from nanoserve import LLM
from nanoserve.request import SamplingParams

REPLACEMENT = "\ufffd"
NUM_SLOTS = 4
MAX_QUEUE = 8


@pytest.fixture(scope="module")
def stub() -> Iterator[Server]:
    budget = 128  # the default, whatever `bench` may have found on this machine
    engine = scripted_engine(max_num_seqs=32, max_num_batched_tokens=budget)
    with serve(engine, max_queue=600) as server:
        yield server


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """Four slots, and a queue of eight."""
    engine = scripted_engine(max_num_seqs=NUM_SLOTS)
    with serve(engine, max_queue=MAX_QUEUE) as server:
        yield server


@pytest.fixture(scope="module")
def mini() -> Iterator[Server]:
    with serve(mini_engine(max_num_seqs=32), served_model_name="mini") as server:
        yield server


def texts_of(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def streamed_texts(server: Server, **fields: Any) -> list[str]:
    return [choice["text"] for event in server.events(**fields) for choice in event["choices"]]


@pytest.mark.parametrize("text", [" 你好 😀 🫠!", " 😀", "🫠\U000e0041x"])
def test_B01_no_chunk_holds_half_a_character(stub: Server, text: str) -> None:
    prompt = f"B01 你好 😀 🫠 {len(text)}"
    stub.say(prompt, text)
    for echo in (False, True):
        plain = stub.complete(prompt=prompt, echo=echo, max_tokens=60)
        pieces = streamed_texts(stub, prompt=prompt, echo=echo, max_tokens=60)
        assert texts_of(plain) == [(prompt if echo else "") + text]
        assert "".join(pieces) == texts_of(plain)[0]
        assert not [piece for piece in pieces if REPLACEMENT in piece]
    stub.say("B01 cut", ids_of(" 😀")[:-1])  # what the plain answer shows, the stream shows too
    plain = stub.complete(prompt="B01 cut")
    assert REPLACEMENT in texts_of(plain)[0]
    assert "".join(streamed_texts(stub, prompt="B01 cut")) == texts_of(plain)[0]


def test_B03_a_stop_string_over_several_tokens(stub: Server) -> None:
    letters = [f" {letter}" for letter in "LMNOPQRST"]
    assert ids_of(" O P Q")[-2:] == [350, 1195]
    stub.say("A B C D E F G H I J K", "".join(letters))
    for stop in ("O P Q", ["O P Q"], ["P Q R S T U", "O P Q"]):
        answer = stub.complete(prompt="A B C D E F G H I J K", stop=stop)
        assert texts_of(answer) == [" L M N "]
        assert answer["choices"][0]["finish_reason"] == "stop"
    stub.say("B03 bare", [46, 350, 1195])
    assert texts_of(stub.complete(prompt="B03 bare", stop="O P Q")) == [""]


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"prompt": ["B05 a", "B05 b"]}])
def test_B05_a_client_that_leaves_a_stream_frees_everything(
    stub: Server, fields: dict[str, Any]
) -> None:
    stub.executor.step_s = 0.01
    try:
        asked = {"prompt": "B05 noise", "max_tokens": 900, "ignore_eos": True, **fields}
        with stub.stream(**asked) as stream:
            for _ in range(3):
                assert stream.next_event()
            assert stub.num_unfinished > 0
        stub.assert_idle(within_s=1.0)
    finally:
        stub.executor.step_s = 0.0


@pytest.mark.parametrize("fields", [{}, {"n": 2}])
def test_B05_a_client_that_does_not_wait_for_a_plain_answer(
    small: Server, fields: dict[str, Any]
) -> None:
    small.executor.step_s = 0.01
    aborted = small.metric("vllm:request_success_total", finished_reason="abort")
    try:
        asked = {"model": "stub", "prompt": "B05 noise", "max_tokens": 900, **fields}
        streams = [small.open("POST", "/v1/completions", asked) for _ in range(6)]
        wait_until(lambda: small.num_unfinished >= 6, 5, "they were not all accepted")
        for stream in streams:  # some run, some wait
            stream.close()
        small.assert_idle(within_s=1.0)
        ended = small.metric("vllm:request_success_total", finished_reason="abort") - aborted
        assert ended >= 6
        assert small.metric("nanoserve:disconnects_total") >= 6
    finally:
        small.executor.step_s = 0.0


def test_B05_a_departure_frees_within_one_step(stub: Server) -> None:
    with stub.held() as gate:
        stream = stub.stream(prompt="B05 step", max_tokens=900)
        gate.grant(3)
        for _ in range(3):
            assert stream.next_event()
        wait_until(lambda: gate.num_blocked == 1, 5, "the fourth step was not begun")
        disconnects = stub.metric("nanoserve:disconnects_total")
        stream.close()
        wait_until(
            lambda: stub.metric("nanoserve:disconnects_total") == disconnects + 1,
            1.0,
            "nobody noticed that the client left",
        )
        gate.grant(1)  # the step it was in; there must be no other
        stub.assert_idle(within_s=1.0)
        assert gate.num_blocked == 0


@pytest.mark.parametrize("num_clients", [120, pytest.param(500, marks=pytest.mark.slow)])
def test_B08_clients_that_leave_at_random_moments(stub: Server, num_clients: int) -> None:
    dice = random.Random(8)
    stub.executor.step_s = 0.001
    asked = {"prompt": "B08 noise", "max_tokens": 50}
    before = resident_bytes()
    for number in range(num_clients):
        fields = {**asked, "n": dice.choice((1, 1, 3)), "stream": dice.random() < 0.5}
        stream = stub.open("POST", "/v1/completions", {"model": "stub", **fields})
        time.sleep(dice.random() * 0.02 if number % 2 else 0.0)
        stream.close()
    stub.executor.step_s = 0.0
    stub.assert_idle(within_s=5.0)
    started = time.monotonic()
    assert stub.complete(prompt="B08 normal", max_tokens=5)["usage"]["completion_tokens"] == 5
    assert time.monotonic() - started < 1.0
    assert resident_bytes() - before < 32 << 20


def resident_bytes() -> int:
    """Anonymous memory of this process, in RAM and swapped out."""
    status = Path("/proc/self/status").read_text()
    lines = dict(line.split(":", 1) for line in status.splitlines())
    return 1024 * sum(int(lines[name].split()[0]) for name in ("RssAnon", "VmSwap"))


def test_B09_a_list_gives_what_its_prompts_give_alone(mini: Server) -> None:
    story = "Once upon a time there lived in a certain village a little country girl. " * 8
    token_ids = answered(mini.post("/tokenize", {"model": "mini", "prompt": story}))["tokens"]
    prompts = [token_ids[:length] for length in (1, 2, 7, 16, 17, 48, 100)]
    asked = {"temperature": 0, "max_tokens": 12, "logprobs": 1, "echo": True}
    together = mini.complete(prompt=prompts, **asked)["choices"]
    for prompt, choice in zip(prompts, together, strict=True):
        (alone,) = mini.complete(prompt=prompt, **asked)["choices"]
        assert choice["text"] == alone["text"]
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(
            alone["logprobs"]["token_logprobs"][1:], abs=1e-4
        )


def test_B10_the_last_position(mini: Server) -> None:
    answer = mini.complete(prompt=[7] * 1000, max_tokens=100, ignore_eos=True, temperature=0)
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["choices"][0]["finish_reason"] == "length"
    assert mini.complete(prompt="Once", max_tokens=3)["usage"]["completion_tokens"] == 3


def test_B13_an_empty_prompt_hurts_nobody(stub: Server) -> None:
    stub.say([EOS], " from nothing")
    stub.say("B13", " fine")
    assert texts_of(stub.complete(prompt=[""])) == [" from nothing"]
    assert texts_of(stub.complete(prompt="B13")) == [" fine"]
    assert stub.completion(prompt=[[]]).status == 400
    assert texts_of(stub.complete(prompt="B13")) == [" fine"]


def test_B15_prompt_log_probabilities_are_the_models(mini: Server) -> None:
    llm = LLM("mini", device="cpu", max_num_seqs=1)
    texts = ["The sea was calm and the wind", "Once upon a time there was a king."]
    prompts = [llm.tokenizer.encode_prompt(text) for text in texts]
    payload = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
    choices = mini.complete(prompt=prompts, **payload)["choices"]
    for prompt, choice in zip(prompts, choices, strict=True):
        found = choice["logprobs"]["token_logprobs"]
        assert len(found) == len(prompt) + 1
        scored = [entry.logprob for entry in llm.score(prompt) if entry is not None]
        assert found[1:-1] == pytest.approx(scored, abs=1e-4)
        assert sum(found[1:-1]) == pytest.approx(sum(scored), abs=1e-4)
        assert sum(found[1:-1]) < -5  # a model at chance or at certainty would say nothing here


def test_B16_temperatures_next_to_nothing(stub: Server) -> None:
    asked = {"prompt": "B16 noise", "max_tokens": 3, "seed": 1}
    greedy = texts_of(stub.complete(**asked, temperature=0))
    tiny = (0, 1e-9, 1e-4)
    for temperature in tiny:
        for top_p in (*tiny, 1):
            for top_k in (0, 1, -1, VOCAB_SIZE + 1):
                fields: dict[str, float] = {
                    "temperature": temperature,
                    "top_p": top_p,
                    "top_k": top_k,
                }
                assert texts_of(stub.complete(**asked, **fields)) == greedy, fields
    for only_best in ({"top_p": 0}, {"top_p": 1e-9}, {"top_k": 1}):
        assert texts_of(stub.complete(**asked, temperature=1, **only_best)) == greedy, only_best


# Logits of the eager executor differ in the last bits between batch shapes. Without the tail, where
# each of thousands of tokens weighs less than that, a draw hardly ever falls between two of them.
STORY = {"prompt": "Once upon a time", "seed": 77, "max_tokens": 24, "top_p": 0.9}


def test_B17_a_seed_holds_among_neighbours_without_one(stub: Server, mini: Server) -> None:
    for server, asked in ((stub, {**STORY, "top_p": 1}), (mini, STORY)):
        alone = texts_of(server.complete(**asked))
        other = partial(server.complete, prompt="The sea", max_tokens=40)
        answers = concurrently([*[other] * 4, partial(server.complete, **asked), *[other] * 4])
        assert texts_of(answers[4]) == alone
        assert len({answer["choices"][0]["text"] for answer in answers}) == 9


def test_B18_a_seed_gives_one_text_whatever_the_load_and_the_cache(mini: Server) -> None:
    opening = "In a far country, where nobody had ever seen a ship, there lived an old man who "
    asked = {**STORY, "prompt": opening}
    cold = texts_of(mini.complete(**asked))
    hits = mini.metric("vllm:prefix_cache_hits_total")
    warm = texts_of(mini.complete(**asked))
    assert mini.metric("vllm:prefix_cache_hits_total") > hits, "the prefix was not found again"
    other = partial(mini.complete, prompt="The old man", max_tokens=24)
    crowd = [partial(other, seed=seed) for seed in range(31)]
    crowded = texts_of(concurrently([*crowd, partial(mini.complete, **asked)])[-1])
    assert cold == warm == crowded


def test_B18_a_seed_gives_one_text_after_preemption(mini: Server) -> None:
    asked = {**STORY, "max_tokens": 90, "ignore_eos": True}
    alone = texts_of(mini.complete(**asked))
    token_bytes = 2 * 4 * 256 * 4  # K and V, layers, width, float32
    engine = mini_engine(
        max_num_seqs=4, max_model_len=128, kv_cache_memory_bytes=token_bytes * 16 * 12
    )
    with serve(engine, served_model_name="mini") as server:
        answers = concurrently([partial(server.complete, **asked)] * 4)
        assert server.metric("vllm:num_preemptions_total") > 0, "nothing was preempted"
        assert [texts_of(answer) for answer in answers] == 4 * [alone]
        server.assert_idle()


@pytest.mark.parametrize("prompt", [[VOCAB_SIZE], [4294967294], [2**40], [-1], [[5], [VOCAB_SIZE]]])
def test_B21_ids_outside_the_vocabulary(stub: Server, prompt: list[Any]) -> None:
    error = stub.completion(prompt=prompt).error(400)
    assert error["param"] == "prompt"
    assert str(VOCAB_SIZE - 1) in error["message"] or "from 0 on" in error["message"]
    for path in ("/detokenize",):
        assert stub.post(path, {"model": "stub", "tokens": [VOCAB_SIZE]}).status == 400


def test_B23_text_offsets_of_a_stream(stub: Server) -> None:
    prompt = "B23 你好 then"
    stub.say(prompt, " a 😀 b, and so on")
    asked = {"prompt": prompt, "echo": True, "logprobs": 2}
    plain = stub.complete(**asked)["choices"][0]["logprobs"]
    offsets = [
        offset
        for event in stub.events(**asked)
        for choice in event["choices"]
        if choice["logprobs"]
        for offset in choice["logprobs"]["text_offset"]
    ]
    assert offsets == plain["text_offset"]
    assert offsets[len(ids_of(prompt))] == len(prompt)


@pytest.mark.slow
def test_B26_memory_over_2000_requests(small: Server) -> None:
    dice = random.Random(26)

    def ask() -> None:
        prompt = [dice.randrange(VOCAB_SIZE) for _ in range(8)]
        fields = {"prompt": prompt, "max_tokens": 4, "user": str(dice.random())}
        assert small.completion(**fields).status == 200

    used = {}
    for number in range(1, 2001):
        ask()
        if number in (500, 2000):
            used[number] = resident_bytes()
    assert used[2000] - used[500] < 4 << 20  # the log of finished requests is full long before
    small.assert_idle()


def test_B27_a_bounded_queue(small: Server) -> None:
    refused_before = small.metric("nanoserve:refused_requests_total")
    asked = {"prompt": "B27 noise", "max_tokens": 4}
    with small.held() as gate:
        started = time.monotonic()
        streams = [small.stream(**asked) for _ in range(30)]
        wait_until(
            lambda: sum(stream.has_answer() for stream in streams) == 18, 5, "not 18 were refused"
        )
        assert time.monotonic() - started < 2.0
        refusals = [stream for stream in streams if stream.has_answer()]
        replies = [stream.reply() for stream in refusals]
        assert small.get("/health").status == 200
        gate.open()
        for stream in streams:
            if stream not in refusals:
                assert sum(len(event["choices"]) for event in stream) >= 4
                assert stream.is_done
            stream.close()
    for reply in replies:
        assert reply.error(429)["code"] == "rate_limit_exceeded"
        assert 0 < float(reply.headers["retry-after"]) <= 120
        assert 0 < float(reply.headers["retry-after-ms"]) <= 120_000
    assert small.metric("nanoserve:refused_requests_total") - refused_before == 18
    small.assert_idle()


def test_B28_sizes_are_bounded(small: Server) -> None:
    error = small.completion(prompt="x", n=100_000).error(400)
    assert (error["param"], "128" in error["message"]) == ("n", True)
    error = small.completion(prompt=["x"] * 10_000).error(400)
    assert error["param"] == "prompt"
    assert "10000" in error["message"]
    error = small.completion(prompt=["x"] * 2_000, n=128).error(400)
    assert error["param"] == "n"
    asked = {"prompt": [[7] * 1000] * 200, "echo": True, "max_tokens": 1}
    error = small.completion(**asked, logprobs=64).error(400)
    assert error["param"] == "logprobs"
    assert str(200 * 1001 * 65) in error["message"]
    many = small.complete(prompt="B28 noise", n=128, max_tokens=2, seed=1)
    assert many["usage"]["completion_tokens"] == 256
    assert len({choice["text"] for choice in many["choices"]}) > 100
    small.assert_idle()


def test_B28_log_probabilities_are_bounded_where_the_context_is_not() -> None:
    with serve(scripted_engine(max_num_seqs=1, context_overflow="slide")) as server:
        endless = {"prompt": "x", "max_tokens": 10**9}
        error = server.completion(**endless, logprobs=0).error(400)
        assert error["param"] == "logprobs"
        with server.stream(**endless, ignore_eos=True) as stream:
            assert [stream.next_event() is None for _ in range(3)] == [False] * 3
        server.assert_idle(within_s=2.0)


def test_B28_a_body_of_50_megabytes(small: Server) -> None:
    small.post("/v1/completions", data=b"{", headers={"Content-Length": str(50 << 20)}).error(413)
    chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", small.port), timeout=10) as raw:
        raw.sendall(head.encode())
        for _ in range((8 << 20) // 0x4000):
            raw.sendall(chunk)
        raw.sendall(chunk[:100])  # over the limit, and no end in sight
        answer = raw.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert small.get("/live").status == 200


def test_B29_long_prompts_do_not_stall_a_stream(stub: Server) -> None:
    """Time is counted in steps: each gives the stream a token, however long the prompts are."""
    with stub.held() as gate, stub.stream(prompt="B29 noise", max_tokens=60) as stream:
        gate.grant(1)
        assert stream.next_event()
        others = [stub.stream(prompt=[7 + i] * 900, max_tokens=1) for i in range(4)]
        num_steps = 0
        while not all(other.has_answer() for other in others):
            gate.grant(1)
            num_steps += 1
            assert num_steps < 59, "the long prompts were never done"
            assert stream.next_event(), "a step went by without a token of the stream"
            wait_until(lambda: gate.num_blocked == 1, 5, "the next step was not begun")
        gate.open()
        for other in others:
            other.close()
    assert num_steps > 4, "the prompts were not cut into chunks"


def test_B31_each_choice_finishes_once(stub: Server) -> None:
    (yes,) = ids_of(" yes")
    asked = {"n": 3, "seed": 5, "max_tokens": 40, "logit_bias": {str(EOS): 45, str(yes): 27}}
    plain = stub.complete(prompt="B31", **asked)
    lengths = {len(text) for text in texts_of(plain)}
    assert len(lengths) == 3, "choices of one length prove nothing"
    messages = [{"role": "user", "content": "B31"}]
    for fields in ({"prompt": "B31"}, {"messages": messages}):
        events = stub.events(**fields, **asked)
        chunks = [choice for event in events for choice in event["choices"]]
        for index in range(3):
            reasons = [c["finish_reason"] for c in chunks if c["index"] == index]
            assert reasons.count(None) == len(reasons) - 1
            assert reasons[-1] == plain["choices"][index]["finish_reason"]


STOPS: list[Any] = [" c", [" c"], [], None, [f"{i:03}" for i in range(63)] + [" c"]]


def test_B33_forms_of_stop(stub: Server) -> None:
    stub.say("B33", " a b c d")
    for stop in STOPS:
        expected = " a b" if stop else " a b c d"
        assert texts_of(stub.complete(prompt="B33", stop=stop)) == [expected]
    assert texts_of(stub.complete(prompt="B33", stop=["z" * 10_000])) == [" a b c d"]
    for bad in ([""], "", ["x"] * 65, ["z" * 10_001], ["z" * 10_000, "y" * 10_000, "x"]):
        error = stub.completion(prompt="B33", stop=bad).error(400)
        assert error["param"].startswith("stop")


def test_B33_64_stops_cost_next_to_nothing(stub: Server) -> None:
    """In CPU time of this process, which holds client, server and engine: no clock wavers less."""
    stops = [f" never {number}" for number in range(63)] + ["y" * 10_000]
    asked = {"prompt": "B33 noise", "max_tokens": 60, "seed": 1}
    assert texts_of(stub.complete(**asked, stop=stops)) == texts_of(stub.complete(**asked))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(4):
        for stopped in (True, False):
            started = time.process_time()
            stub.complete(**asked, stop=stops if stopped else None)
            seconds[stopped].append(time.process_time() - started)
    assert min(seconds[True]) < 1.25 * min(seconds[False])


def test_B35_control_tokens_are_not_typed(stub: Server) -> None:
    spelt, plain = "<|endoftext|>", [27, 91, 437, 1659, 5239, 91, 29]
    asked = {"model": "stub", "prompt": spelt}
    assert answered(stub.post("/tokenize", asked))["tokens"] == [EOS]
    assert stub.complete(prompt=spelt, max_tokens=1)["usage"]["prompt_tokens"] == 1
    stub.say(plain, " harmless")
    answer = stub.chat(spelt)
    assert answer["choices"][0]["message"]["content"] == " harmless"
    assert answer["usage"]["prompt_tokens"] == len(plain)
    parts = [{"role": "user", "content": [{"type": "text", "text": spelt}]}]
    assert stub.chat(parts)["usage"]["prompt_tokens"] == len(plain)


def test_B35_only_the_template_makes_control_tokens() -> None:
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    with serve(scripted_engine(max_num_seqs=1), chat_template=template) as server:
        answer = server.chat("a<|endoftext|>b", max_tokens=1)
        plain = gpt2_tokenizer().encode("a<|endoftext|>b", parse_special=False)
        assert answer["usage"]["prompt_tokens"] == len(plain) + 1


def test_B36_a_broken_row_fails_its_request_only(stub: Server) -> None:
    stub.say("B36 good", " a b c")
    stub.executor.broken.add(tuple(ids_of("B36 bad")))
    rows = stub.metric("nanoserve:broken_rows_total")
    good, bad = concurrently(
        [
            lambda: stub.complete(prompt="B36 good"),
            lambda: stub.completion(prompt="B36 bad", stream=False),
        ]
    )
    assert texts_of(good) == [" a b c"]
    error = bad.error(500)
    assert bad.headers["x-request-id"] in error["message"]
    assert stub.metric("nanoserve:broken_rows_total") == rows + 1
    assert stub.metric("vllm:request_success_total", finished_reason="error") >= 1
    stub.assert_idle()


def test_B36_a_broken_choice_among_others(stub: Server) -> None:
    stub.executor.broken.add(tuple(ids_of("B36 half")))
    reply = stub.completion(prompt=["B36 half", "B36 good"], n=2)
    error = reply.error(500)
    assert reply.headers["x-request-id"] in error["message"]
    with stub.stream(prompt="B36 half") as stream:
        stream.reply().error(500)
    stub.assert_idle()


def test_B36_a_failed_step_takes_its_requests_and_no_other(stub: Server) -> None:
    stub.say("B36 later", " a b c")
    failed_steps = stub.metric("nanoserve:failed_steps_total")
    with stub.held() as gate:
        lost = stub.open("POST", "/v1/completions", {"model": "stub", "prompt": ["x", "y"]})
        wait_until(lambda: gate.num_blocked == 1, 5, "no step was begun")
        later = stub.open("POST", "/v1/completions", {"model": "stub", "prompt": "B36 later"})
        stub.executor.fails = 1
        gate.open()
        with lost, later:
            reply = lost.reply()
            assert reply.headers["x-request-id"] in reply.error(500)["message"]
            assert texts_of(answered(later.reply())) == [" a b c"]
    assert stub.metric("nanoserve:failed_steps_total") == failed_steps + 1
    stub.assert_idle()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert isinstance(port, int)
        return port


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "nanoserve", "serve", "--model", "mini", "--shutdown-timeout", "2", "--port"],
        ["-m", "uvicorn", "nanoserve.server:app", "--port"],
    ],
    ids=["nanoserve serve", "uvicorn"],
)
def test_B41_sigterm_lets_streams_end(command: list[str], tmp_path: Path) -> None:
    """One short stream ends well, one long one is told; whoever comes now gets 503."""
    port = free_port()
    environment = {**os.environ, "NANOSERVE_MODEL": "mini", "NANOSERVE_SHUTDOWN_TIMEOUT": "2"}
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(
        [sys.executable, *command, str(port)], env=environment, stdout=log, stderr=log
    )
    server = Server(None, port, model="mini")
    try:
        wait_until(lambda: is_healthy(server), 60, "the server never got ready")
        asked = {"prompt": "Once upon a time", "ignore_eos": True}
        with (
            server.stream(**asked, max_tokens=40) as short,
            server.stream(**asked, max_tokens=1000, n=16) as lengthy,
        ):
            assert short.next_event()
            assert lengthy.next_event()
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: is_refusing(server), 5, "it still takes requests")
            *_, last = list(short)
            assert last["choices"][0]["finish_reason"] == "length"
            *_, last = list(lengthy)
            assert set(last) == {"error"}
            assert lengthy.is_done
        assert process.wait(20) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        log.close()
    assert b"Traceback" not in (tmp_path / "log").read_bytes()


def is_healthy(server: Server) -> bool:
    try:
        return server.get("/health").status == 200
    except ConnectionError:
        return False


def is_refusing(server: Server) -> bool:
    """Whether a new request is told so; a listener that is shut tells it in its way."""
    try:
        reply = server.completion(prompt="x", max_tokens=1)
    except ConnectionError:
        return True
    return reply.status == 503


def test_B42_ready_means_warm() -> None:
    engine = scripted_engine(max_num_seqs=2)
    executor = engine.executor
    executor.gate.hold()  # type: ignore[attr-defined]
    executor.first_step_s = 0.4  # type: ignore[attr-defined]
    with running(engine) as server:
        gate: Gate = server.executor.gate
        wait_until(lambda: gate.num_blocked == 1, 10, "no warm-up was begun")
        assert server.get("/health").error(503)
        assert server.get("/live").status == 200
        gate.grant(1)  # one is not enough: a request went through the engine, too
        gate.open()
        wait_until(lambda: is_healthy(server), 10, "the server never got ready")
        assert (server.executor.num_warm_ups, server.executor.num_steps > 0) == (1, True)
        times = []
        for _ in range(5):
            started = time.perf_counter()
            server.complete(prompt="B42 noise", max_tokens=1)
            times.append(time.perf_counter() - started)
        assert times[0] < 0.3, "the first request paid for the set-up"


def test_B44_a_doubled_slash_and_any_key(stub: Server) -> None:
    for path in ("/v1//models", "//v1/models", "/v1/models/"):
        assert answered(stub.get(path))["data"][0]["id"] == "stub", path
    for key in ("", "Bearer ", "Bearer sk-no-key-required", "Basic eA=="):
        assert stub.get("/v1/models", headers={"Authorization": key}).status == 200


def test_B47_chat_on_a_base_model(stub: Server) -> None:
    stub.say("B47 hello", " good day")
    answer = stub.chat("B47 hello")
    assert answer["choices"][0]["message"]["content"] == " good day"


def test_B48_finish_reasons_and_log_probabilities_are_never_missing(stub: Server) -> None:
    stub.say("B48", " a b")
    messages = [{"role": "user", "content": "B48"}]
    for fields in ({"prompt": "B48"}, {"messages": messages}):
        for event in stub.events(**fields, n=2):
            for choice in event["choices"]:
                assert choice["finish_reason"] in (None, "stop")
                assert "logprobs" in choice
    for answer in (stub.complete(prompt="B48"), stub.chat("B48")):
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert "logprobs" in answer["choices"][0]


def test_chat_in_python_says_what_chat_over_http_says(mini: Server) -> None:
    llm = LLM("mini", device="cpu", max_num_seqs=1)
    messages = [
        {"role": "system", "content": "A story."},
        {"role": "user", "content": "Once upon a time"},
    ]
    over_http = mini.chat(messages, max_tokens=24, seed=4)
    (output,) = llm.chat(messages, SamplingParams(max_tokens=24, seed=4))
    assert output.outputs[0].text == over_http["choices"][0]["message"]["content"]


def test_positions_are_exhausted_by_exactly_the_context(stub: Server) -> None:
    for num_tokens in (1, NUM_POSITIONS - 1):
        answer = stub.complete(prompt=[7] * num_tokens, max_tokens=5_000)
        assert answer["usage"]["total_tokens"] == NUM_POSITIONS
    assert strict_json(stub.get("/version").body)
