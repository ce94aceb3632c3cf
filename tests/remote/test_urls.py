"""Addresses, paths, and lists of roots."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from amp_core import RunError, load_run
from amp_core.interop.event_files import read_log
from amp_core.interop.to_tensorboard import write_log
from amp_core.store.urls import Address, is_address, located, roots
from amp_core.store.writer import RunWriter


def test_text_with_a_scheme_is_an_address() -> None:
    for text in ("s3://bucket/runs", "gs://b/a", "memory://a", "simplecache::s3://b/k"):
        assert is_address(text) and str(located(text)) == text
    for text in ("runs/a", "/runs/a", "C:/runs", "C:\\runs", "s3:/bucket", "a:b"):
        assert not is_address(text) and isinstance(located(text), Path)


def test_an_address_has_the_interface_of_a_path() -> None:
    address = Address("s3://bucket/runs/a.zip/")
    assert (str(address), os.fspath(address)) == ("s3://bucket/runs/a.zip", "s3://bucket/runs/a.zip")
    assert (address.name, address.stem) == ("a.zip", "a")
    assert str(address.with_name("b")) == "s3://bucket/runs/b"
    assert address / "x" == Address("s3://bucket/runs/a.zip/x") and len({address, Address(str(address))}) == 1
    assert str(Address("memory://") / "a") == "memory://a"


@pytest.mark.skipif(os.pathsep != ":", reason="on Windows `;` separates paths, and colons are in nobody's way")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("runs", ["runs"]),
        ("runs:/data/runs", ["runs", "/data/runs"]),
        ("runs:s3://bucket/runs:/data", ["runs", "s3://bucket/runs", "/data"]),
        ("s3://a/b:gs://c/d", ["s3://a/b", "gs://c/d"]),
        ("hdfs://host:8020/runs:runs", ["hdfs://host:8020/runs", "runs"]),
        ("simplecache::s3://b/k:runs", ["simplecache::s3://b/k", "runs"]),
        ("s3://bucket/a:b\n runs:odd \n\n", ["s3://bucket/a:b", "runs:odd"]),
        (":", []),
        ("", []),
    ],
)
def test_roots_are_separated_and_addresses_stay_whole(text: str, expected: list[str]) -> None:
    assert [str(root) for root in roots(text)] == expected
    assert all(isinstance(root, Address) == ("://" in str(root)) for root in roots(text))


def test_fsspec_is_imported_only_for_addresses(tmp_path: Path) -> None:
    code = (
        "import sys, amp_core, amp_core.store.writer\n"
        f"amp_core.store.writer.RunWriter({str(tmp_path / 'a')!r}).close()\n"
        f"amp_core.load_run({str(tmp_path / 'a')!r}).steps\n"
        "print('fsspec' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_without_fsspec_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    how = (
        r"^path='s3://b/a' is an address, which needs fsspec; install it with `pip install 'DIR\[remote\]'`, where DIR"
    )
    with pytest.raises(RunError, match=how):
        load_run("s3://b/a")


def test_without_tensorboard_one_sentence_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("backend.event_processing.event_file_loader", "compat.proto.event_pb2"):
        monkeypatch.setitem(sys.modules, f"tensorboard.{module}", None)
    (tmp_path / "tfevents").touch()
    how = r"needs its package; install it with `pip install 'DIR\[tensorboard\]'`, where DIR is the folder"
    with pytest.raises(RunError, match=f"^reading TensorBoard's files {how}"):
        read_log(tmp_path)
    RunWriter(tmp_path / "a").close()
    with pytest.raises(RunError, match=f"^writing TensorBoard's files {how}"):
        write_log(load_run(tmp_path / "a"), tmp_path / "log")


def test_an_unknown_scheme_is_refused() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(RunError, match=r"^path='nope://b/a' cannot be read: .*nope"):
        load_run("nope://b/a")
