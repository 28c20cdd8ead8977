"""Our load generator on a server whose times are known: it is right, and what is wrong would show.

Every defect here reads the very bytes of the run that is found right, so that what tells it apart
is the check and not the weather.
"""

from __future__ import annotations

import http.client
import json
import math
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from nanoserve.bench import sender
from nanoserve.bench.conduct import VoidError
from nanoserve.bench.findings.load import lag_text
from nanoserve.bench.load import LoadOptions, apply_load
from nanoserve.bench.metrics import ttft
from nanoserve.bench.record import SCHEMA
from nanoserve.bench.session import TerminatedError
from nanoserve.bench.timed_stream import Piece, TimedAnswer, read_body, read_timed, timed_events

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import load_agreement
import paced_server
from load_agreement import TOLERANCE, Reply, Seen
from paced_server import Pace, answer_parts, token_counts

PACE = Pace(first_s=0.3, gap_s=0.04)
LOAD = LoadOptions(
    url="", rate=12.0, requests=12, process="constant", prompt_tokens=9, output_tokens=12
)
NUM_ATTEMPTS = 2
"""A machine that is held up once is no generator that is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What came, of each request in order, and what our generator says of it."""

    pieces: tuple[tuple[Piece, ...], ...]
    replies: tuple[Reply, ...]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with paced_server.running(PACE) as running:
        yield running


def listen(load: LoadOptions) -> Heard:
    """One load, with the bytes that it went by."""
    heard: list[tuple[Piece, ...]] = []

    def keep(pieces: Sequence[Piece]) -> TimedAnswer:
        heard.append(tuple(pieces))
        return read_timed(pieces)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sender, "read_timed", keep)
        findings = apply_load(load)
    assert not findings.problems
    assert findings.gaps is not None  # the time of every token is known
    return Heard(pieces=tuple(heard), replies=tuple(load_agreement.replies_of(findings)))


def is_right(found: Seen, truth: Seen) -> bool:
    return all(abs(value) <= TOLERANCE for value in found.differences(truth).values())


@pytest.fixture(scope="module")
def heard(url: str, tmp_path_factory: pytest.TempPathFactory) -> Heard:
    """A load that is found right, if any of a few is."""
    for _ in range(NUM_ATTEMPTS):
        found = listen(replace(LOAD, url=url, out=tmp_path_factory.mktemp("pace")))
        if is_right(load_agreement.seen(found.replies), TRUTH):
            break
    return found


TRUTH = load_agreement.paced_truth(LOAD, PACE)


def test_what_is_said_of_known_times_is_so(heard: Heard) -> None:
    found = load_agreement.seen(heard.replies)
    assert is_right(found, TRUTH), found.differences(TRUTH)
    assert found.num_prompt_tokens == TRUTH.num_prompt_tokens != LOAD.prompt_tokens
    assert {reply.num_tokens for reply in heard.replies} == {LOAD.output_tokens}


# --- what would show ------------------------------------------------------------------------------


def chunks_of(pieces: Sequence[Piece]) -> list[tuple[float, dict[str, Any]]]:
    """Every event but [DONE], and when its line had come."""
    body = read_body(b"".join(piece.data for piece in pieces))
    assert body is not None
    return [(at_s, json.loads(data)) for at_s, data in timed_events(body, pieces)[:-1]]


def clock_starts_with_the_answer(reply: Reply, pieces: Sequence[Piece]) -> Reply:
    return replace(reply, start_s=pieces[0].at_s)


def any_event_is_a_first_token(reply: Reply, pieces: Sequence[Piece]) -> Reply:
    return replace(reply, first_s=chunks_of(pieces)[0][0])


def a_token_has_come_with_its_first_byte(reply: Reply, pieces: Sequence[Piece]) -> Reply:
    before_s = reply.first_s - PACE.gap_s / 4
    return replace(reply, first_s=max(p.at_s for p in pieces if p.at_s < before_s))


def every_event_is_a_token(reply: Reply, pieces: Sequence[Piece]) -> Reply:
    return replace(reply, num_tokens=len(chunks_of(pieces)))


def every_text_is_a_token(reply: Reply, pieces: Sequence[Piece]) -> Reply:
    texts = [choice["text"] for _, chunk in chunks_of(pieces) for choice in chunk["choices"]]
    return replace(reply, num_tokens=len(list(filter(None, texts))))


def the_last_token_comes_with_the_end(reply: Reply, pieces: Sequence[Piece]) -> Reply:
    return replace(reply, last_s=pieces[-1].at_s)


