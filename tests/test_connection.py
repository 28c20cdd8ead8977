"""One connection below the app: heads without end, what is no HTTP, clients that take nothing."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest
from server_fixture import PATIENCE_S, Server, scripted_engine, serve, strict_json, wait_until

from nanoserve.server import connection, exchange, refusals

LINE = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
LONG = {
    "model": "stub",
    "prompt": [0] * 1000,
    "echo": True,
    "logprobs": 64,
    "max_tokens": 2,
    "ignore_eos": True,
    "stream": True,
}
"""Of each choice the answer has megabytes."""
BODY = json.dumps({"model": "stub", "prompt": "a", "max_tokens": 1}).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(scripted_engine(max_num_seqs=2), max_queue=0) as running:
        yield running


def connected(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)


def answers(server: Server, *pieces: bytes) -> bytes:
    """All that comes back until the server hangs up."""
    with connected(server) as client:
        received = []
        try:
            for piece in pieces:
                client.sendall(piece)
            while data := client.recv(65_536):
                received.append(data)
        except ConnectionError:  # it hung up before it had read everything
            pass
        return b"".join(received)


def assert_refused(answer: bytes, status: int, code: str) -> None:
    """E01: four keys and an id, although no app was asked."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"x-request-id: req-" in head
    error = strict_json(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code


def read_until_closed(client: socket.socket) -> bytes:
    received = b""
    try:
        while data := client.recv(65_536):
            received += data
    except ConnectionError:
        pass
    return received


@pytest.mark.parametrize("kind", ["one value", "many headers", "trailers"])
def test_a_head_that_never_ends_is_cut_off(server: Server, kind: str) -> None:
    chunked = b"transfer-encoding: chunked\r\n\r\n0\r\n"
    start = {"one value": b"x: ", "many headers": b"", "trailers": chunked}[kind]
    piece = b"a" * 4096 if kind == "one value" else b"x: %s\r\n" % (b"a" * 4091)
    num_sent = 0
    with connected(server) as client:
        client.sendall(LINE + start)
        try:
            for _ in range(64 * 2**20 // len(piece)):
                client.sendall(piece)
                num_sent += len(piece)
        except ConnectionError:
            pass
    assert num_sent < 32 * 2**20, "nobody stopped it"
    assert server.get("/live").status == 200


def test_a_head_too_large_hears_why(server: Server) -> None:
    with connected(server) as client:
        client.sendall(LINE + b"x: ")
        received = b""
        for _ in range(refusals.MAX_HEAD_BYTES // 4096 + 1):
            client.sendall(b"a" * 4096)
            time.sleep(0.002)
        received = read_until_closed(client)
    assert_refused(received, 431, "headers_too_large")


@pytest.mark.parametrize("size", [1, 4096])
def test_a_large_head_and_a_body_in_crumbs_are_served(server: Server, size: int) -> None:
    body = b" " * (40_000 if size == 1 else 0) + BODY
    chunks = [
        b"%x\r\n%s\r\n" % (len(body[i : i + size]), body[i : i + size])
        for i in range(0, len(body), size)
    ]
    head = LINE + b"x: " + b"a" * 60_000 + b"\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = answers(server, head, *chunks[:50], b"".join(chunks[50:]), b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 "), answer[:300]


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01 a TLS greeting\r\n\r\n",
        b"FOO / HTTP/1.1\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        LINE + b"content-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
        LINE + b"content-length: -5\r\n\r\nabcdef",
        LINE + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        LINE + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=lambda raw: repr(raw[-24:]),
)
def test_what_is_no_http_is_refused_like_everything_else(server: Server, raw: bytes) -> None:
    assert_refused(answers(server, raw), 400, "invalid_http")
    server.assert_idle()


def test_nonsense_behind_a_request_does_not_get_into_its_answer(server: Server) -> None:
    body = json.dumps({"model": "stub", "prompt": "a", "max_tokens": 50, "stream": True}).encode()
    with server.held() as gate, connected(server) as client:
        client.sendall(LINE.replace(b"connection: close\r\n", b""))
        client.sendall(b"content-length: %d\r\n\r\n%s" % (len(body), body))
        gate.grant(2)
        first = client.recv(65_536)
        assert first.startswith(b"HTTP/1.1 200 ")
        client.sendall(b"\0\0\0\r\n\r\n")
        rest = read_until_closed(client)
        assert b"HTTP/1.1 400" not in first + rest
        assert b"[DONE]" not in first + rest
        gate.open()
    server.assert_idle()


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    one = LINE.replace(b"connection: close\r\n", b"")
    ask = one + b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY)
    answer = answers(
        server, ask * 2 + b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    )
    assert answer.count(b"HTTP/1.1 200 ") == answer.count(b"HTTP/1.1 ") == 3
    assert answer.index(b"cmpl-") < answer.index(b'"live"')


def test_a_head_has_its_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    for start in (b"", b"GET /li"):
        with connected(server) as client:
            began_s = time.monotonic()
            client.sendall(start)
            assert client.recv(100) == b""
            assert 0.1 < time.monotonic() - began_s < 10
    with connected(server) as client:  # a body, and an answer, may take longer
        client.sendall(LINE + b"content-length: %d\r\n\r\n" % len(BODY))
        time.sleep(0.4)
        client.sendall(BODY)
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_takes_nothing_gives_its_place_back(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer fills every buffer on the way; the engine has long been done with it."""
    monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr(exchange, "STALLED_S", 0.5)
    body = json.dumps({**LONG, "n": 16}).encode()
    num_before = server.metric("nanoserve:disconnects_total")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(LINE + b"content-length: %d\r\n\r\n%s" % (len(body), body))
        wait_until(
            lambda: server.metric("nanoserve:disconnects_total") > num_before,
            PATIENCE_S,
            "it kept its place",
        )
        assert server.get("/debug/invariants").json()["in_flight"] == 0
    server.assert_idle()


def test_a_slow_client_is_no_stalled_one(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr(exchange, "STALLED_S", 1.0)
    body = json.dumps(LONG).encode()
    with connected(server) as client:
        client.sendall(LINE + b"content-length: %d\r\n\r\n%s" % (len(body), body))
        received = b""
        while data := client.recv(131_072):
            received += data
            time.sleep(0.01)
    assert b"data: [DONE]\n\n" in received
