"""The network guard itself: every way out is blocked, loopback works, no attempt is missed."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

import loopback
import pytest

OUTSIDE = ("192.0.2.1", 9)  # TEST-NET-1 (RFC 5737): nobody's address

TESTS = Path(__file__).parent

pytest_plugins = ["pytester"]


def tcp(family: int = socket.AF_INET) -> socket.socket:
    return socket.socket(family, socket.SOCK_STREAM)


def udp() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def use(sock: socket.socket, method: str, *args: object) -> None:
    with sock:
        getattr(sock, method)(*args)


WAYS_OUT: dict[str, Callable[[], object]] = {
    "connect": lambda: use(tcp(), "connect", OUTSIDE),
    "connect by name": lambda: use(tcp(), "connect", ("example.invalid", 80)),
    "connect over IPv6": lambda: use(tcp(socket.AF_INET6), "connect", ("2001:db8::1", 9, 0, 0)),
    "connect to all interfaces": lambda: use(tcp(), "connect", ("0.0.0.0", 9)),
    "connect_ex": lambda: use(tcp(), "connect_ex", OUTSIDE),
    "sendto": lambda: use(udp(), "sendto", b"x", OUTSIDE),
    "sendto with flags": lambda: use(udp(), "sendto", b"x", 0, OUTSIDE),
    "sendmsg": lambda: use(udp(), "sendmsg", [b"x"], [], 0, OUTSIDE),
    "create_connection": lambda: socket.create_connection(OUTSIDE, timeout=1),
    "getaddrinfo": lambda: socket.getaddrinfo("example.invalid", 80),
    "getaddrinfo of bytes": lambda: socket.getaddrinfo(b"example.invalid", 80),
    "gethostbyname": lambda: socket.gethostbyname("example.invalid"),
    "urllib": lambda: urllib.request.urlopen("http://192.0.2.1:9/", timeout=1),
    "asyncio": lambda: asyncio.run(asyncio.open_connection(*OUTSIDE)),
}


@pytest.mark.parametrize("way", WAYS_OUT)
def test_every_way_out_is_blocked_and_remembered(way: str) -> None:
    with pytest.raises(loopback.NetworkBlocked, match="loopback only"):
        WAYS_OUT[way]()
    assert len(loopback.attempts) == 1
    loopback.attempts.clear()  # or the autouse fixture would, rightly, fail this test


def test_loopback_works() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                peer.sendall(peer.recv(16)[::-1])

        thread = threading.Thread(target=answer)
        thread.start()
        with socket.create_connection(("localhost", port), timeout=5) as client:
            client.sendall(b"abc")
            assert client.recv(16) == b"cba"
        thread.join(timeout=5)
    assert not loopback.attempts


def test_datagrams_over_loopback_work() -> None:
    with udp() as receiver, udp() as sender:
        receiver.bind(("127.0.0.1", 0))
        sender.sendto(b"one", receiver.getsockname())
        sender.connect(receiver.getsockname())
        sender.sendmsg([b"two"])  # no address: the socket is connected
        assert [receiver.recv(8), receiver.recv(8)] == [b"one", b"two"]


def test_unix_sockets_work(tmp_path: Path) -> None:
    with tcp(socket.AF_UNIX) as server, tcp(socket.AF_UNIX) as client:
        server.bind(os.fspath(tmp_path / "s"))
        server.listen()
        client.connect(os.fspath(tmp_path / "s"))
        assert server.accept()[0].close() is None


@pytest.mark.parametrize(
    "host,expected",
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        (b"127.0.0.1", True),
        ("", True),
        (None, True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("fe80::1%eth0", False),
        ("localhost.example.invalid", False),
    ],
)
def test_what_counts_as_loopback(host: object, expected: bool) -> None:
    assert loopback.is_loopback(host) is expected


def test_child_processes_are_guarded_too() -> None:
    code = f"import socket; socket.socket().connect({OUTSIDE!r})"
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert child.returncode == 1
    assert "NetworkBlocked" in child.stderr


def test_a_swallowed_refusal_still_fails_its_test(pytester: pytest.Pytester) -> None:
    for name in ("conftest.py", "loopback.py", "offline/sitecustomize.py"):
        target = pytester.path / name
        target.parent.mkdir(exist_ok=True)
        target.write_text((TESTS / name).read_text())
    pytester.makepyfile(
        """
        import contextlib, socket

        def test_swallows():
            with contextlib.suppress(RuntimeError):
                socket.getaddrinfo("example.invalid", 80)
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, errors=1)
    assert re.search(r"tried to leave the machine.*example\.invalid", str(result.stdout))


def test_no_test_sees_the_users_caches(hf_home: Path) -> None:
    from huggingface_hub import constants

    assert not hf_home.exists()
    assert os.environ["HF_HOME"] == constants.HF_HOME == str(hf_home)
    assert str(hf_home / "hub") == constants.HF_HUB_CACHE
