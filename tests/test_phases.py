"""One line in `PHASES` is a new phase: of the table, the recorder's sums, analysis and charts."""

from amp_core import phases
from amp_core.analysis import PHASES, ranks
from amp_core.analysis.performance import step_cost
from amp_core.analysis.steps import TIMES
from amp_core.figures import colours
from amp_core.record import step_phases
from amp_core.schema import TABLES
from tests.edited_package import run_edited_copy


def test_the_phases_are_defined_once_and_in_one_order():
    names = ["data", "forward", "backward", "optimizer", "watch"]
    assert list(phases.PHASES) == names == list(step_phases.PHASES) and (*names, "other") == PHASES
    assert phases.COLUMNS == tuple(f"{name}_ms" for name in names) == TIMES[1:]
    assert [name for name in TABLES["steps"].schema.names if name.endswith("_ms")] == list(TIMES)
    assert list(step_cost.PHASE_LABELS) == list(colours.PHASES) == [*names, "other"]
    assert set(ranks.WAITING_PHASES["fsdp"]) < set(phases.COLUMNS)


def test_an_added_phase_is_recorded_analysed_and_drawn(tmp_path):
    line = 'Phase("communicate", "talking to ranks", "time between ranks"),'
    code = """
from amp_core import load_run
from amp_core.analysis import phase_times, speed_summary
from amp_core.figures import phase_figure
from amp_core.record.step_phases import HostClock, Phases
from amp_core.store.writer import RunWriter
from amp_core.traces.link import PHASES
marks = iter([0.0, 1.0, 3.0])
clock = Phases(HostClock(lambda: next(marks)))
clock.enter("communicate")
assert clock.totals(clock.take())["communicate"] == 2e3
with RunWriter("run") as writer:
    times = {"step_ms": [9.0] * 30, "forward_ms": [4.0] * 30, "communicate_ms": [3.0] * 30}
    writer.append("steps", {"step": list(range(30)), **times})
run = load_run("run")
phases_ms = speed_summary(run).phases_ms
assert (phases_ms["communicate"], phases_ms["other"]) == (3.0, 2.0), phases_ms
assert "communicate" in PHASES
print([trace.name for trace in phase_figure(phase_times(run)).data])
"""
    text = run_edited_copy(tmp_path, {"amp_core/phases.py": ('Phase("watch"', line)}, code)
    assert text.strip() == "['forward', 'talking to ranks', 'other']"
