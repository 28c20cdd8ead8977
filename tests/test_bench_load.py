"""The open-loop load: bytes to token times, sending on schedule, what is concluded; and traces."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import greedy, prompt_of, tiny_engine
from server_fixture import scripted_engine, serve

from nanoserve.bench import load, runner
from nanoserve.bench.findings.load import lag_text, load_findings, load_paragraph, load_table
from nanoserve.bench.load import LoadOptions, apply_load
from nanoserve.bench.record import read_runs
from nanoserve.bench.sender import parse_url, send_all
from nanoserve.bench.timed_stream import Piece, read_timed
from nanoserve.bench.trace_events import Recorder, slot_tracks, trace_events

# --- bytes and their times ------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(text: str | None = None, total: int | None = None, **more: Any) -> bytes:
    """One event; `total` is its usage so far, None for an event without usage."""
    chunk: dict[str, Any] = {"choices": [] if text is None else [{"text": text}], **more}
    if total is not None:
        chunk["usage"] = {"completion_tokens": total, "prompt_tokens": 7}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def chunked(*events: bytes) -> list[bytes]:
    return [f"{len(e):x}\r\n".encode() + e + b"\r\n" for e in events]


def timed(*parts: bytes) -> list[Piece]:
    """A piece a second."""
    return [Piece(float(at_s), data) for at_s, data in enumerate(parts)]


DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"


def test_an_event_has_come_when_its_line_has() -> None:
    first, second, usage, done = chunked(event("a"), event("b"), event(total=2), DONE)
    answer = read_timed(timed(HEAD + first, second[:9], second[9:], usage + done + LAST))
    assert answer.problem == ""
    assert answer.token_s == (0.0, 2.0)
    assert answer.is_exact
    assert answer.num_prompt_tokens == 7


def test_tokens_are_counted_by_usage_and_never_by_events() -> None:
    counted = chunked(event("a", 1), event("", 2), event("bcd", 5), event(total=5), DONE)
    answer = read_timed(timed(HEAD, *counted, LAST))
    assert answer.token_s == (1.0, 2.0, 3.0, 3.0, 3.0)
    assert answer.is_exact
    untold = chunked(event("a"), event("bcd"), event(total=5), DONE)
    answer = read_timed(timed(HEAD, *untold, LAST))
    assert answer.token_s == (1.0, 1.25, 1.5, 1.75, 2.0)
    assert not answer.is_exact


def test_a_body_without_chunks_is_read_as_well() -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    answer = read_timed(timed(head, event("a"), event(total=1), DONE))
    assert (answer.problem, answer.token_s) == ("", (1.0,))


@pytest.mark.parametrize(
    "parts, problem",
    [
        ([], "no answer"),
        ([b"SSH-2.0\r\n\r\n"], "no HTTP response"),
        ([b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"], "status 503"),
        ([HEAD, *chunked(event("a", 1))], "the stream broke off"),
        ([HEAD, *chunked(event(error={"message": "x"}), DONE), LAST], "an error in the stream"),
        ([HEAD, *chunked(event("a"), DONE), LAST], "no usage"),
        ([HEAD, *chunked(event(total=0), DONE), LAST], "no token"),
        ([HEAD, *chunked(b"data: {\n\n", DONE), LAST], "no stream of completion events"),
        ([HEAD, *chunked(b"data: [1]\n\n", DONE), LAST], "no stream of completion events"),
    ],
)
def test_what_is_wrong_with_an_answer_is_said(parts: Sequence[bytes], problem: str) -> None:
    assert read_timed(timed(*parts)).problem == problem


# --- addresses and options ------------------------------------------------------------------------


def test_an_address_may_have_a_path_and_may_end_in_v1() -> None:
    target = parse_url("https://example.invalid/api/v1/", "secret")
    assert (target.host, target.port, target.base) == ("example.invalid", 443, "/api")
    assert target.is_secure
    assert not target.is_local
    assert b"GET /api/v1/models HTTP/1.1\r\n" in target.request("GET", "models")
    assert b"Authorization: Bearer secret" in target.request("GET", "models")
    assert "secret" not in repr(target)
    assert parse_url("http://[::1]:8000").is_local
    assert b"Host: [::1]:8000" in parse_url("http://[::1]:8000").request("GET", "models")


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x", "http://", "http://x:port", "http://x/?a=1", "http://u@x"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="--url"):
        parse_url(url)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ((), "say how much: --rate"),
        (("--rate", "1", "--load", "0.5"), "say how much: --rate"),
        (("--rate", "0"), "--rate must be more than 0"),
        (("--rate", "1", "--requests", "0"), "--requests must be at least 1, got 0"),
        (("--rate", "1", "--process", "trace"), "name it with --trace-name"),
        (("--rate", "1", "--slo-ttft-ms", "-1"), "--slo-ttft-ms must be more than 0"),
    ],
)
def test_a_load_that_makes_no_sense_is_one_line(
    arguments: Sequence[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.main(["arrivals", "--url", "http://127.0.0.1:9", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line


@pytest.mark.parametrize(
    "arguments", [["kvcache", "--url=x"], ["arrivals", "--url", "x", "--quick"]]
)
def test_options_of_experiments_are_none_of_a_load(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        runner.main(arguments)
    assert ended.value.code == 2


# --- sending --------------------------------------------------------------------------------------


@contextmanager
def answering(reply: Callable[[int], bytes | None]) -> Iterator[str]:
    """A server whose n-th connection gets `reply(n)`, None: nothing, for ever; its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []

    def run() -> None:
        for number in range(10_000):
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.settimeout(5)
            content = reply(number)
            if content is None:
                held.append(connection)
                continue
            connection.recv(65_536)
            connection.sendall(content)
            connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)
        for connection in held:
            connection.close()


