"""A client of the app's WebSocket that acts like a browser: opens pages, follows live ones, presses buttons.

    async with Viewer(server.base) as viewer:
        seen = await viewer.open("loss-scale", run="run/a")
        seen.seconds, seen.first_chart_s, seen.words

It speaks Streamlit's protocol (`BackMsg`, `ForwardMsg`) and keeps the elements that a browser would have drawn.
"""

import asyncio
import time
from dataclasses import dataclass, field
from http.cookies import SimpleCookie
from types import TracebackType
from typing import Any
from urllib.parse import urlencode

from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ClientState_pb2 import ClientState
from streamlit.proto.Delta_pb2 import Delta
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from streamlit.proto.WidgetStates_pb2 import WidgetState
from streamlit.web.server.starlette.starlette_server_config import XSRF_COOKIE_NAME
from websockets.asyncio.client import ClientConnection, connect


@dataclass
class Seen:
    """The elements that one pass of the script drew."""

    seconds: float = 0.0
    """From the request to the script's end."""
    first_chart_s: float | None = None
    received_bytes: int = 0
    elements: list[Any] = field(default_factory=list)
    not_found: bool = False
    """Whether the server answered, if only for a moment, that there is no such page."""
    sent_to: str = ""
    """The redirect of the last answer: where to sign in or out."""

    def of(self, kind: str) -> list[Any]:
        """The elements of one type, e.g. `plotly_chart`."""
        return [getattr(e, kind) for e in self.elements if e.WhichOneof("type") == kind]

    @property
    def words(self) -> str:
        """All text, without Markdown's escapes."""
        bodies = [e.body for kind in ("markdown", "heading", "text", "alert") for e in self.of(kind)]
        return "\n".join(bodies).replace("\\", "")

    @property
    def errors(self) -> list[str]:
        """Exceptions that the page shows."""
        return [f"{e.type}: {e.message}" for e in self.of("exception")]

    def widget(self, kind: str, label: str) -> Any:
        """The widget of that type and label; None if the page has none."""
        return next((w for w in self.of(kind) if w.label == label), None)


class Viewer:
    """One session."""

    def __init__(self, base: str, *, headers: dict[str, str] | None = None, patience_s: float = 300.0) -> None:
        self.url = base.replace("http", "ws", 1) + "/_stcore/stream"
        self.origin = base
        self.headers = headers or {}
        self.patience_s = patience_s
        self.fragments: dict[str, float] = {}
        """Live fragments and how often they want to be run again, seconds."""
        self.query = ""
        self.page = ""
        self.page_hash = ""
        self._socket: ClientConnection | None = None

    async def __aenter__(self) -> "Viewer":
        self._socket = await connect(
            self.url,
            additional_headers={"Origin": self.origin} | self.headers,
            subprotocols=["streamlit", *self._token()],  # type: ignore[list-item]
            max_size=None,
            open_timeout=self.patience_s,
            proxy=None,
        )
        return self

    def _token(self) -> list[str]:
        """The cookie against forged requests, sent again: without it the server ignores the signed-in user."""
        cookies = SimpleCookie(self.headers.get("Cookie", ""))
        return [cookies[XSRF_COOKIE_NAME].value] if XSRF_COOKIE_NAME in cookies else []

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None
    ) -> None:
        if self._socket is not None:
            await self._socket.close()

    async def open(self, page: str = "", **query: str) -> Seen:
        """Open a page by its address."""
        self.query, self.page, self.page_hash = urlencode(query), page, ""
        self.fragments.clear()
        return await self._pass(ClientState(query_string=self.query, page_name=page))

    async def again(self, *widgets: WidgetState) -> Seen:
        """Run the page again, with these widgets changed."""
        state = ClientState(query_string=self.query, page_script_hash=self.page_hash)
        state.widget_states.widgets.extend(widgets)
        return await self._pass(state)

    async def press(self, button: Any) -> Seen:
        """Press a button of the page."""
        return await self.again(WidgetState(id=button.id, trigger_value=True))

    async def tick(self) -> Seen:
        """Run the page's live fragment once more, as a browser's timer does."""
        fragment = next(iter(self.fragments))
        return await self._pass(
            ClientState(
                query_string=self.query, page_script_hash=self.page_hash, fragment_id=fragment, is_auto_rerun=True
            )
        )

    async def _pass(self, state: ClientState) -> Seen:
        assert self._socket is not None
        began = time.perf_counter()
        seen = Seen()
        timers: dict[str, float] = {}
        await self._socket.send(BackMsg(rerun_script=state).SerializeToString())
        async with asyncio.timeout(self.patience_s):
            while True:
                data = await self._socket.recv()
                assert isinstance(data, bytes)
                seen.received_bytes += len(data)
                message = ForwardMsg.FromString(data)
                kind = message.WhichOneof("type")
                if kind == "delta":
                    self._draw(message.delta, seen, time.perf_counter() - began)
                elif kind == "new_session":
                    timers = {}
                elif kind == "navigation":
                    self.page_hash = message.navigation.page_script_hash
                elif kind == "auth_redirect":
                    seen.sent_to = message.auth_redirect.url
                elif kind == "page_not_found":
                    seen.not_found = True
                elif kind == "auto_rerun":
                    timers[message.auto_rerun.fragment_id] = message.auto_rerun.interval
                elif kind == "page_info_changed":
                    self.query = message.page_info_changed.query_string
                elif kind == "script_finished" and message.script_finished != ForwardMsg.FINISHED_EARLY_FOR_RERUN:
                    # The whole page, not only a fragment.
                    if message.script_finished == ForwardMsg.FINISHED_SUCCESSFULLY:
                        self.fragments = timers
                    seen.seconds = time.perf_counter() - began
                    return seen

    @staticmethod
    def _draw(delta: Delta, seen: Seen, at_s: float) -> None:
        if delta.WhichOneof("type") != "new_element":
            return
        seen.elements.append(delta.new_element)
        if seen.first_chart_s is None and delta.new_element.WhichOneof("type") == "plotly_chart":
            seen.first_chart_s = at_s
