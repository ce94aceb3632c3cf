"""Attacks on a real server, over real sockets: foreign hosts and origins, path tricks, forged button presses."""

import contextlib
import http.client
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from streamlit.proto.WidgetStates_pb2 import WidgetState
from websockets.exceptions import InvalidStatus

from amp_core import jobs
from tests import synthetic
from tests.serve.running import Server, run_async, serving
from tests.serve.viewer import Seen, Viewer

SECRET = "the-secret-run"
SCRIPT = "def workload():\n    raise SystemExit('it was run')\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs, a private run outside it, and scripts inside and outside a folder."""
    home = tmp_path_factory.mktemp("attacked")
    synthetic.write(home / "runs" / "a", "healthy", steps=20)
    synthetic.write(home / SECRET, "healthy", steps=20)
    (home / "scripts").mkdir()
    (home / "scripts" / "mine.py").write_text(SCRIPT)
    (home / "outside.py").write_text(SCRIPT)
    (home / "scripts" / "link.py").symlink_to(home / "outside.py")
    return home


@pytest.fixture(scope="module")
def reading(home: Path) -> Iterator[Server]:
    """A read-only server for four sessions."""
    with serving(home / "runs", "--read-only", "--max-sessions", "4") as server:
        yield server


@pytest.fixture(scope="module")
def training(home: Path) -> Iterator[Server]:
    """A server that starts runs, and scripts of one folder."""
    with serving(home / "runs", "--scripts", str(home / "scripts"), "--max-jobs", "1") as server:
        yield server


def ask(server: Server, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str]:
    """Status and body of a request; its path is sent unmodified."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    with contextlib.closing(connection):
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read(200_000).decode("utf-8", "replace")


def ask_head(server: Server, path: str, **headers: str) -> int:
    """Only the status: an open WebSocket has no body to wait for."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode())
        return int(raw.recv(100).split()[1])


def see(server: Server, page: str = "", **query: str) -> Seen:
    """The content that a session is shown at an address."""

    async def go() -> Seen:
        async with Viewer(server.base) as viewer:
            return await viewer.open(page, **query)

    return run_async(go())


def refused(server: Server, **headers: str) -> bool:
    """Whether the server refuses a WebSocket with these headers."""

    async def go() -> bool:
        try:
            async with Viewer(server.base, headers=headers) as viewer:
                await viewer.open()
        except InvalidStatus as error:
            return error.response.status_code in (400, 403)
        return False

    return run_async(go())


HOSTS = ["evil.example", "evil.example:8501", "127.0.0.1.evil.example", "localhost@evil.example", "127.0.0.1/evil"]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("path", ["/", "/_stcore/health", "/_stcore/host-config", "/library"])
def test_a_foreign_host_header_is_refused(reading: Server, host: str, path: str) -> None:
    status, body = ask(reading, path, Host=host)
    assert status in (400, 403) and "AMPscope" not in body