def every_usage_adds_up(reply: Reply, pieces: Sequence[Piece]) -> Reply:
    return replace(
        reply, num_tokens=sum(chunk["usage"]["completion_tokens"] for _, chunk in chunks_of(pieces))
    )


def words_are_tokens(reply: Reply, pieces: Sequence[Piece]) -> Reply:
    return replace(reply, num_prompt_tokens=LOAD.prompt_tokens)


@pytest.mark.parametrize(
    "defect, wrong",
    [
        (clock_starts_with_the_answer, {"ttft_ms"}),
        (any_event_is_a_first_token, {"ttft_ms", "tpot_ms"}),
        (a_token_has_come_with_its_first_byte, {"ttft_ms"}),
        (every_event_is_a_token, {"tpot_ms", "tokens_per_s"}),
        (every_text_is_a_token, {"tpot_ms", "tokens_per_s"}),
        (the_last_token_comes_with_the_end, {"tpot_ms", "tokens_per_s"}),
        (every_usage_adds_up, {"tpot_ms", "tokens_per_s"}),
        (words_are_tokens, {"num_prompt_tokens"}),
    ],
)
def test_a_generator_that_is_wrong_is_found_out(
    heard: Heard, defect: Callable[[Reply, Sequence[Piece]], Reply], wrong: set[str]
) -> None:
    replies = [defect(reply, p) for reply, p in zip(heard.replies, heard.pieces, strict=True)]
    off = load_agreement.seen(replies).differences(TRUTH)
    assert wrong <= {name for name, value in off.items() if abs(value) > TOLERANCE}, off


