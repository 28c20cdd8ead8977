"""`nanoserve serve` and `uvicorn nanoserve.server:app` as processes; how both are configured."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
from helpers import tiny_config, tiny_engine, tiny_model

from nanoserve.cli import app as cli_app
from nanoserve.cli.options import EngineOptions, ServerOptions, spread
from nanoserve.cli.serve import address, bind, check_files, example, start_lines
from nanoserve.config import ServerConfig
from nanoserve.llm import engine_config
from nanoserve.server.settings import read_engine_config, read_server_config, variable

PATIENCE_S = 60.0
SRC = Path(__file__).resolve().parents[1] / "src"


class Process:
    """A server in a process of its own. Its port is read from what it says, or was given."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str], port: int = 0) -> None:
        path = os.pathsep.join(filter(None, (str(SRC), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )
        self.port = port
        self.lines: list[str] = []

    def read_start(self) -> None:
        """The lines that `nanoserve serve` begins with."""
        assert self._process.stdout is not None
        while not any(line.startswith("try: ") for line in self.lines):
            line = self._process.stdout.readline()
            assert line, self.finish()
            self.lines.append(line.rstrip("\n"))
        (self.port,) = (int(m) for m in re.findall(r"listening: \S+:(\d+)", "\n".join(self.lines)))

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)

    def get(self, path: str) -> int:
        with contextlib.closing(self.connect()) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            response.read()
            return response.status

    def wait_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self.finish()
            with contextlib.suppress(ConnectionError):
                if self.get("/health") == 200:
                    return
            time.sleep(0.02)
        raise AssertionError("the server never got ready")

    @contextlib.contextmanager
    def stream(self, max_tokens: int) -> Iterator[http.client.HTTPResponse]:
        """A stream of which the first event has come."""
        body = {"model": "tiny", "prompt": [1, 2], "ignore_eos": True, "stream": True}
        with contextlib.closing(self.connect()) as connection:
            connection.request(
                "POST", "/v1/completions", json.dumps({**body, "max_tokens": max_tokens})
            )
            response = connection.getresponse()
            assert response.status == 200
            assert response.readline().startswith(b"data: ")
            yield response
            response.close()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def finish(self) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        out, err = self._process.communicate(timeout=PATIENCE_S)
        return self._process.returncode, out, err

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


def serve(*arguments: str, **environment: str) -> Process:
    model = ["--model", str(tiny_model().folder), "--served-model-name", "tiny"]
    command = ["-m", "nanoserve", "serve", *model, "--device", "cpu", "--port", "0", *arguments]
    return Process(command, environment)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def plain_uvicorn(**environment: str) -> Process:
    port = free_port()
    options = {"MODEL": str(tiny_model().folder), "SERVED_MODEL_NAME": "tiny", "DEVICE": "cpu"}
    names = {f"NANOSERVE_{name}": value for name, value in {**options, **environment}.items()}
    command = ["-m", "uvicorn", "nanoserve.server:app", "--port", str(port)]
    return Process(command, names, port)


@pytest.fixture(params=["serve", "uvicorn"])
def server(request: pytest.FixtureRequest) -> Iterator[Process]:
    """Either way to start one, ready, with two seconds from SIGTERM to the end."""
    if request.param == "serve":
        process = serve("--shutdown-timeout", "2", "--max-num-seqs", "4")
    else:
        process = plain_uvicorn(SHUTDOWN_TIMEOUT="2", MAX_NUM_SEQS="4")
    with process:
        if request.param == "serve":
            process.read_start()
        process.wait_ready()
        yield process


def test_sigterm_lets_a_stream_finish_and_ends_with_0(server: Process) -> None:
    with server.stream(max_tokens=100) as response:
        server.signal(signal.SIGTERM)
        rest = response.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"length"' in rest
    assert b'"error"' not in rest
    code, _, err = server.finish()
    assert code == 0, err
    assert "Traceback" not in err


def test_an_idle_server_ends_at_once_with_0(server: Process) -> None:
    server.signal(signal.SIGTERM)
    code, _, err = server.finish()
    assert code == 0, err
    assert "Traceback" not in err


def test_what_serve_says_is_true_and_its_curl_line_works() -> None:
    with serve("--log-level", "info") as server:
        server.read_start()
        model, cache, listening, hint = server.lines
        runs = r"model: tiny, trained weights, float32, (native|eager) executor, cpu"
        assert re.fullmatch(runs, model)
        assert cache.startswith("KV cache: paged, float32, ")
        assert listening.startswith(f"listening: http://127.0.0.1:{server.port} (")
        server.wait_ready()
        command = shlex.split(hint.removeprefix("try: "))
        assert command[:2] == ["curl", "-N"]
        url, body = command[2], command[command.index("-d") + 1]
        path = url.removeprefix(f"http://127.0.0.1:{server.port}")
        with contextlib.closing(server.connect()) as connection:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200
            assert response.read().endswith(b"data: [DONE]\n\n")
            name = response.headers["x-request-id"]
        server.signal(signal.SIGINT)
        code, _, err = server.finish()
        assert code == 130
        (line,) = (line for line in err.splitlines() if f"id={name}" in line)
        assert "path=/v1/chat/completions status=200" in line
        assert "Traceback" not in err


def test_who_connects_while_the_model_is_loaded_is_served() -> None:
    with serve() as server:
        server.read_start()
        assert server.get("/live") == 200  # no retry: the port was listened at before it was named
        server.signal(signal.SIGTERM)
        assert server.finish()[0] == 0


def test_sigterm_before_anybody_was_let_in_ends_with_0() -> None:
    with serve() as server:
        server.read_start()  # the signals are not yet the app's
        server.signal(signal.SIGTERM)
        assert server.finish()[0] == 0


def test_half_a_body_at_the_end_is_told_and_leaves_no_trace() -> None:
    with serve("--shutdown-timeout", "0") as server:
        server.read_start()
        server.wait_ready()
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"
            )
            server.get("/live")  # so it has been read
            server.signal(signal.SIGTERM)
            code, _, err = server.finish()
            assert client.recv(65_536).startswith(b"HTTP/1.1 503 ")
    assert code == 0
    assert "Traceback" not in err


