"""A profiler window in a real training on the CPU: it attributes operators correctly, changes nothing, and is
removed."""

import pytest
import torch
from torch import nn

from amp_core import RunError, load_run
from amp_core.record import watch
from amp_core.record.backends.cuda import Cuda
from amp_core.record.observers.profile import ProfileWindow
from amp_core.record.torch_internals.module_calls import listeners
from amp_core.store.writer import RunWriter
from tests.record.loops import train


def hooks(model: nn.Module) -> int:
    return sum(len(listeners(m)) for m in model.modules())


def warnings(run):
    return run.events[run.events["kind"] == "warning"]["detail"].tolist()


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile") / "run"
    done = train(folder, torch.float16, clip=1.0, accumulate=2, profile=(4, 7))
    load_run(folder).validate(full=True)
    return done, load_run(folder)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_losses_are_the_same_bit_for_bit(tmp_path, dtype):
    watched = train(tmp_path / "run", dtype, clip=1.0, profile=(2, 5))
    assert watched.losses == train(None, dtype, clip=1.0).losses
    assert len(load_run(tmp_path / "run").kernels) > 0


def test_the_window_covers_the_requested_steps(profiled):
    _, run = profiled
    (window,) = run.windows.to_dict("records")
    assert (window["step"], window["steps"], window["device"]) == (4, 3, "cpu")
    assert window["device_name"]
    assert set(run.kernels["step"]) == {4} and set(run.kernels["steps"]) == {3}
    assert run.kernels["tensor_core"].isna().all()
    assert window["busy_us"] + window["idle_us"] == pytest.approx(window["wall_us"])
    # It opens within step 4, whose time begins with the end of step 3, and closes when step 7 has begun.
    ms = run.steps.set_index("step")["step_ms"]
    assert 1e3 * ms[5] < window["wall_us"] < 1e3 * ms.loc[4:7].sum()
    assert 0 < window["data_us"] < window["wall_us"] and 0 < window["watch_us"] < window["wall_us"]
    assert window["communication_us"] == window["communication_alone_us"] == 0


def test_the_time_of_an_operator_excludes_operators_it_calls(profiled):
    _, run = profiled
    (window,) = run.windows.to_dict("records")
    assert run.kernels["total_us"].sum() == pytest.approx(window["kernel_us"])
    assert window["kernel_us"] == pytest.approx(window["busy_us"], rel=0.05)  # one thread, so nothing overlaps


def test_matrix_products_have_their_module_phase_shapes_and_precision(profiled):
    _, run = profiled
    products = run.kernels[run.kernels["op"].isin(["aten::addmm", "aten::mm"]) & (run.kernels["phase"] != "watch")]
    assert set(products["category"]) == {"gemm"} and set(products["precision"]) == {"fp16"}
    forward = products[products["phase"] == "forward"]
    assert set(forward["module"]) == {"0", "2", "5"} and set(forward["top_op"]) == {"aten::linear"}
    assert forward["count"].sum() == 3 * 2 * 3  # steps, micro-batches, layers
    backward = products[products["phase"] == "backward"]
    assert set(backward["module"]) == {"0", "2", "5"} and set(backward["top_op"]) == {"AddmmBackward0"}
    assert backward["count"].sum() == 3 * 2 * (1 + 2 + 2)  # the input of the first layer needs no gradient
    assert forward[forward["module"] == "5"]["in_shapes"].tolist() == ["[[10], [16, 48], [48, 10], [], []]"]


def test_phases_are_distinguished(profiled):
    _, run = profiled
    rows = run.kernels
    assert set(rows[rows["op"] == "aten::cross_entropy_loss"]["phase"]) == {"forward"}
    assert set(rows[rows["op"] == "aten::randn"]["phase"]) == {"data"}
    unscaling = rows[rows["op"].str.startswith("aten::_amp_")]
    assert len(unscaling) and set(unscaling["phase"]) == {"optimizer"}
    assert set(rows[rows["op"].str.contains("addcdiv")]["phase"]) == {"optimizer"}
    own = rows[rows["phase"] == "watch"]["total_us"].sum()
    assert 0 < own < rows["total_us"].sum() / 2
    assert rows[rows["phase"].isna()]["total_us"].sum() < 0.02 * rows["total_us"].sum()


