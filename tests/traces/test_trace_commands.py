"""Commands that take a trace where they take a run."""

import tarfile

from amp_core.__main__ import main
from tests.traces.made import products, write


def test_a_trace_is_diagnosed_as_the_run_that_is_imported_from_it(tmp_path, capsys):
    file = write(tmp_path / "a.pt.trace.json", products().document())
    assert main(["diagnose", str(file)]) == 0
    at_once = capsys.readouterr().out
    assert main(["import-trace", str(file), "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["diagnose", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == at_once and "GEMM/conv" in at_once
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt.trace.json", "run"]
    assert main(["diagnose", str(file), "--mute", "host-bound"]) == 2
    assert "import the trace" in capsys.readouterr().err


def test_a_report_takes_traces_and_runs(tmp_path, capsys):
    file, out = write(tmp_path / "a.pt.trace.json", products().document()), tmp_path / "r.html"
    assert main(["import-trace", str(file), "--out", str(tmp_path / "run"), "--name", file.name]) == 0
    assert main(["report", str(tmp_path / "run"), "--out", str(out)]) == 0
    before, settings, _ = out.read_text(encoding="utf-8").partition("Settings and environment")  # with the run's id
    capsys.readouterr()
    assert main(["report", str(file), "--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8").startswith(before + settings) and "GEMM/conv" in before
    assert "1 run," in capsys.readouterr().out
    assert main(["pack", str(tmp_path / "run"), "--out", str(tmp_path / "packed")]) == 0  # not called .zip
    assert main(["report", str(tmp_path / "packed"), str(file), "--out", str(out)]) == 0
    assert "2 runs," in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt.trace.json", "packed", "r.html", "run"]


def test_files_that_are_no_packed_runs_are_refused_with_what_to_do(tmp_path, capsys):
    file = write(tmp_path / "a.pt.trace.json", products().document())
    assert main(["pack", str(file)]) == 2
    assert "import a profiler trace with ampscope import-trace" in capsys.readouterr().err
    (tmp_path / "b.json").write_text("[1, 2]")
    assert main(["diagnose", str(tmp_path / "b.json")]) == 2
    assert "trace='b.json' has a int among its events" in capsys.readouterr().err
    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as opened:
        opened.add(file, "a.json")
    assert main(["import-trace", str(archive), "--out", str(tmp_path / "run")]) == 2
    assert "is an archive; unpack it" in capsys.readouterr().err
