"""The server: OpenAI's wire over the engine, for `nanoserve serve` and for any ASGI server.

From outside in: `front` (ids, keys, the last word on errors), `app` (routes), `exchange` (one
generating request), with `bodies`, `protocol` and `responses` for what is read and written; then
`bridge` and `tickets` (whose deltas are whose), and `engine_thread`, which alone touches the
engine. Importing this loads no model; `app` does so when a server starts it.
"""

from nanoserve.server.app import app, create_app

__all__ = ["app", "create_app"]
