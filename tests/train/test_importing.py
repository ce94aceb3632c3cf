"""Imports without garbage collection."""

import gc
import sys

import pytest

from amp_core.train.engine.importing import collecting_later


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_within_and_afterwards_as_before(collects: bool) -> None:
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(ImportError), collecting_later():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("imported", [True, False])
def test_only_imports_are_left_out_of_later_collections(imported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo", gc)  # any module
    if not imported:
        monkeypatch.delitem(sys.modules, "torch._dynamo")
    frozen: list[None] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(None))
    with collecting_later():
        pass
    assert len(frozen) == (not imported)
