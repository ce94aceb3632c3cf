"""Stores for remote runs: fsspec's in-memory filesystem, and moto's S3 server."""

import importlib.util
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator

import pytest

from amp_core.hardware.child_environment import python_path


@pytest.fixture
def memory() -> str:
    """The address of a fresh folder in fsspec's memory."""
    pytest.importorskip("fsspec", reason="addresses need fsspec: pip install '.[remote]'")
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of an object-store server on this machine."""
    for package in ("s3fs", "moto.server", "flask"):
        if importlib.util.find_spec(package.partition(".")[0]) is None:
            pytest.skip(f"{package} is not installed: pip install '.[test-anywhere]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            address = f"http://127.0.0.1:{port}"
            _await(address, server)
            yield address
        finally:
            server.terminate()


def _await(address: str, server: "subprocess.Popen[bytes]") -> None:
    for _ in range(6000):
        assert server.poll() is None, "moto's server ended at once"
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("moto's server does not answer")


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a fresh bucket; its server and made-up credentials are in the environment."""
    import s3fs

    for name, value in (
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", s3_server),
        ("NO_PROXY", "127.0.0.1"),
        *python_path().items(),
    ):
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem().mkdir(bucket)
    return f"s3://{bucket}"