def test_being_late_is_part_of_what_is_measured(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No coordinated omission: a sender that is held up sees later tokens, and says why."""
    late_s, wait_until = 0.06, sender.wait_until
    monkeypatch.setattr(sender, "wait_until", lambda at_s: wait_until(at_s + late_s))
    findings = apply_load(replace(LOAD, url=url, requests=4, out=tmp_path))
    found = load_agreement.seen(load_agreement.replies_of(findings))
    assert found.ttft_ms >= 1e3 * (PACE.first_s + late_s)
    assert min(findings.lags_s) >= late_s
    assert "WARNING" in lag_text(findings)


# --- the server itself ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 12, 13])
def test_an_answer_is_paced_and_whole(num_tokens: int) -> None:
    parts = list(answer_parts(PACE, "a b c", num_tokens))
    times = [at_s for at_s, _ in parts]
    assert times == sorted(times)
    text = b"".join(data for _, data in parts)
    chunks = [json.loads(line[6:]) for line in text.split(b"\n\n") if line.startswith(b"data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [0, *token_counts(num_tokens), num_tokens]
    assert PACE.token_s(num_tokens - 1) == pytest.approx(times[-2])
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {
        paced_server.count_prompt("a b c")
    }
    assert text.endswith(b"data: [DONE]\n\n")


# --- what is made of two generators ---------------------------------------------------------------


def told_by_guidellm(due_s: float, ttft_ms: float) -> dict[str, Any]:
    """One request of its report, due so long after the first that counts."""
    due_at_s = 1e9 + load_agreement.PRIME_S + due_s
    return {
        "info": {"scheduler_start_time": 1e9, "timings": {"targeted_start": due_at_s}},
        "request_start_time": due_at_s + 0.5,
        "time_to_first_token_ms": ttft_ms,
        "inter_token_latency_ms": 10.0,
        "output_tokens": 5,
        "prompt_tokens": 7,
    }


def test_guidellm_is_taken_at_its_word() -> None:
    told = [told_by_guidellm(due_s, 100.0) for due_s in (3.0, -load_agreement.PRIME_S, 0.0)]
    replies = load_agreement.guidellm_replies({"benchmarks": [{"requests": {"successful": told}}]})
    assert [reply.due_s for reply in replies] == [
        0.0,
        3.0,
    ]  # and the one that makes it ready is not
    found = load_agreement.seen(replies)
    assert found.ttft_ms == pytest.approx(100, abs=1e-3)  # by its clock: late or not
    assert found.tpot_ms == pytest.approx(10, abs=1e-3)
    assert found.tokens_per_s == pytest.approx(10 / 3.14, rel=1e-6)
    late = ttft(replies[0].times(replies[0].due_s))
    assert late == pytest.approx(0.6, abs=1e-6)


def run_of(ours_s: float, theirs_s: float, server: str) -> dict[str, Any]:
    """A run whose first tokens came after so long; all else is alike."""
    loads = []
    for name in load_agreement.ORDER:
        first_s = ours_s if name == load_agreement.OURS else theirs_s
        reply = Reply(
            due_s=0.0,
            sent_s=0.01,
            start_s=0.0,
            first_s=first_s,
            last_s=1.0,
            num_tokens=9,
            num_prompt_tokens=3,
        )
        loads.append({"generator": name, "replies": [load_agreement.recorded(reply)] * 6})
    return {"server": server, "truth": {"ttft_ms": 98.0}, "loads": loads}


@pytest.mark.parametrize("theirs_s, agree", [(0.104, True), (0.096, True), (0.12, False)])
def test_the_table_says_how_far_apart_they_are(
    theirs_s: float, agree: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine" / "load_agreement.json"
    load_agreement.append_run(path, run_of(0.1, theirs_s, "paced"))
    record = load_agreement.append_run(path, run_of(0.1, theirs_s, "serve"))
    assert record == load_agreement.read_record(path)
    load_agreement.show(record)
    paced, served = capsys.readouterr().out.split("\nserve\n")
    for text in (paced, served):
        assert ("They agree within 5%" in text) is agree
        assert ("They do NOT agree" in text) is not agree
        assert f"{0.1 / theirs_s - 1:+.1%}" in text
    assert "nanoserve adds 2.00 ms" in paced
    assert "adds" not in served


def test_tokens_that_came_in_one_piece_are_no_division_by_zero(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = run_of(0.1, 0.1, "serve")
    for load in run["loads"]:
        for reply in load["replies"]:
            reply["last_s"] = reply["first_s"]
    load_agreement.show({"runs": [run]})
    assert "They agree" in capsys.readouterr().out
    run["loads"][0]["replies"][0]["last_s"] = 1.0  # of ours, one more than all of theirs
    assert load_agreement.agreement([run], load_agreement.METRICS["TPOT, ms"]).pairs[0] == math.inf


# --- what is wrong --------------------------------------------------------------------------------


def main_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["load_agreement", *words])
    return load_agreement.main()


WHOLE = {"schema": SCHEMA, "experiment": "load_agreement", "runs": [run_of(0.1, 0.1, "paced")]}


def without(key: str) -> dict[str, Any]:
    run = {name: value for name, value in run_of(0.1, 0.1, "paced").items() if name != key}
    return WHOLE | {"runs": [run]}


def three_loads() -> dict[str, Any]:
    run = run_of(0.1, 0.1, "paced")
    return WHOLE | {"runs": [run | {"loads": run["loads"][:3]}]}


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "not JSON"),
        (json.dumps(WHOLE)[:-9], "not JSON"),
        ("[]", "no record of load_agreement"),
        ("{}", "no record of load_agreement"),
        (json.dumps(WHOLE | {"schema": SCHEMA + 1}), f"has schema {SCHEMA + 1}"),
        (json.dumps(WHOLE | {"runs": {}}), "not whole"),
        (json.dumps(WHOLE | {"runs": [7]}), "not whole"),
        (json.dumps(without("server")), "not whole"),
        (json.dumps(without("loads")), "not whole"),
        (json.dumps(without("truth")), "not whole"),
        (json.dumps(three_loads()), "not whole"),
    ],
)
@pytest.mark.parametrize("words", [("--show",), ("--paced",)])
def test_a_file_that_is_no_record_is_neither_shown_nor_added_to(
    text: str,
    why: str,
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before a minute is spent on what could not be recorded."""
    path = load_agreement.record_path(tmp_path)
    path.parent.mkdir()
    path.write_text(text)
    assert main_of(monkeypatch, *words, "--out", str(tmp_path)) == 2
    said = capsys.readouterr().err
    assert why in said
    assert said.startswith("load_agreement: load_agreement.json ")
    assert said.count("\n") == 1
    assert path.read_text() == text


@pytest.mark.parametrize(
    "words, why",
    [
        (("--load", "0"), "--load must be more than 0"),
        (("--load", "nan"), "--load must be more than 0"),
        (("--threads", "0"), "--threads must be at least 1"),
        (("--output-tokens", "1"), "one token has no TPOT"),
        (("--rate", "-1"), "--rate must be more than 0"),
        (("--requests", "0"), "--requests must be at least 1"),
        (("--out", __file__), "results cannot be written"),
    ],
)
def test_a_wrong_request_starts_nothing(
    words: tuple[str, ...],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(load_agreement, "version", lambda name: "1")
    monkeypatch.setattr(load_agreement, "served_by", lambda *_: pytest.fail("a server was started"))
    assert main_of(monkeypatch, "--out", str(tmp_path), *words) == 2
    said = capsys.readouterr().err
    assert why in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "error, code",
    [
        (KeyboardInterrupt(), 130),
        (TerminatedError(), 143),
        (RuntimeError("it died"), 1),
        (FileNotFoundError("no report"), 1),
    ],
)
def test_what_goes_wrong_is_a_line_and_a_code(
    error: BaseException,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(given: object) -> None:
        raise error

    monkeypatch.setattr(load_agreement, "measure", fail)
    assert main_of(monkeypatch, "--out", str(tmp_path)) == code
    said = capsys.readouterr().err
    assert said.startswith("load_agreement: ")
    assert said.count("\n") == 1
    assert not load_agreement.record_path(tmp_path).exists()


PARENT = (
    "import subprocess as s, sys, time; "
    "child = s.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    "open(sys.argv[1], 'w').write(str(child.pid)); time.sleep(60)"
)


def is_running(pid: int) -> bool:
    """Whether it computes or could; whoever ended and waits for its parent to ask does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_program_that_is_given_up_leaves_no_worker(
    error: type[BaseException] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    communicate = subprocess.Popen.communicate

    def wait_for_worker(process: Any, timeout: float) -> Any:
        while not pid_file.exists() or not pid_file.read_text():
            time.sleep(0.01)
        if error is not None:
            raise error
        return communicate(process, timeout=timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", wait_for_worker)
    monkeypatch.setattr(load_agreement, "PATIENCE_S", 0.05)
    with pytest.raises(error or RuntimeError, match=None if error else "did not end within 0.05 s"):
        load_agreement.run_program([sys.executable, "-I", "-S", "-c", PARENT, str(pid_file)])
    worker = int(pid_file.read_text())
    for _ in range(500):
        if not is_running(worker):
            break
        time.sleep(0.01)
    assert not is_running(worker)


def test_a_report_of_another_form_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_agreement, "guidellm_report", lambda load: {"benchmarks": [{}]})
    with pytest.raises(RuntimeError, match="guidellm reports in a form not known here"):
        load_agreement.by_guidellm(LOAD)


@pytest.mark.parametrize(
    "words",
    [("--port", "65536"), ("--port", "-1"), ("--first-ms", "nan"), ("--gap-ms", "-1")],
)
def test_the_paced_server_refuses_what_it_cannot_do(
    words: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["paced_server", *words])
    with pytest.raises(SystemExit, match="2"):
        paced_server.main()
    assert words[0] in capsys.readouterr().err


def test_a_port_in_use_is_a_line_and_a_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(sys, "argv", ["paced_server", "--port", str(taken.getsockname()[1])])
        assert paced_server.main() == 1
    said = capsys.readouterr().err
    assert "in use" in said
    assert said.count("\n") == 1


def test_a_paced_server_that_does_not_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(RuntimeError, match="did not start: exit code 2"),
        paced_server.running(Pace(first_s=-1.0, gap_s=0.04)),
    ):
        pass


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"{}", b'{"prompt": [1], "max_tokens": 2}', b'{"prompt": "a", "max_tokens": 0}'],
)
def test_the_paced_server_says_what_is_no_request(body: bytes, url: str) -> None:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
    connection.request("POST", "/v1/completions", body)
    reply = connection.getresponse()
    assert reply.status == 400
    assert "message" in json.loads(reply.read())["error"]
    connection.close()


@pytest.mark.parametrize(
    "python, error, why",
    [("false", VoidError, "ended with exit code 1"), ("no-such-python", OSError, "no-such-python")],
)
def test_a_server_that_never_starts_is_said(
    python: str, error: type[Exception], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_PYTHON", python)
    with pytest.raises(error, match=why), load_agreement.serving([]):
        pass


def test_ctrl_c_ends_the_paced_server_without_a_word() -> None:
    """With one connection in the middle of an answer, and one that asks nothing."""
    command = [sys.executable, paced_server.__file__, "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        where = process.stdout.readline().removeprefix(paced_server.LISTENING + "http://").strip()
        asking, silent = (http.client.HTTPConnection(where, timeout=5) for _ in range(2))
        asking.request("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 1000}')
        reply = asking.getresponse()
        silent.connect()
        assert reply.read(5) == b"data:"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=10)
    assert (process.returncode, said) == (0, "")
    asking.close()
    silent.close()
