"""The app behind a server's checks; `ampscope serve` starts it with `streamlit run server.py`.

Streamlit's own checks cover only the WebSocket, treat any port of this machine as the same site, and ask a server on
the internet for this machine's address when a foreign origin connects. `Guard` checks every request instead: the Host
must be an allowed one, the Origin the server's own, and no foreign page may show the app in a frame.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import streamlit as st
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse

from amp_core.library.permissions import Rules, current
from pages.parts import server

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'self'",  # clickjacking would reach Start and Delete
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # the address contains the run's name
}
READING = frozenset({"GET", "HEAD", "OPTIONS"})
POLICY_VIOLATION = 1008  # RFC 6455, 7.4.1; before the handshake is done, uvicorn answers 403
TRY_LATER = 1013


class Guard:
    """ASGI middleware that rejects requests that `rules` do not allow."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], rules: Rules) -> None:
        self.app = app
        self.rules = rules
        self.sessions = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        host, origin = headers.get("host"), headers.get("origin")
        doubled = len(headers.getlist("host")) > 1 or len(headers.getlist("origin")) > 1  # ambiguous
        allowed = not doubled and self.rules.host_allowed(host) and self.rules.origin_allowed(origin, host)
        if scope["type"] == "websocket":
            return await self._session(scope, receive, send, allowed)
        if not allowed or (self.rules.read_only and scope["method"] not in READING):
            return await PlainTextResponse("not for this server", 403)(scope, receive, send)

        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        return await self.app(scope, receive, with_headers)

    async def _session(self, scope: Scope, receive: Receive, send: Send, allowed: bool) -> None:
        full = self.rules.most_sessions is not None and self.sessions >= self.rules.most_sessions
        if not allowed or full:
            await send({"type": "websocket.close", "code": TRY_LATER if allowed else POLICY_VIOLATION})
            return
        self.sessions += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.sessions -= 1


app = st.App("app.py", middleware=[Middleware(Guard, rules=current())], lifespan=server.ready)
