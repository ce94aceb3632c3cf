"""The report as text: its content, its size as a single file, and that untrusted names in it stay text."""

import base64
import gzip
import html
import io
import json
import re

import pandas as pd
import pytest

from amp_core import RunError, load_run
from amp_core.__main__ import main
from amp_core.analysis import compare, precision_settings
from amp_core.report import report_html, texts
from amp_core.store.writer import RunWriter
from amp_core.text.html import tag
from tests.synthetic import SAMPLES, write, write_rows

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


def test_a_report_says_which_precision_was_requested_and_which_was_seen(tmp_path):
    asked = [{"stage": "reduction", "dtype": "float32", "source": "MixedPrecisionPolicy.reduce_dtype"}, EVIL]
    model = {"precision_asked": asked, "precision_seen": {"reduction": "bfloat16"}}
    run = load_run(write_rows(tmp_path / "a", steps={"step": [0, 1], "loss": [1.0, 0.5]}, model=model))
    shown = html.unescape(str(texts.precision(precision_settings(run))))
    assert "MixedPrecisionPolicy.reduce_dtype requests FP32 reduction; BF16 was observed." in shown
    assert "reduction</th><td>FP32</td>" in shown and EVIL not in shown


def packed(page, key):
    """The data that page.js unpacks."""
    result = re.search(rf'<script type="application/x-gzip" id="{key}">([^<]*)</script>', page)
    return gzip.decompress(base64.b64decode(result[1])).decode()


def text(page):
    """The visible text of the page."""
    body = page[page.index("<main>") : page.index("</main>")]
    return html.unescape(re.sub(r"<[^>]*>", " ", body))


def test_text_is_escaped():
    assert tag("p", EVIL, title=EVIL).count("<") == 2
    assert tag("p", tag("b", "x"), class_="a", hidden=True) == '<p class="a" hidden><b>x</b></p>'


def test_a_report_of_one_run_is_complete():
    run = load_run(SAMPLES["fp16-overflow"])
    page = report_html([run])
    page_text = text(page)
    assert "Findings" in page_text and "Loss scale" in page_text and "Settings and environment" in page_text
    assert str(run.head.environment["torch"]) in page_text
    titles = [c["light"]["layout"]["title"]["text"] for c in json.loads(packed(page, "charts")).values()]
    assert titles[0] == "Loss" and any("scale" in t for t in titles) and any("ranges" in t for t in titles)


def test_several_runs_are_compared_with_the_first():
    runs = [load_run(SAMPLES[name]) for name in ("fp32", "bf16", "fp16-healthy")]
    page = report_html(runs)
    page_text = text(page)
    assert "Comparison" in page_text and "What differs" in page_text
    assert re.search(r"fp16-healthy\s+fp16\s+[\d.]+ ms", page_text)  # the precision and the steps of each run
    for answer in compare(runs).answers.values():
        assert answer in page_text
    assert len(page.encode()) < 5_000_000
    assert page.count(packed(page, "plotly")[:200]) == 0  # packed, and only once
    assert page.count('id="plotly"') == 1
    titles = [c["light"]["layout"]["title"]["text"] for c in json.loads(packed(page, "charts")).values()]
    assert "Gradients against their FP32 replay" in titles


def test_each_table_is_offered_as_csv_and_parquet():
    runs = [load_run(SAMPLES[name]) for name in ("fp32", "bf16")]
    page, result = report_html(runs), compare(runs)
    links = re.findall(r'href="data:([^;]+);base64,([^"]*)" download="([^"]+)"', page)
    kinds = {"text/csv": ".csv", "application/vnd.apache.parquet": ".parquet"}
    assert all(name.endswith(kinds[media]) for media, _, name in links)
    assert len(links) == 2 * (3 + 2 * len(runs))  # the numbers and the settings of a run, whose tables are one file
    held = {name: base64.b64decode(data) for _, data, name in links}
    back = pd.read_parquet(io.BytesIO(held["recipes.parquet"]))
    assert back["speed_ratio"].tolist() == result.recipes["speed_ratio"].tolist()
    assert (
        pd.read_csv(io.BytesIO(held["what-differs.csv"]))["setting"].tolist() == result.differences["setting"].tolist()
    )
    assert {"runs.csv", "numbers.csv", "settings.parquet"} <= set(held)


def test_kernels_memory_and_operators_are_shown_if_they_were_recorded(tmp_path):
    page = report_html([load_run(write(tmp_path / "a", "profiled"))])
    titles = " ".join(c["dark"]["layout"]["title"]["text"] for c in json.loads(packed(page, "charts")).values())
    assert "kernel time" in titles.lower() and "Where the time of a step goes" in titles


def test_names_from_runs_are_only_text(tmp_path):
    config = {"precision": EVIL, EVIL: {EVIL: [EVIL]}}
    with RunWriter(tmp_path / "evil", name=EVIL, config=config, environment={"gpus": [{"name": EVIL}]}) as writer:
        writer.append("steps", {"step": [0, 1], "loss": [2.0, 1.0], "step_ms": [3.0, 3.0]})
    run = load_run(tmp_path / "evil")
    page = report_html([run, run])
    assert "<img" not in page and "onerror=alert(2)>" not in page
    assert re.findall(r"<script[^>]*>", page) == [
        '<script type="application/x-gzip" id="charts">',
        '<script type="application/x-gzip" id="plotly">',
        "<script>",
    ]
    assert EVIL in text(page)


def test_the_same_runs_give_the_same_file():
    run = load_run(SAMPLES["bf16"])
    assert report_html([run]) == report_html([run])


def test_runs_that_cannot_be_reported_are_refused(tmp_path, capsys):
    with pytest.raises(RunError, match="no steps"):
        report_html([load_run(write_rows(tmp_path / "empty"))])
    with pytest.raises(RunError, match="1 to 16"):
        report_html([])
    assert main(["report", str(SAMPLES["bf16"]), "--out", str(tmp_path / "no" / "r.html")]) == 2
    assert "out=" in capsys.readouterr().err


def test_the_command_writes_the_file_atomically(tmp_path, capsys):
    out = tmp_path / "r.html"
    assert main(["report", str(SAMPLES["fp32"]), str(SAMPLES["bf16"]), "--out", str(out)]) == 0
    assert "2 runs" in capsys.readouterr().out
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [f.name for f in tmp_path.iterdir()] == ["r.html"]


def test_the_command_replaces_no_file_that_is_not_a_report(tmp_path, capsys):
    run = write_rows(tmp_path / "run")
    head = (run / "run.json").read_bytes()
    assert main(["report", str(SAMPLES["bf16"]), "--out", str(run / "run.json")]) == 2
    assert "is inside the run" in capsys.readouterr().err
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["report", str(SAMPLES["bf16"]), "--out", str(tmp_path / "mine.txt")]) == 2
    assert "is a different kind of file" in capsys.readouterr().err
    assert main(["report", str(SAMPLES["bf16"]), "--out", str(run / "report.html")]) == 0  # beside the tables
    assert (run / "run.json").read_bytes() == head and (tmp_path / "mine.txt").read_text() == "mine"
    (tmp_path / "r.html").write_text("<!doctype html>")
    assert main(["report", str(SAMPLES["bf16"]), "--out", str(tmp_path / "r.html")]) == 0
