"""Files of kilobytes that claim to hold gigabytes are refused before they are decoded."""

import zipfile
from pathlib import Path

import pyarrow as pa
import pytest

from amp_core import RunError, load_run
from amp_core.store.untrusted import limits
from tests.robustness.bombs import BOMBS
from tests.robustness.inputs import valid_files

FEW = 2**20
"""Bytes and values that are allowed here, so that the bombs are small ones."""


@pytest.mark.parametrize("name", BOMBS)
def test_a_decompression_bomb_is_refused_before_it_is_decoded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_BYTES", FEW)
    monkeypatch.setattr(limits, "MAX_VALUES", FEW)
    file = tmp_path / "bomb.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("run.json", valid_files()[0]["run.json"])
        archive.writestr(f"tensors/00000.{'arrows' if name.startswith('stream') else 'parquet'}", BOMBS[name](16 * FEW))
    assert file.stat().st_size < FEW // 8
    pool = pa.default_memory_pool()
    before = max(pool.max_memory(), pool.bytes_allocated() + 8 * FEW)
    with pytest.raises(RunError, match=r"holds .* values|(decodes|decompresses) to|of type .* runs do not use"):
        load_run(file).table("tensors")
    assert pool.max_memory() <= before
