"""Labels beside a run: stored, normalised, and safe against untrusted files."""

import json

import pytest

from amp_core.library.labels import Label, label_file, label_of, write_label
from amp_core.schema import RunError


def test_a_label_is_read_back_normalised_and_an_empty_one_leaves_no_file(tmp_path):
    write_label(tmp_path / "a", Label("  the  good one ", ("x", "x", " y ", ""), " why\n"))
    assert label_of(tmp_path / "a") == Label("the good one", ("x", "y"), "why")
    write_label(tmp_path / "a", Label())
    assert not label_file(tmp_path / "a").exists() and label_of(tmp_path / "a") == Label()


@pytest.mark.parametrize("content", ["[1]", '{"name": 3, "tags": "x", "note": []}', "{", "[" * 10_000, "x" * 100_000])
def test_an_invalid_file_gives_an_empty_label(tmp_path, content):
    label_file(tmp_path / "a").write_text(content)
    assert label_of(tmp_path / "a") == Label()


def test_long_labels_are_cut(tmp_path):
    label_file(tmp_path / "a").write_text(json.dumps({"name": "n" * 500, "tags": ["t"] * 3, "note": "o" * 5000}))
    label = label_of(tmp_path / "a")
    assert (len(label.name), label.tags, len(label.note)) == (120, ("t",), 2000)


def test_an_unwritable_folder_raises_one_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="cannot be labelled"):
        write_label(tmp_path / "file" / "a", Label("x"))