WHOLE = HEAD + b"".join(chunked(event("a", 1), event("b", 2), event(total=2), DONE)) + LAST


def test_a_failed_request_counts_among_those_offered(tmp_path: Path) -> None:
    replies = [WHOLE, b"HTTP/1.1 503 Busy\r\n\r\n", None, WHOLE]
    with answering(lambda number: replies[number]) as url:
        options = LoadOptions(
            url=url,
            model="m",
            rate=40.0,
            requests=4,
            process="constant",
            timeout=0.4,
            slo_ttft_ms=1000.0,
            out=tmp_path,
        )
        findings = apply_load(options)
    assert findings.num_offered == 4
    assert findings.num_failed == 2
    assert set(findings.problems) == {"status 503", "no whole answer within 0.4 s"}
    good = findings.good
    assert good is not None
    assert good.share == 0.5
    text = load_paragraph(findings)
    assert "2 were answered" in text
    assert "1 x status 503" in text
    (path,) = tmp_path.glob("*/load-constant.jsonl")
    (run,) = read_runs(path)[0]
    assert run.is_complete
    assert load_findings(run) == findings
    assert url.rpartition(":")[2] not in path.read_text()


def test_a_slow_server_is_asked_no_later_for_it() -> None:
    """No coordinated omission: requests go out on time though none has been answered."""
    with answering(lambda number: None) as url:
        sent = send_all(parse_url(url), [{}] * 5, [0.0, 0.05, 0.1, 0.15, 0.2], 0.3)
    assert [each.due_s for each in sent] == [0.0, 0.05, 0.1, 0.15, 0.2]
    for each in sent:
        assert each.answer.problem
        assert each.lag_s is not None
        assert 0 <= each.lag_s < 0.1


def test_a_server_that_is_not_there_is_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert runner.main(["arrivals", "--url", url, "--rate", "1"]) == 1
    assert "no connection (ConnectionRefusedError)" in capsys.readouterr().err


def test_a_load_on_our_own_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_TEST", "sk-1")
    with serve(
        scripted_engine(max_num_seqs=4), headers={"Authorization": "Bearer sk-1"}, api_key="sk-1"
    ) as server:
        url = f"http://127.0.0.1:{server.port}"
        arguments = ["arrivals", "--url", url, "--out", str(tmp_path), "--requests", "8"]
        arguments += ["--prompt-tokens", "5", "--output-tokens", "4", "--load", "0.5"]
        arguments += ["--saturating", "6", "--process", "gamma"]
        assert runner.main([*arguments, "--api-key-env", "OF_THE_TEST"]) == 0
        generated = server.metric("vllm:generation_tokens_total")
        assert generated == pytest.approx((8 + 6) * 4, abs=3)  # and a warm-up
        assert runner.main([*arguments[:-4], "--api-key-env", "NO_SUCH"]) == 2  # no models listed
    captured = capsys.readouterr()
    assert "8 were answered" in " ".join(captured.out.split())
    (path,) = tmp_path.glob("*/load-gamma.jsonl")
    findings = load_findings(read_runs(path)[0][-1])
    assert {len(request.token_s) for request in findings.requests} == {4}
    assert findings.gaps is not None
    assert len(findings.gaps) == 8 * 3
    heads, rows = load_table(findings)
    assert [row[0] for row in rows] == ["TTFT", "TPOT", "ITL", "E2E"]
    assert all(row[heads.index("p90")] == "-" for row in rows)  # 36 are needed
    assert "sk-1" not in path.read_text()