def test_the_model_itself_is_the_module_without_a_name(profiled):
    _, run = profiled
    assert (run.kernels["module"] == "").any()


def test_no_hook_or_profiler_stays(profiled):
    done, run = profiled
    assert hooks(done.model) == 0
    assert not torch.autograd._profiler_enabled()
    assert warnings(run) == []


def test_measuring_tensors_does_not_count_as_time_of_the_training(tmp_path):
    train(tmp_path / "bare", torch.float16, every=100, profile=(5, 7))
    train(tmp_path / "full", torch.float16, every=1, profile=(5, 7), level="full")
    without_kinds, full = load_run(tmp_path / "bare").kernels, load_run(tmp_path / "full").kernels
    users = [set(k[(k["phase"] != "watch") & (k["category"] != "other")]["op"]) for k in (without_kinds, full)]
    assert users[1] <= users[0] | {"aten::zero_", "aten::fill_"}
    count = [k[(k["op"] == "aten::addmm") & (k["phase"] != "watch")]["count"].sum() for k in (without_kinds, full)]
    assert count[0] == count[1] == 2 * 3


def test_a_window_may_begin_with_the_first_step(tmp_path):
    train(tmp_path / "run", profile=(0, 2))
    run = load_run(tmp_path / "run")
    assert (run.windows["step"].tolist(), run.windows["steps"].tolist()) == ([0], [2])


def test_a_run_that_ends_within_the_window_keeps_its_kernels_so_far(tmp_path):
    train(tmp_path / "run", steps=4, profile=(2, 9))
    run = load_run(tmp_path / "run")
    assert run.windows["step"].tolist() == [2] and run.windows["steps"].iloc[0] in (2, 3)
    assert hooks(nn.Linear(1, 1)) == 0 and not torch.autograd._profiler_enabled()


def test_a_run_that_ends_before_the_window_reports_that(tmp_path):
    train(tmp_path / "run", steps=3, profile=(50, 53))
    run = load_run(tmp_path / "run")
    assert warnings(run) == ["kernels of steps 50 to 52: the run ended before step 50"]
    assert len(run.windows) == 0


def test_another_profiler_is_left_alone_and_named(tmp_path):
    with torch.profiler.profile() as profiler:
        done = train(tmp_path / "run", steps=6, profile=(2, 4))
    assert warnings(load_run(tmp_path / "run")) == ["kernels of steps 2 to 3: another profiler is running"]
    assert any("addmm" in e.key for e in profiler.key_averages())
    assert done.losses == train(None, steps=6).losses and hooks(done.model) == 0


@pytest.mark.parametrize("breaks", ["prepare_trace", "stop_trace", "export_chrome_trace"])
def test_a_profiler_that_fails_loses_only_the_kernels(tmp_path, monkeypatch, breaks):
    def fail(*_):
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr(torch.profiler.profile, breaks, fail)
    done = train(tmp_path / "run", steps=6, profile=(2, 4))
    monkeypatch.undo()
    if torch.autograd._profiler_enabled():  # the profiler that could not be stopped
        torch.autograd._disable_profiler()
    run = load_run(tmp_path / "run")
    assert warnings(run) == ["kernels of steps 2 to 3: RuntimeError: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"]
    assert len(run.kernels) == 0 and len(run.steps) == 6
    assert done.losses == train(None, steps=6).losses and hooks(done.model) == 0


