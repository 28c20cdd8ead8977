"""The app: `create_app(engine)`, and `app` for uvicorn, which is made from the environment.

Routes only: what a completion does is in `exchange`, who may enter in `front`, what runs beneath in
`bridge`. Starting the app starts the engine's thread, which warms up while `/live` answers and
`/health` says 503; ending it ends both. Importing this loads no model.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware

from nanoserve import __version__
from nanoserve.config import ServerConfig
from nanoserve.engine.engine import Engine
from nanoserve.server import debug, refusals, tokens
from nanoserve.server.bodies import CHAT_SCHEMA, COMPLETION_SCHEMA, Schema
from nanoserve.server.bridge import NotServingError
from nanoserve.server.errors import ApiError, dump
from nanoserve.server.exchange import Exchange
from nanoserve.server.front import Front, KeyCheck, Receive, Scope, Send, read_body
from nanoserve.server.lifecycle import Lifecycle, Stop, settle_heap
from nanoserve.server.protocol import read_json
from nanoserve.server.service import SHORT_BODY_BYTES, Service, make_service
from nanoserve.server.settings import read_engine_config, read_server_config
from nanoserve.server.tickets import ClientGoneError

logger = logging.getLogger(__name__)

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ERROR_SCHEMA: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "Not done; the body says why.",
        "content": {"application/json": {"schema": ERROR_SCHEMA}},
    }
}


def create_app(
    engine: Engine, config: ServerConfig | None = None, *, stop: Stop | None = None
) -> FastAPI:
    """An ASGI app that serves `engine`, which belongs to it from the moment it starts.

    `stop(signal)` ends the HTTP server once SIGTERM or SIGINT has let the requests finish; by
    default the process is interrupted, which every server takes for its end. Raises ValueError for
    a chat template that cannot be used.
    """
    config = config or ServerConfig()
    service = make_service(engine, config)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        ending = Lifecycle(service.bridge, shutdown_timeout_s=config.shutdown_timeout, stop=stop)
        service.bridge.start()
        ending.listen()
        try:
            yield
        finally:
            ending.deafen()
            await service.bridge.close()
            service.workers.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        title="nanoserve",
        version=__version__,
        description="OpenAI's completions and chat API over a GPT-2 engine.",
        lifespan=lifespan,
        redirect_slashes=False,
        responses=ERRORS,
    )
    add_generating_routes(app, service)
    add_model_routes(app, service)
    add_token_routes(app, service)
    add_watching_routes(app, service)
    add_error_handlers(app)
    # The one added last is outermost: the key is asked for inside of CORS, so that a page may read
    # the refusal, and every response passes the front.
    if config.api_key is not None:
        app.add_middleware(KeyCheck, api_key=config.api_key)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "retry-after-ms"],
        )
    app.add_middleware(Front, metrics=service.metrics, root_path=config.root_path.rstrip("/"))
    return app


def takes(schema: Schema) -> dict[str, Any]:
    """The part of the OpenAPI document about a JSON body that the endpoint reads by itself."""
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
    }


def add_generating_routes(app: FastAPI, service: Service) -> None:
    events = {"text/event-stream": {"schema": {"type": "string"}}}
    both: dict[int | str, dict[str, Any]] = {200: {"content": events}}

    @app.post("/v1/completions", openapi_extra=takes(COMPLETION_SCHEMA), responses=both)
    async def completions() -> Response:
        """Continue prompts."""
        return Exchange(service, "completion")

    @app.post("/v1/chat/completions", openapi_extra=takes(CHAT_SCHEMA), responses=both)
    async def chat_completions() -> Response:
        """Answer a conversation."""
        return Exchange(service, "chat")


def add_model_routes(app: FastAPI, service: Service) -> None:
    created = int(time.time())

    def describe(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "nanoserve",
            "max_model_len": service.served.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [describe(name) for name in service.served.model_names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One model by its id, which may hold slashes."""
        service.served.check_model(name)
        return describe(name)