def test_a_sender_that_lags_is_warned_of(tmp_path: Path) -> None:
    with answering(lambda number: WHOLE) as url:
        options = LoadOptions(
            url=url, model="m", rate=20.0, requests=3, process="constant", out=tmp_path
        )
        run = apply_load(options).run
    for lag_s, warned in ((0.0001, False), (0.01, True)):
        records = tuple(
            {**r, "sent_s": r["due_s"] + lag_s} if r["kind"] == "request" else r
            for r in run.records
        )
        text = lag_text(load_findings(type(run)(header=run.header, records=records)))
        assert ("WARNING" in text) is warned


def test_prompts_share_no_beginning_and_are_the_same_for_a_seed() -> None:
    lengths = [load.Length(prompt=6, output=2)] * 3
    bodies = load.make_bodies(lengths, "m", "1", plain=True)
    assert len({body["prompt"] for body in bodies}) == 3
    assert {len(body["prompt"].split()) for body in bodies} == {6}
    assert bodies == load.make_bodies(lengths, "m", "1", plain=True)
    assert "ignore_eos" not in bodies[0]
    assert load.make_bodies(lengths, "m", "1", plain=False)[0]["ignore_eos"]


# --- traces ---------------------------------------------------------------------------------------


def check_events(events: Sequence[dict[str, Any]]) -> None:
    """What the Trace Event Format asks of every event."""
    for each in events:
        assert {"ph", "name", "ts", "pid", "tid"} <= each.keys()
        assert each["ph"] in {"X", "M", "C", "b", "e"}
        assert each["ts"] >= 0
        assert each["name"]
        if each["ph"] == "X":
            assert each["dur"] >= 0
        if each["ph"] in "be":
            assert each["cat"]
            assert "id" in each


def test_a_trace_shows_steps_slots_and_who_waited(tmp_path: Path) -> None:
    engine = tiny_engine(max_num_seqs=2)
    recorder = Recorder()
    recorder.watch(engine)
    for number in range(4):
        engine.add(str(number), prompt_of(5, number), greedy(3))
    while engine.has_unfinished:
        engine.step()
    path = tmp_path / "new" / "trace.json"
    count = recorder.write(path)
    raw = json.loads(path.read_text())
    events = raw["traceEvents"]
    assert len(events) == count
    check_events(events)
    named = [each["name"] for each in events if each["ph"] == "X"]
    assert named.count("step") == len(engine.log.steps)
    for number in range(4):
        assert f"prefill {number}" in named
        assert f"decode {number}" in named
    names = {each["args"]["name"] for each in events if each["ph"] == "M"}
    assert names == {"paged, continuous, 2 slots", "steps", "slot 1", "slot 2"}
    queued = [each for each in events if each["ph"] in "be"]
    assert len(queued) == 2 * 4
    for begin, end in zip(queued[::2], queued[1::2], strict=True):
        assert (begin["ph"], end["ph"], begin["id"]) == ("b", "e", end["id"])
        assert begin["ts"] <= end["ts"]
    counters = [each["args"] for each in events if each["ph"] == "C"]
    assert counters[-1] == {"waiting": 0, "running": 0}
    assert max(each["running"] for each in counters) == 2


def test_bars_of_a_track_never_overlap() -> None:
    spans = [(0.0, 2.0), (0.0, 1.0), (1.0, 3.0), (2.0, 4.0), (2.5, 2.5)]
    assert slot_tracks(spans) == [2, 1, 1, 2, 3]


def test_requests_that_never_ran_are_traced_too() -> None:
    engine = tiny_engine(max_num_seqs=1)
    for name in "ab":
        engine.add(name, prompt_of(5), greedy(3))
    engine.step()
    engine.abort("b")
    events = trace_events([("e", engine.log)])
    check_events(events)
    assert not [each for each in events if each["name"] == "prefill b"]
    assert trace_events([]) == []


def test_a_trace_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    wanted = tmp_path / "file" / "trace.json"
    assert runner.main(["overhead", "--trace", str(wanted), "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--trace cannot be written to" in line
