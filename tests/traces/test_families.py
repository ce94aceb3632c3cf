"""The same training in the layouts of several drivers gives the same rows."""

import pandas as pd
import pytest

from amp_core import diagnose, load_run
from amp_core.findings import first_sentence
from amp_core.traces import import_traces, read_trace
from tests.traces.families import FAMILIES, training_of
from tests.traces.made import write

MIB = 2**20


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def trace(tmp_path, family):
    return read_trace(write(tmp_path / "t.json", training_of(family)))


def test_work_is_linked_to_operators_modules_and_phases(trace, family):
    rows = pd.DataFrame(trace.kernels)
    assert set(rows["device"]) == {FAMILIES[family].device}
    product = rows[rows["name"] == FAMILIES[family].product].set_index("phase")
    assert product["total_us"].to_dict() == {"forward": 600, "backward": 400}
    assert set(product["op"]) == {"aten::mm"} and set(product["module"]) == {"Linear_0"}
    assert set(product["tensor_core"]) == {FAMILIES[family].tensor_core}
    assert rows.loc[rows["name"] == FAMILIES[family].other, "phase"].tolist() == ["optimizer"]


def test_step_and_busy_time_are_the_same(trace, family):
    (wall,), (busy,) = trace.windows["wall_us"], trace.windows["busy_us"]
    assert busy == 1300
    # Marks on the device begin with the first kernel and end with the last; tiny ones do not count.
    assert wall == (1650 if FAMILIES[family].marks == "whole" else 2000)
    assert trace.windows["launches"] == [8]


def test_memory_and_timeline_are_read(trace):
    assert [n / MIB for n in trace.memory["peak_bytes"]] == [12, 20, 10] * 2
    assert set(trace.memory["step"]) == {4, 5} and len(trace.timeline["name"]) == 4


def test_collectives_are_read(trace):
    assert trace.collectives["message_bytes"] == [1024] * 2 and trace.collectives["phase"] == ["backward"] * 2


def test_every_finding_and_the_first_sentence_can_be_said(tmp_path, family):
    run = load_run(import_traces([write(tmp_path / "t.json", training_of(family))], tmp_path / "run"))
    assert diagnose(run) and first_sentence(run).endswith(".")