@pytest.mark.parametrize("content", ["", "no PEM", "-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_a_certificate_that_is_none_is_found_before_anything_is_loaded(
    content: str, tmp_path: Path
) -> None:
    file = tmp_path / "cert.pem"
    file.write_text(content)
    config = ServerConfig(ssl_certfile=str(file), ssl_keyfile=str(file))
    with pytest.raises(ValueError, match=r"--ssl-certfile .*cert\.pem"):
        check_files(config)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--host", "ü" * 100], "is no host's name"),
        (["--port", "70000"], "--port must be at most 65535, got 70000"),
        (["--port", "x"], "'x' is not an integer"),
        (["--max-queue", "-1"], "--max-queue must be at least 0, got -1"),
        (["--request-timeout", "0"], "--request-timeout 0 leaves no time"),
        (["--shutdown-timeout", "nan"], "--shutdown-timeout must be a finite number"),
        (["--api-key", ""], "--api-key is empty"),
        (["--root-path", "llm"], "--root-path must begin with /"),
        (["--ssl-keyfile", "k.pem"], "--ssl-keyfile and --ssl-certfile go together"),
        (["--ssl-keyfile", "/no/k", "--ssl-certfile", "/no/c"], "there is no such file"),
        (["--log-level", "loud"], "'loud' is not one of critical, error"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
        (["--chat-template", "/no/such.jinja"], "--chat-template /no/such.jinja"),
        (["--executor", "abacus"], "'abacus' is not one of"),
    ],
)
def test_what_cannot_be_honoured_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["serve", "--model", str(tiny_model().folder), "--device", "cpu", "--port", "0"]
    assert cli_app.run([*common, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_a_port_that_is_taken_is_a_fault_of_the_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert cli_app.run(["serve", "--port", str(port)]) == 1
    assert f"cannot listen at 127.0.0.1 port {port} (--host, --port)" in capsys.readouterr().err


def test_plain_uvicorn_ends_where_the_model_is_not_found() -> None:
    with plain_uvicorn(MODEL="/no/such/folder") as server:
        code, _, err = server.finish()
    assert code != 0
    assert "nanoserve: " in err
    assert "/no/such/folder" in err
    assert "Traceback" not in err


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_app.run(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for field in (*fields(ServerOptions), *fields(EngineOptions)):
        assert f"--{field.name.replace('_', '-')}" in text
        assert variable(field.name) in text
    assert {f.name for f in fields(ServerOptions)} == {f.name for f in fields(ServerConfig)}


ENVIRONMENT = {
    "HOST": "0.0.0.0",
    "PORT": "9000",
    "SERVED_MODEL_NAME": "org/name",
    "API_KEY": "secret",
    "MAX_QUEUE": "0",
    "REQUEST_TIMEOUT": "2.5",
    "SHUTDOWN_TIMEOUT": "7",
    "ALLOWED_ORIGINS": "https://a.example, https://b.example",
    "CHAT_TEMPLATE": "x.jinja",
    "ROOT_PATH": "/llm",
    "SSL_KEYFILE": "k",
    "SSL_CERTFILE": "c",
    "LOG_LEVEL": "debug",
    "MODEL": "gpt2",
    "REVISION": "main",
    "LOAD_FORMAT": "dummy",
    "DUMMY_SEED": "3",
    "TOKENIZER": "t",
    "DEVICE": "cpu",
    "DTYPE": "bfloat16",
    "KV_LAYOUT": "slots",
    "KV_CACHE_DTYPE": "float16",
    "EXECUTOR": "eager",
    "QUANTIZATION": "int8",
    "MAX_MODEL_LEN": "64",
    "MAX_NUM_SEQS": "3",
    "MAX_NUM_BATCHED_TOKENS": "99",
    "BLOCK_SIZE": "8",
    "KV_CACHE_MEMORY_BYTES": "512MiB",
    "ENABLE_PREFIX_CACHING": "false",
    "BATCHING": "static",
    "BATCHING_TIMEOUT": "0.2",
    "CONTEXT_OVERFLOW": "slide",
    "SLIDE_WINDOW": "17",
    "THREADS": "2",
    "KERNELS": "torch",
    "KV_AUDIT": "0.5",
}


def by_command_line(environ: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The two configurations that `nanoserve serve` would use, from the environment alone."""
    seen: list[Any] = []
    app = typer.Typer()

    @app.command()
    @spread
    def command(*, server: ServerOptions, engine: EngineOptions) -> None:
        seen.extend((server.config(), engine_config(**engine.values())))

    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    parser: Any = typer.main.get_command(app)
    with parser.make_context("serve", []) as context:
        parser.invoke(context)
    return tuple(seen)


@pytest.mark.parametrize("only", [None, *ENVIRONMENT])
def test_both_ways_read_the_environment_alike(
    only: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = (
        {"SSL_KEYFILE", "SSL_CERTFILE"},
        {"CONTEXT_OVERFLOW", "SLIDE_WINDOW"},
        {"BATCHING", "BATCHING_TIMEOUT"},
    )
    chosen = {only}.union(*(pair for pair in pairs if only in pair))
    environ = {
        f"NANOSERVE_{name}": value
        for name, value in ENVIRONMENT.items()
        if only is None or name in chosen
    }
    configs = (read_server_config(environ), read_engine_config(environ))
    assert configs == by_command_line(environ, monkeypatch)
    assert configs != (ServerConfig(), engine_config())


def test_every_option_but_one_is_in_that_table() -> None:
    names = {f.name.upper() for f in (*fields(ServerOptions), *fields(EngineOptions))}
    assert names - set(ENVIRONMENT) == {"STRICT_CONTEXT"}  # contradicts CONTEXT_OVERFLOW slide
    assert read_engine_config({"NANOSERVE_STRICT_CONTEXT": "on"}).scheduler.strict_context


def test_without_variables_it_is_the_defaults() -> None:
    assert read_server_config({"NANOSERVE_PORT": "", "HOME": "/"}) == ServerConfig()
    assert read_engine_config({"NANOSERVE_MODEL": ""}) == engine_config()


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("PORT", "x", "NANOSERVE_PORT must be an integer, got 'x'"),
        ("REQUEST_TIMEOUT", "soon", "NANOSERVE_REQUEST_TIMEOUT must be a number, got 'soon'"),
        ("ENABLE_PREFIX_CACHING", "maybe", "must be true or false, got 'maybe'"),
        ("KV_CACHE_MEMORY_BYTES", "much", "NANOSERVE_KV_CACHE_MEMORY_BYTES must be a positive"),
        ("LOG_LEVEL", "loud", "--log-level must be one of"),
        ("DTYPE", "float8", "--dtype must be one of"),
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str, words: str) -> None:
    environ = {f"NANOSERVE_{name}": value}
    with pytest.raises(ValueError, match=re.escape(words)):
        (read_server_config(environ), read_engine_config(environ))


def test_a_misspelt_variable_is_told(caplog: pytest.LogCaptureFixture) -> None:
    read_server_config({"NANOSERVE_PROT": "1", "NANOSERVE_MODEL": "mini"})
    assert caplog.messages == ["ignored, for no option has this name: NANOSERVE_PROT"]


def test_a_key_is_in_no_repr() -> None:
    assert "secret" not in repr(ServerConfig(api_key="secret"))


@pytest.mark.parametrize(
    "config, expected",
    [
        (ServerConfig(), "http://127.0.0.1:80"),
        (ServerConfig(host="0.0.0.0"), "http://127.0.0.1:80"),
        (ServerConfig(host="::"), "http://[::1]:80"),
        (ServerConfig(host="::1"), "http://[::1]:80"),
        (ServerConfig(host="localhost", ssl_keyfile="k", ssl_certfile="c"), "https://localhost:80"),
    ],
    ids=str,
)
def test_the_address_is_one_that_can_be_typed(config: ServerConfig, expected: str) -> None:
    assert address(config, 80) == expected


def test_the_line_to_type_never_shows_the_key() -> None:
    line = example(ServerConfig(api_key="secret"), "http://127.0.0.1:80", "it's")
    assert "secret" not in line
    words = shlex.split(line)
    assert "Authorization: Bearer $NANOSERVE_API_KEY" in words
    assert json.loads(words[-1])["model"] == "it's"


def test_the_start_lines_tell_limits() -> None:
    engine = tiny_engine(max_num_seqs=3)
    lines = start_lines(engine, ServerConfig(max_queue=5), 80)
    assert "(3 sequences at once, 5 requests queued)" in lines[2]
    assert str(tiny_model().folder) not in lines[0]


def test_a_host_that_is_none_is_the_users_mistake() -> None:
    with pytest.raises(ValueError, match=r"--host 256\.0\.0\.1"):
        bind(ServerConfig(host="256.0.0.1"))


def test_the_server_is_no_business_of_other_commands() -> None:
    code = (
        "import sys\nfrom nanoserve.cli.app import run\n"
        "assert run(['generate', 'x', '--model', sys.argv[1], '--max-tokens', '1']) == 0\n"
        "print([m for m in sys.modules if m.startswith(('nanoserve.server', 'fastapi', "
        "'uvicorn', 'pydantic', 'prometheus_client', 'jinja2'))])"
    )
    child = subprocess.run(
        [sys.executable, "-c", code, tiny_config().model],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), os.environ["PYTHONPATH"]])},
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.endswith("[]\n")
