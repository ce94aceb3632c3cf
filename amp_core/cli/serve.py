"""`ampscope serve`: the app with a server's safety settings.

The command passes its rules to the server in an environment variable (`amp_core.library.permissions`) and becomes
`streamlit run server.py`, the file beside `app.py` that adds the checks.
"""

import argparse
import errno
import ipaddress
import os
import socket
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import amp_core
from amp_core.hardware.child_environment import python_path
from amp_core.library.permissions import HEAP, LOOPBACK, Rules, has_sign_in, host_name
from amp_core.schema import RunError
from amp_core.store.urls import with_extra

MAX_JOBS = 16
MAX_SESSIONS = 200
MAX_UPLOAD_MIB = 64
MAX_DISK_GIB = 100.0


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    command = subparsers.add_parser(
        "serve",
        help="start the app with security settings for a server",
        description="Serves the app only to this machine unless --address and --host say otherwise.",
        allow_abbrev=False,
    )
    command.add_argument("--runs", metavar="DIR", default="runs", help="folder of runs (default runs)")
    command.add_argument(
        "--also",
        metavar="PLACE",
        action="append",
        default=[],
        help="additional folder, or address such as s3://bucket/runs, whose runs are shown; repeatable",
    )
    command.add_argument(
        "--read-only", action="store_true", help=("disable starting, stopping, uploading and deleting runs")
    )
    command.add_argument(
        "--scripts",
        metavar="DIR",
        action="append",
        default=[],
        help="allow FILE.py:FUNCTION from this folder as a workload; repeatable (default: no scripts)",
    )
    command.add_argument("--port", type=int, default=8501, metavar="N", help="port to listen on (default 8501)")
    command.add_argument("--address", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    command.add_argument(
        "--host",
        metavar="NAME",
        action="append",
        default=[],
        help=("additional host name under which browsers reach the server; repeatable"),
    )
    command.add_argument(
        "--origin",
        metavar="URL",
        action="append",
        default=[],
        help=("additional allowed origin, for a proxy that rewrites Host"),
    )
    command.add_argument(
        "--max-jobs",
        type=int,
        default=MAX_JOBS,
        metavar="N",
        help=("maximum concurrent trainings (default %(default)s)"),
    )
    command.add_argument(
        "--max-sessions",
        type=int,
        default=MAX_SESSIONS,
        metavar="N",
        help="maximum open browser tabs (default %(default)s)",
    )
    command.add_argument(
        "--max-upload",
        type=int,
        default=MAX_UPLOAD_MIB,
        metavar="MIB",
        help=("maximum upload size (default %(default)s)"),
    )
    command.add_argument(
        "--max-disk",
        type=float,
        default=MAX_DISK_GIB,
        metavar="GIB",
        help="maximum total size of the runs folder (default %(default)g)",
    )
    command.add_argument("--no-browser", action="store_true", help="do not open a browser window")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Replace this process by the server; if the platform cannot, start the server and wait."""
    command, changes = prepared(arguments)
    _check_free(arguments.address, arguments.port)
    environment = HEAP | os.environ | changes
    if os.name != "nt":
        os.execve(command[0], command, environment)  # signals then reach the server
    return subprocess.call(command, env=environment)


def prepared(arguments: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The server's command and environment. Raises `RunError` if the arguments cannot be served."""
    rules = rules_of(arguments)
    if not is_loopback(arguments.address):
        _check_open(arguments.address, rules)
    runs = Path(arguments.runs).absolute()
    if runs.exists() and not runs.is_dir():
        raise RunError(f"runs={arguments.runs!r} is not a folder; give the folder that contains the run folders")
    if runs.exists():
        try:
            os.scandir(runs).close()
        except OSError as error:
            raise RunError(f"runs={arguments.runs!r} cannot be read: {error.strerror or error}") from None
    options = {
        "server.address": arguments.address,
        "server.port": str(arguments.port),
        "server.enableCORS": "true",
        "server.enableXsrfProtection": "true",
        "server.maxUploadSize": str(arguments.max_upload),
        "server.enableStaticServing": "false",
        "server.disconnectedSessionTTL": "30",  # a lost connection may come back; a closed tab keeps nothing
        "server.fileWatcherType": "none",  # a server's pages do not change, and watching the files costs every session
        "browser.gatherUsageStats": "false",
        "client.showErrorDetails": "type",
        "global.developmentMode": "false",
        "global.disableWidgetStateDuplicationWarning": "true",  # presets set fields that have a default
    }
    if arguments.no_browser:
        options["server.headless"] = "true"
    flags = [f"--{name}={value}" for name, value in options.items()]
    hosts = [f"--server.allowedHosts={name}" for name in rules.hosts]
    command = [sys.executable, "-m", "streamlit", "run", str(app_folder() / "server.py"), *flags, *hosts]
    places = "\n".join([str(runs), *arguments.also, ""])  # one per line: a folder's name may contain a colon
    return command, rules.environment() | {"AMPSCOPE_RUNS": places} | python_path()


def rules_of(arguments: argparse.Namespace) -> Rules:
    """The rules from the flags. Raises `RunError` for an invalid value."""
    for name in ("max_jobs", "max_sessions", "max_upload", "max_disk"):
        value = getattr(arguments, name)
        if not value > 0:
            raise RunError(f"{name}={value} is not a valid limit; give a number above 0")
    if not 0 < arguments.port < 65536:
        raise RunError(f"port={arguments.port} is not a valid port; give 1 to 65535")
    for folder in arguments.scripts:
        if not Path(folder).is_dir():
            raise RunError(f"scripts={folder!r} is not a folder; give the folder whose scripts may be run")
    for host in arguments.host:
        if host_name(host.removeprefix("*.")) != host.removeprefix("*.").lower():
            raise RunError(
                f"host={host!r} is not a host name; give one such as amp.example.org, without scheme and port"
            )
    for origin in arguments.origin:
        parts = urlsplit(origin)
        if parts.scheme not in ("http", "https") or f"{parts.scheme}://{parts.netloc}" != origin or not parts.netloc:
            raise RunError(f"origin={origin!r} is not an origin; give one such as https://amp.example.org")
    own = [] if _is_wildcard(arguments.address) else [arguments.address.lower()]
    return Rules(
        read_only=arguments.read_only,
        scripts=tuple(str(Path(folder).resolve()) for folder in arguments.scripts),
        hosts=tuple(dict.fromkeys([*LOOPBACK, *own, *(host.lower() for host in arguments.host)])),
        origins=tuple(arguments.origin),
        most_jobs=arguments.max_jobs,
        most_sessions=arguments.max_sessions,
        most_upload_bytes=arguments.max_upload * 2**20,
        most_disk_bytes=int(arguments.max_disk * 2**30),
    )


def app_folder() -> Path:
    """The folder of `app.py`: in the installed package, or beside it in a checkout."""
    package = Path(amp_core.__file__).parent
    for folder in (package / "_app", package.parent):
        if (folder / "server.py").is_file() and (folder / "pages").is_dir():
            return folder
    raise RunError(f"the app's pages are not beside {package}; install AMPscope from its wheel or a checkout")


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach `address`."""
    if address.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _check_open(address: str, rules: Rules) -> None:
    """Raise `RunError` if anyone on the network could start, stop and delete runs."""
    if any(has_sign_in(secrets) for secrets in _secrets()):
        for name in ("Authlib", "httpx"):
            if find_spec(name.lower()) is None:
                raise RunError(f"sign-in is configured and {name} is not installed; {with_extra('auth')}")
    elif not rules.read_only:
        raise RunError(
            f"address={address!r} lets everyone who can reach it start, stop and delete runs; add --read-only, or "
            "configure sign-in in section [auth] of .streamlit/secrets.toml"
        )


def _check_free(address: str, port: int) -> None:
    """Raise `RunError` if the server cannot listen there: Streamlit would print a traceback."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listening:
            if os.name != "nt":  # a server that has just ended leaves connections behind for a minute
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(where)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise RunError(
                f"port={port} is in use on {address}; give another --port, or stop the program that uses it"
            ) from None
        if error.errno == errno.EACCES:
            raise RunError(f"port={port} is reserved for privileged users; give one above 1023") from None
        raise RunError(
            f"address={address!r} is not an address of this machine ({error.strerror}); give one of its own, or "
            "0.0.0.0 for all"
        ) from None


def _secrets() -> Sequence[dict[str, object]]:
    """Streamlit's secrets, from the files that Streamlit reads."""
    parsed = []
    for folder in (Path.home(), Path.cwd(), app_folder()):
        file = folder / ".streamlit" / "secrets.toml"
        try:
            parsed.append(tomllib.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise RunError(f"{file} cannot be read as TOML: {error}") from None
    return parsed


def _is_wildcard(address: str) -> bool:
    return address in ("0.0.0.0", "::")
