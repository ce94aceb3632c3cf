"""The queries over many runs in docs/reading.md return the values of the runs."""

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from amp_core import load_run
from amp_core.store.writer import RunWriter
from tests.paths import ROOT, SAMPLE_RUNS

READING = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder `runs` with three samples and a run of several segments with fewer fields in its head."""
    for name in ("fp32", "fp16-healthy", "fp16-overflow"):
        shutil.copytree(SAMPLE_RUNS / name, tmp_path / "runs" / name)
    with RunWriter(tmp_path / "runs" / "made", config={"precision": "bf16"}, seal_age_s=0.0) as writer:
        for step in range(5):
            writer.append("steps", {"step": [step], "loss": [1.0], "loss_scale": [1.0]})
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def expected(fleet: Path) -> pd.DataFrame:
    rows = []
    for folder in sorted(fleet.iterdir()):
        run = load_run(folder)
        rows.append(
            {
                "run": folder.name,
                "precision": run.head.config["precision"],
                "status": run.status,
                "steps": len(run.steps),
                "skipped_frac": run.steps.skipped.mean(),
                "last_scale": run.steps.loss_scale.iloc[-1],
                "last_loss": run.steps.loss.iloc[-1],
            }
        )
    return pd.DataFrame(rows).set_index("run")


def test_the_duckdb_query(fleet: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="DuckDB is not installed: pip install '.[test-anywhere]'")
    (query,) = re.findall(r"```sql\n(.*?)```", READING, flags=re.DOTALL)
    result = duckdb.sql(query).df()
    assert result["skipped_frac"].is_monotonic_decreasing and result["run"].iloc[0] == "fp16-overflow"
    pd.testing.assert_frame_equal(result.set_index("run").sort_index(), expected(fleet), check_dtype=False)


def test_the_spark_query(fleet: Path) -> None:
    pyspark = pytest.importorskip("pyspark", reason="Spark is not installed: pip install pyspark")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java, and there is none")
    (query,) = [b for b in re.findall(r"```python\n(.*?)```", READING, flags=re.DOTALL) if "pyspark" in b]
    query, changed = re.subn(r"s3a://bucket/runs", fleet.as_uri(), query)
    assert changed == 1 and query.rstrip().endswith(".show()")
    spark = pyspark.sql.SparkSession.builder.master("local[1]").getOrCreate()
    try:
        result: dict[str, object] = {"spark": spark}
        exec(
            compile(
                query.replace("steps.groupBy", "result = steps.groupBy").replace(".show()", ""), "reading.md", "exec"
            ),
            result,
        )
        frame = result["result"].toPandas().set_index("run").sort_index()  # type: ignore[attr-defined]
    finally:
        spark.stop()
    pd.testing.assert_frame_equal(frame, expected(fleet)[["steps", "skipped_frac"]], check_dtype=False)