def add_token_routes(app: FastAPI, service: Service) -> None:
    async def answer(
        request: Request, work: Callable[[object, Service], dict[str, Any]]
    ) -> Response:
        raw = await read_body(request.scope, request.receive)

        content = await service.off_loop(
            lambda: dump(work(read_json(raw), service)).encode(),
            is_short=len(raw) <= SHORT_BODY_BYTES,
        )
        return Response(content, media_type="application/json")

    @app.post("/tokenize", openapi_extra=takes(tokens.TOKENIZE_SCHEMA))
    async def tokenize(request: Request) -> Response:
        """The token ids of a prompt, or of messages."""
        return await answer(request, tokens.tokenize)

    @app.post("/detokenize", openapi_extra=takes(tokens.DETOKENIZE_SCHEMA))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        return await answer(request, tokens.detokenize)

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """Sizes, special ids, chat template."""
        return tokens.tokenizer_info(service)


def add_watching_routes(app: FastAPI, service: Service) -> None:
    bridge = service.bridge

    @app.get("/live")
    async def live() -> dict[str, str]:
        """200 as long as the process answers at all."""
        return {"status": "live"}

    @app.get("/health")
    async def health() -> dict[str, str]:
        """200 while requests are served: warmed up, not ending, the engine sound."""
        if not bridge.is_ready:
            raise refusals.not_serving(bridge.why_not_ready)
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.text(), media_type=METRICS_TYPE)

    @app.get("/version")
    async def version() -> dict[str, Any]:
        """Which nanoserve this is, and what really runs."""
        really_runs = {**service.engine.describe(), "model": service.model_name}
        return {
            "version": __version__,
            "system_fingerprint": service.fingerprint,
            "engine": really_runs,
        }

    @app.get("/debug/requests/{name}")
    async def debug_request(name: str) -> dict[str, Any]:
        """A recent request's account, by the id of its answer or its x-request-id."""
        visit = service.visits.find(name)
        if visit is None:
            raise ApiError("no recent completion has this id", status=404, code="request_not_found")
        return await bridge.ask(lambda: debug.describe_visit(visit, service.engine))

    @app.get("/debug/invariants")
    async def debug_invariants() -> dict[str, Any]:
        """Whether queues, blocks and waiting clients add up, between two steps."""
        problems = await bridge.ask(bridge.thread.problems)
        if problems:
            raise ApiError(
                "; ".join(problems), status=500, type="server_error", code="invariants_broken"
            )
        return {"ok": True, "in_flight": bridge.num_in_flight}


def add_error_handlers(app: FastAPI) -> None:
    """Every error in OpenAI's shape, those of the router too."""

    def respond(error: ApiError) -> Response:
        content = dump(error.body()).encode()
        headers = dict(error.headers)
        return Response(content, error.status, headers, media_type="application/json")

    @app.exception_handler(ApiError)
    async def refused(_request: Request, error: ApiError) -> Response:
        return respond(error)

    @app.exception_handler(NotServingError)
    async def not_serving(_request: Request, error: NotServingError) -> Response:
        return respond(refusals.not_serving(str(error)))

    @app.exception_handler(ClientGoneError)
    async def nobody_reads(_request: Request, _error: ClientGoneError) -> Response:
        return Response(status_code=499)

    @app.exception_handler(404)
    async def unknown_url(request: Request, _error: Exception) -> Response:
        return respond(refusals.unknown_url(request.method, request.url.path))

    @app.exception_handler(405)
    async def wrong_method(request: Request, error: Any) -> Response:
        allowed = (error.headers or {}).get("Allow")
        if request.method == "OPTIONS":  # a preflight where CORS is off: nobody is let in by it
            return Response(status_code=204, headers={"allow": allowed or "GET, POST"})
        return respond(refusals.wrong_method(request.method, allowed))


class EnvironmentApp:
    """`uvicorn nanoserve.server:app`: loads the model that NANOSERVE_* name when the server starts.

    What cannot be honoured is reported to the server in one line, which then ends.
    """

    def __init__(self) -> None:
        self._app: FastAPI | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            try:
                self._app = await asyncio.to_thread(app_from_environment)
            except ValueError as error:
                await receive()
                await send({"type": "lifespan.startup.failed", "message": f"nanoserve: {error}"})
                return
        if self._app is None:
            raise RuntimeError("the model is loaded when the server starts: run it with lifespan")
        await self._app(scope, receive, send)


def app_from_environment() -> FastAPI:
    """Raises ValueError that names the variable or option."""
    config = read_server_config(os.environ)
    made = create_app(Engine(read_engine_config(os.environ)), config)
    settle_heap()
    return made


app = EnvironmentApp()