def test_a_module_that_accepts_no_hooks_loses_only_the_module_names(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("no hooks here")

    monkeypatch.setattr("amp_core.record.observers.profile._ModuleMarks._leave", fail)
    done = train(tmp_path / "run", steps=6, profile=(2, 4))
    run = load_run(tmp_path / "run")
    assert warnings(run) == ["modules of kernels: RuntimeError: no hooks here"]
    assert run.windows["steps"].tolist() == [2] and run.kernels["module"].isna().all()
    assert hooks(done.model) == 0


def test_a_compiled_model_has_kernels_without_modules(tmp_path):
    done = train(tmp_path / "run", steps=6, profile=(2, 4), wrap=lambda m: torch.compile(m, backend="eager"))
    run = load_run(tmp_path / "run")
    assert "modules of kernels: hooks do not reach into a compiled graph" in warnings(run)
    assert (run.kernels["op"] == "aten::addmm").any() and run.kernels["module"].isna().all()
    assert done.losses == train(None, steps=6).losses


def test_a_forward_that_raises_does_not_confuse_the_module_marks(tmp_path):
    class Picky(nn.Module):
        def forward(self, x):
            if x.sum() < 0:
                raise ValueError("picky")
            return x

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Picky(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run", profile=(1, 4)):
        for _ in range(5):
            for sign in (-10.0, 10.0):
                try:
                    with torch.no_grad():
                        model[0].bias.fill_(sign)
                    loss = model(torch.ones(2, 4)).sum()
                except ValueError:
                    continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = load_run(tmp_path / "run").kernels
    forward = rows[(rows["op"] == "aten::addmm") & (rows["phase"] == "forward")]
    assert forward.groupby("module")["count"].sum().to_dict() == {"0": 6, "2": 3}
    assert hooks(model) == 0


def test_a_checkpoints_second_forward_is_part_of_backward(tmp_path):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    model = nn.Sequential(Checkpointed(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run", profile=(1, 3)):
        for _ in range(4):
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = load_run(tmp_path / "run").kernels
    again = rows[(rows["op"] == "aten::addmm") & (rows["phase"] == "backward")]
    assert again[["module", "count"]].values.tolist() == [["0.inner", 2]]
    products = rows[(rows["op"] == "aten::mm") & (rows["phase"] == "backward")]
    assert products.groupby("module")["count"].sum().to_dict() == {"0.inner": 4, "1": 4}


def test_with_a_gpu_its_kernels_are_profiled_and_the_window_waits_for_them(tmp_path, monkeypatch):
    activities_requested, synchronized = [], []

    def profile_on_cpu(activities, **options):
        activities_requested.extend(activities)
        return torch.profiler.profile(activities=activities[:1], **options)

    monkeypatch.setattr("amp_core.record.observers.profile.profile", profile_on_cpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Cuda, "in_use", staticmethod(lambda: True))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: synchronized.append(len(activities_requested)))
    model = nn.Linear(4, 2)
    with RunWriter(tmp_path / "run") as writer:
        window = ProfileWindow(writer, model, 1, 2)
        window.step_ended(0)
        model(torch.ones(3, 4)).sum().backward()
        window.step_ended(1)
    activity = torch.profiler.ProfilerActivity
    assert activities_requested == [activity.CPU, activity.CUDA] and synchronized == [
        0
    ]  # once, before the profiler was created
    assert load_run(tmp_path / "run").windows["steps"].tolist() == [1]


def test_a_gpu_that_the_training_does_not_use_is_left_alone(tmp_path, monkeypatch):
    def touch():
        raise AssertionError("this creates a context on the GPU")

    monkeypatch.setattr(Cuda, "available", classmethod(lambda cls: True))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", touch)
    model = nn.Linear(4, 2)
    with RunWriter(tmp_path / "run") as writer:
        window = ProfileWindow(writer, model, 1, 2)
        window.step_ended(0)
        model(torch.ones(3, 4)).sum().backward()
        window.step_ended(1)
    run = load_run(tmp_path / "run")
    assert run.windows["device"].tolist() == ["cpu"] and len(run.kernels)


@pytest.mark.parametrize("window", [(3, 3), (-1, 2), (5, 2)])
def test_an_invalid_window_is_refused(tmp_path, window):
    with RunWriter(tmp_path / "run") as writer, pytest.raises(RunError, match="is not a window of steps"):
        ProfileWindow(writer, nn.Linear(1, 1), *window)
