"""The app opens a folder of another machine, whose file would end its process."""

from pages.parts import loaders
from tests.pages.conftest import words
from tests.robustness.inputs import honest
from tests.store.untrusted.test_sandbox import strangers


def test_a_folder_that_would_end_the_app_is_one_sentence(home, open_app, monkeypatch):
    files = honest()[0]
    sound = files["tensors/00000.parquet"]
    at = sound.rindex(b"\x1c\x15\x04\x19")  # a column of int64, whose type is made another
    strangers(home.runs / "bad", files | {"tensors/00000.parquet": sound[:at] + b"\x1c\x15\x02\x19" + sound[at + 4 :]})
    strangers(home.runs / "good", files)
    app = open_app("pages/number_ranges.py", run="run/bad")
    assert not app.exception and "tensors/00000.parquet is damaged" in words(app)
    app = open_app("pages/number_ranges.py", run="run/good")
    assert not app.exception and "is damaged" not in words(app)
    assert loaders._sandbox._child is not None
    loaders._sandbox.close()
