"""The network guard of the test suite: every socket but loopback is refused.

`install()` replaces the ways out of Python's `socket` module, in this process and for good. An
attempt raises `NetworkBlocked` and is remembered in `attempts`, so that code which swallows the
error still fails its test (see `conftest.py`). Child processes get the same guard through
`offline/sitecustomize.py`.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
from collections.abc import Callable
from typing import Any

attempts: list[str] = []
"""What was refused in this process, oldest first."""


class NetworkBlocked(RuntimeError):
    """Not an OSError: code that handles an unreachable network must not handle this."""


def is_loopback(host: object) -> bool:
    """Whether `host` (a name or an address, as `socket` takes them) stays on this machine."""
    if isinstance(host, bytes | bytearray):
        host = bytes(host).decode("ascii", "replace")
    if host is None or host in ("", "localhost"):  # None and "" are how socket says "this machine"
        return True
    try:
        return ipaddress.ip_address(str(host).partition("%")[0]).is_loopback
    except ValueError:  # a name that would have to be looked up
        return False


def refuse(what: str, host: object) -> None:
    """Raise NetworkBlocked, and remember it, unless `host` is loopback."""
    if not is_loopback(host):
        attempts.append(f"{what} to {host!r}")
        raise NetworkBlocked(f"tests may use loopback only, and this is {attempts[-1]}")


def refuse_address(what: str, family: int, address: Any) -> None:
    """The same for a socket of `family`. Unix sockets pass, unknown families do not."""
    if family in (socket.AF_INET, socket.AF_INET6):
        refuse(what, address[0])
    elif family != socket.AF_UNIX:
        refuse(what, f"address family {family}")


def guarded_method(name: str, address_index: int) -> Callable[..., Any]:
    """`socket.socket.<name>`, checking the positional argument that holds the address.

    A negative index counts from the end. `sendmsg` may come without an address, for a socket that
    is connected and was checked then.
    """
    original = getattr(socket.socket, name)

    @functools.wraps(original)
    def method(self: socket.socket, *args: Any, **kwargs: Any) -> Any:
        has_address = len(args) > address_index if address_index >= 0 else bool(args)
        if has_address and args[address_index] is not None:
            refuse_address(name, self.family, args[address_index])
        return original(self, *args, **kwargs)

    return method


def guarded_lookup(name: str) -> Callable[..., Any]:
    """`socket.<name>`, whose first argument is a host."""
    original = getattr(socket, name)

    @functools.wraps(original)
    def lookup(host: Any, *args: Any, **kwargs: Any) -> Any:
        refuse(name, host)
        return original(host, *args, **kwargs)

    return lookup


METHODS = {"connect": 0, "connect_ex": 0, "sendto": -1, "sendmsg": 3}
LOOKUPS = ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "gethostbyaddr")


def install() -> None:
    """Guard this process. A second call changes nothing."""
    if "connect" in vars(socket.socket):  # it inherits the real one from C
        return
    for name, address_index in METHODS.items():
        setattr(socket.socket, name, guarded_method(name, address_index))
    for name in LOOKUPS:
        setattr(socket, name, guarded_lookup(name))
