"""`nanoserve serve`: bind, load, say what runs and what to type, serve until a signal.

The port is taken before the model is loaded, so that a wrong one costs no waiting, and is listened
at from then on: who connects early waits instead of being refused. SIGTERM ends with 0 once those
inside have finished, Ctrl-C with 130 at once.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import typer

from nanoserve.cli.options import EngineOptions, ServerOptions
from nanoserve.cli.terminal import LateProgress, remark
from nanoserve.config import ServerConfig
from nanoserve.engine.build import describe_cache
from nanoserve.engine.engine import Engine
from nanoserve.llm import engine_config
from nanoserve.server import create_app
from nanoserve.server.connection import Connection
from nanoserve.server.lifecycle import settle_heap
from nanoserve.server.logs import configure
from nanoserve.server.service import public_name

BACKLOG = 2048
CLOSE_TIMEOUT_S = 3
"""For connections that linger once every request has been answered."""


def serve_until_stopped(server: ServerOptions, engine: EngineOptions) -> None:
    """Raises ValueError for what cannot be honoured, OSError for an address, KeyboardInterrupt."""
    import uvicorn

    config, wanted = server.config(), engine_config(**engine.values())
    check_files(config)
    received: list[int] = []

    def stop(signum: int) -> None:
        received.append(signum)
        http.should_exit = True

    with leaving_at_once(), closing(bind(config)) as listener:
        with LateProgress(f"loading {engine.model}"):
            built = Engine(wanted)
        app = create_app(built, config, stop=stop)
        configure(config.log_level)
        http = uvicorn.Server(
            uvicorn.Config(
                app,
                http=Connection,
                lifespan="on",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
                timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
            )
        )
        if built.parts.checkpoint.kind == "dummy":
            remark(f"random weights (--load-format dummy, seed {wanted.dummy_seed})")
        typer.echo("\n".join(start_lines(built, config, listener.getsockname()[1])))
        settle_heap()
        http.run(sockets=[listener])
    if signal.SIGINT in received:
        raise KeyboardInterrupt


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Inside, SIGTERM ends with 0 until the app takes it over: nobody was let in yet."""

    def leave(_signum: int, _frame: FrameType | None) -> NoReturn:
        os._exit(0)  # an exception would be swallowed in an event loop that begins

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check_files(config: ServerConfig) -> None:
    """Raise ValueError for a file that is not there or of no use, before anything is loaded."""
    for option, name in (
        ("--ssl-keyfile", config.ssl_keyfile),
        ("--ssl-certfile", config.ssl_certfile),
    ):
        if name is not None and not Path(name).is_file():
            raise ValueError(f"{option} {name}: there is no such file")
    if config.ssl_certfile is not None:
        check_certificate(config.ssl_certfile, config.ssl_keyfile)


def check_certificate(certfile: str, keyfile: str | None) -> None:
    """Raise ValueError for what no server can show: no PEM, another's key, a key under password."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile, password="")  # or the terminal is asked for one
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--ssl-certfile {certfile} and --ssl-keyfile {keyfile} are not a certificate and its "
            f"key, in PEM and without a password ({error})"
        ) from error


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket. Raises ValueError for a host that is none here, OSError for a port."""
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(BACKLOG)
    except socket.gaierror as error:
        listener.close()
        raise ValueError(f"--host {config.host}: {error.strerror}") from error
    except (TypeError, ValueError) as error:  # it cannot even be asked for
        listener.close()
        raise ValueError(f"--host {config.host!r} is no host's name: {error}") from error
    except OSError as error:
        listener.close()
        raise OSError(
            f"cannot listen at {config.host} port {config.port} (--host, --port): {error.strerror}"
        ) from error
    return listener


def start_lines(engine: Engine, config: ServerConfig, port: int) -> list[str]:
    """Model, cache, address, and a line to type."""
    runs = engine.describe()
    max_num_seqs = engine.config.scheduler.max_num_seqs
    name = config.served_model_name or public_name(engine.parts.checkpoint.name)
    url = address(config, port)
    return [
        f"model: {name}, {runs['weights']} weights, {runs['dtype']}, {runs['executor']} executor, "
        f"{runs['device']}",
        describe_cache(engine.spec),
        f"listening: {url} ({max_num_seqs} sequences at once, {config.max_queue} requests queued)",
        f"try: {example(config, url, name)}",
    ]


def address(config: ServerConfig, port: int) -> str:
    """The URL at which this machine reaches the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.host, config.host)
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://{host}:{port}"


def example(config: ServerConfig, url: str, name: str) -> str:
    """A curl line that streams an answer."""
    body = {
        "model": name,
        "messages": [{"role": "user", "content": "Once upon a time"}],
        "max_tokens": 64,
        "stream": True,
    }
    key = "" if config.api_key is None else '-H "Authorization: Bearer $NANOSERVE_API_KEY" '
    return (
        f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"{key}-d {shlex.quote(json.dumps(body))}"
    )
