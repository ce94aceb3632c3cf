"""The app opens a folder of another machine with a file that would crash its process."""

from pages.parts import loaders
from tests.pages.conftest import words
from tests.robustness.inputs import valid_files
from tests.store.untrusted.test_sandbox import untrusted_run


def test_a_folder_that_would_crash_the_app_has_one_sentence(home, open_app, monkeypatch):
    files = valid_files()[0]
    sound = files["tensors/00000.parquet"]
    at = sound.rindex(b"\x1c\x15\x04\x19")  # an int64 column whose declared type is replaced
    untrusted_run(
        home.runs / "bad", files | {"tensors/00000.parquet": sound[:at] + b"\x1c\x15\x02\x19" + sound[at + 4 :]}
    )
    untrusted_run(home.runs / "good", files)
    app = open_app("pages/number_ranges.py", run="run/bad")
    assert not app.exception and "tensors/00000.parquet is damaged" in words(app)
    app = open_app("pages/number_ranges.py", run="run/good")
    assert not app.exception and "is damaged" not in words(app)
    assert loaders._sandbox._child is not None
    loaders._sandbox.close()