def test_the_own_host_is_served_and_cannot_be_framed(reading: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", reading.port, timeout=300)
    with contextlib.closing(connection):
        connection.request("GET", "/", headers={"Host": f"localhost:{reading.port}"})
        answer = connection.getresponse()
        assert answer.status == 200 and answer.getheader("Content-Security-Policy") == "frame-ancestors 'self'"


def test_the_server_listens_only_on_loopback(reading: Server) -> None:
    own = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in own - {"127.0.0.1"}:
        if not str(address).startswith("127."):
            with socket.socket() as probe:
                probe.settimeout(2)
                assert probe.connect_ex((address, reading.port)) != 0
    listening = Path("/proc/net/tcp")
    if listening.exists():
        lines = [line.split() for line in listening.read_text().splitlines()[1:]]
        bound = [line[1] for line in lines if line[1].endswith(f":{reading.port:04X}") and line[3] == "0A"]
        assert bound == [f"0100007F:{reading.port:04X}"]


ORIGINS = ["http://evil.example", "null", "file://", "http://localhost.evil.example", "http://127.0.0.1:1", ""]


@pytest.mark.parametrize("origin", ORIGINS)
def test_a_foreign_origin_gets_no_session(reading: Server, origin: str) -> None:
    assert refused(reading, Origin=origin)


def test_a_foreign_origin_with_its_own_host_gets_no_session(reading: Server) -> None:
    """DNS rebinding: the attacker's name resolves to 127.0.0.1, so its pages and this server have the same origin."""
    foreign = {"Origin": "http://evil.example:8501", "Host": "evil.example:8501"}
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    key = {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
    assert ask(reading, "/_stcore/stream", **foreign, **upgrade, **key)[0] == 403
    own = {"Origin": reading.base, "Host": f"127.0.0.1:{reading.port}"}
    assert ask_head(reading, "/_stcore/stream", **own, **upgrade, **key) == 101
    assert refused(reading, **foreign)  # the client also sends its own Host header: two are refused like none


def test_a_foreign_origin_cannot_upload(training: Server) -> None:
    for headers in ({"Origin": "http://evil.example"}, {}):  # nor can a request without the token of a page
        assert ask(training, "/_stcore/upload_file/a/b", "PUT", **headers)[0] == 403


def test_a_read_only_server_refuses_uploads(reading: Server) -> None:
    assert ask(reading, "/_stcore/upload_file/a/b", "PUT", Origin=reading.base) == (403, "not for this server")


def test_sessions_beyond_the_limit_are_refused_until_one_closes(reading: Server) -> None:
    async def go() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(4):
                await stack.enter_async_context(Viewer(reading.base))
            with pytest.raises(InvalidStatus):
                await stack.enter_async_context(Viewer(reading.base))
        async with Viewer(reading.base) as viewer:
            assert (await viewer.open()).words

    run_async(go())


TRICKS = [
    "run/../../etc",
    "run/../the-secret-run",
    "run/a/../../the-secret-run",
    "../the-secret-run",
    "/etc/passwd",
    "run//etc",
    "run/%2e%2e/the-secret-run",
    "sample/../../../etc",
    "run/a\x00",
    "run\\..\\the-secret-run",
    "file:///etc/passwd",
    "s3://bucket/run",
    "http://127.0.0.1:1/run",
    "x" * 20_000,
]


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("page", ["", "library", "compare"])
def test_the_address_opens_only_listed_runs(reading: Server, page: str, trick: str) -> None:
    shown = see(reading, page, run=trick, **({"with": trick} if page == "compare" else {}))
    assert shown.errors == []
    message = shown.words.replace(trick.replace("\\", ""), "")
    assert SECRET not in message and "root:" not in message


def test_unknown_parameters_in_the_address_break_no_page(reading: Server) -> None:
    for query in ({"kind": "../x", "layer": "'; --"}, {"steps": "9" * 500}, {"step": "-1"}, {"layer": "<script>"}):
        for page in ("layer-detail", "number-ranges", "loss-scale"):
            assert see(reading, page, run="run/a", **query).errors == []


PATHS = [
    "/../../../../etc/passwd",
    "/..%2f..%2f..%2fetc%2fpasswd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "/static/../../../../etc/passwd",
    "/app/static/../../pyproject.toml",
    "/media/..%2f..%2f..%2fetc%2fpasswd",
    "/component/a/../../../../etc/passwd",
    "/_stcore/../../../etc/passwd",
    "//etc/passwd",
    "/.streamlit/secrets.toml",
    "/runs/a/run.json",
]


@pytest.mark.parametrize("path", PATHS)
def test_no_path_leads_to_a_file(reading: Server, path: str) -> None:
    status, body = ask(reading, path)
    assert "root:" not in body and "[project]" not in body and "run_id" not in body
    assert status >= 400 or "<!doctype html>" in body.lower()  # the app's own page for unknown addresses


def press(server: Server, page: str, *widgets: WidgetState) -> Seen:
    """Press a button, even one that the page does not show."""

    async def go() -> Seen:
        async with Viewer(server.base) as viewer:
            await viewer.open(page, run="run/a")
            return await viewer.again(*widgets)

    return run_async(go())


def folders(home: Path) -> set[str]:
    return {p.name for p in (home / "runs").iterdir()}


def test_a_read_only_server_ignores_forged_button_presses(home: Path, reading: Server, training: Server) -> None:
    start, library = see(training, "start", run="run/a"), see(training, "library", run="run/a")
    go = start.widget("button", "Start")
    delete = library.widget("button", "Delete")
    assert go is not None and delete is not None and library.of("file_uploader")
    before = folders(home)
    for page, button in (("start", go), ("library", delete)):
        shown = see(reading, page, run="run/a")
        assert shown.widget("button", button.label) is None and not shown.of("file_uploader")
        press(
            reading, page, WidgetState(id=button.id, trigger_value=True)
        )  # forged: its id comes from the other server
    assert folders(home) == before


def start_script(server: Server, script: str) -> Seen:
    """Try to start a script as a user workload."""
    page = see(server, "start", run="run/a")
    field = page.widget("text_input", "Or your own")
    assert field is not None
    go = page.widget("button", "Start")
    return press(
        server,
        "start",
        WidgetState(id=field.id, string_value=script),
        WidgetState(id=go.id, trigger_value=True),
    )


@pytest.mark.parametrize("script", ["{home}/outside.py:workload", "../outside.py:workload", "link.py:workload"])
def test_scripts_outside_the_allowed_folder_are_refused(home: Path, training: Server, script: str) -> None:
    before = folders(home)
    shown = start_script(training, script.format(home=home))
    assert "is a script that the app may not run" in shown.words
    assert folders(home) == before


def test_a_script_of_the_allowed_folder_starts_within_the_limit_of_trainings(home: Path, training: Server) -> None:
    before = folders(home)
    try:
        start_script(training, "mine.py:workload")
        started = folders(home) - before
        assert len(started) == 1
        assert "1 trainings are already running or queued" in start_script(training, "mine.py:workload").words
    finally:
        for name in folders(home) - before:
            jobs.find(home / "runs" / name).stop()


def test_without_an_allowed_folder_a_forged_script_is_not_run(home: Path, reading: Server, training: Server) -> None:
    page = see(training, "start", run="run/a")
    forged = (
        WidgetState(
            id=page.widget("text_input", "Or your own").id, string_value=str(home / "scripts/mine.py:workload")
        ),
        WidgetState(id=page.widget("button", "Start").id, trigger_value=True),
    )
    before = folders(home)
    shown = press(reading, "start", *forged)
    assert folders(home) == before and "read-only" in shown.words
