"""Faults that traces of a CPU show, with other programs, loaders and operators than in the zoo."""

from __future__ import annotations

from tests.findings.other_forms.form import fault
from tests.findings.zoo.cpu_traces import WORKERS, backward_of, backward_of_parts, decoding, import_cpu, looping
from tests.findings.zoo.traces import import_into, product, step
from tests.traces import made
from tests.traces.made import Made

ALONE = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


@fault("loader-start", "data loading")
def workers_that_end_late(into):
    trace, at = Made(), 5.0
    trace.op("aten::random_", 0, 5)
    for loading in (2000, 10, 10, 10, 10):
        trace.event("mark", WORKERS, at, loading, 1)
        trace.op("aten::addmm", at + loading, 200)
        at += loading + 200
    trace.event("mark", WORKERS, at, 3000, 1)
    import_cpu(into, trace)


@fault("loader-start", "data loading")
def workers_for_an_evaluation(into):
    trace = Made()
    trace.op("aten::random_", 0, 5)
    trace.op("aten::empty", 8000, 5)
    trace.event("mark", WORKERS, 8010, 100, 1)
    trace.op("aten::mkldnn_convolution", 8120, 900)
    import_cpu(into, trace)


@fault("waiting-for-data", "data loading")
def transforms_in_the_loop(into):
    trace = Made()
    for at in range(0, 5000, 1000):
        trace.event("mark", ALONE, at, 700, 1)
        trace.op("aten::div_", at + 10, 80)
        trace.op("aten::mkldnn_convolution", at + 700, 300)
    import_cpu(into, trace)


@fault("unfused-optimizer", "optimizer")
def adam_in_a_loop_over_parameters(into):
    trace = Made()
    for number in range(4):
        at = 2000 * number
        trace.event("mark", f"ProfilerStep#{number}", at, 2000, 1)
        trace.op("aten::mm", at + 10, 800)
        trace.event("mark", "Optimizer.step#Adam.step", at + 820, 1170, 1)
        for place in range(40):
            trace.op(
                ("aten::mul_", "aten::addcmul_", "aten::sqrt", "aten::addcdiv_")[place % 4], at + 830 + 28 * place, 26
            )
    import_cpu(into, trace)


@fault("python-outside-operators", "Python")
def simulation_in_python(into):
    trace = Made()
    for number in range(5):
        trace.event("mark", f"ProfilerStep#{number}", 1000 * number, 1000, 1)
        trace.op("aten::addmm", 1000 * number + 700, 200)
    import_cpu(into, trace)


@fault("python-outside-operators", "game.py(7): play")
def function_that_stacks_name(into):
    trace = Made()
    trace.event("python_function", "game.py(7): play", 0, 4000, 1)
    for at in (0, 3900):
        trace.op("aten::mm", at, 100)
    import_cpu(into, trace)


@fault("shared-processor", "processor")
def steps_slowed_by_another_program(into):
    trace, at = Made(), 0.0
    for number, us in enumerate((900, 900, 800, 850, 200, 200)):
        trace.event("mark", f"ProfilerStep#{number}", at, 10 * us, 1)
        for place in range(10):
            trace.op("aten::mm", at + place * us, us)
        at += 10 * us
    import_cpu(into, trace)


@fault("shared-processor", "processor")
def convolutions_that_stall_now_and_then(into):
    trace, at = Made(), 0.0
    for number in range(30):
        us = 9000.0 if number in (11, 12, 25) else 300.0
        trace.op("aten::mkldnn_convolution", at, us, **{"Input Dims": [[8, 3, 32, 32], [16, 3, 3, 3]]})
        at += us
    import_cpu(into, trace)


@fault("costly-calls", "operators")
def layers_of_single_numbers(into):
    trace = Made()
    for number in range(200):
        at = 200 * number
        trace.op("aten::linear", at, 190)
        trace.op("aten::t", at + 90, 1)
        trace.op("aten::addmm", at + 92, 5)
    import_cpu(into, trace)


@fault("costly-calls", "operators")
def views_of_a_tensor_in_a_loop(into):
    trace, at = Made(), 0.0
    for _ in range(300):
        for name in ("aten::select", "aten::index_select", "aten::mul", "aten::mm", "aten::stack"):
            trace.op(name, at, 2)
            at += 2
    import_cpu(into, trace)


@fault("fallback-convolution", "aten::slow_conv3d_forward")
def convolution_of_volumes(into):
    trace = Made()
    trace.op("aten::slow_conv3d_forward", 0, 700)
    trace.op("aten::mm", 700, 300)
    import_cpu(into, trace)


@fault("fallback-convolution", "aten::thnn_conv2d_forward")
def convolution_of_an_older_torch(into):
    trace = Made("old")
    trace.op("aten::thnn_conv2d_forward", 0, 800)
    trace.op("aten::relu", 800, 100)
    import_cpu(into, trace)


@fault("part-gradients", "SelectBackward")
def tokens_taken_one_by_one_by_an_older_torch(into):
    trace = Made("old")
    at = backward_of_parts(trace, 0.0, 12, "SelectBackward", us=30.0)
    trace.op("aten::mm", at, 4000)
    import_cpu(into, trace)


@fault("part-gradients", "SliceBackward0")
def halves_of_rotary_embeddings(into):
    trace, at = Made(), 0.0
    for _ in range(3):
        at = backward_of_parts(trace, at, 2, "SliceBackward0")
        trace.op("aten::mm", at, 1000)
        at += 1000
    import_cpu(into, trace)


@fault("attention-in-steps", "aten::_softmax")
def attention_with_scores_added(into):
    trace, at = Made(), 0.0
    for name, us in (("aten::baddbmm", 300), ("aten::add", 100), ("aten::_softmax", 300), ("aten::bmm", 300)):
        trace.op(name, at, us)
        at += us
    import_cpu(into, trace)


@fault("attention-in-steps", "aten::_softmax")
def attention_beside_layers(into):
    trace, at = Made(), 0.0
    for _ in range(4):
        for name, us in (("aten::addmm", 300), ("aten::bmm", 150), ("aten::_softmax", 150), ("aten::bmm", 150)):
            trace.op(name, at, us)
            at += us
    import_cpu(into, trace)


@fault("fp64-operators", "operators")
def recurrent_layers_of_doubles(into):
    trace = Made()
    for number in range(3):
        trace.op("aten::mkldnn_rnn_layer", 400 * number, 400, **{"Input type": ["double"] * 3})
    trace.op("aten::cat", 1200, 300, **{"Input type": ["float"]})
    import_cpu(into, trace)


@fault("fp64-operators", "operators")
def elementwise_operators_of_doubles(into):
    trace = Made()
    trace.event("mark", "ProfilerStep#4", 0, 1000, 1)
    for at, name in ((0, "aten::exp"), (400, "aten::mul"), (700, "aten::sum")):
        trace.op(name, at, 400 if at == 0 else 250, **{"Input type": ["double", "double"]})
    import_cpu(into, trace)


@fault("idle-gpu", "Tesla T4")
def model_left_on_the_cpu(into):
    trace = Made()
    trace.op("aten::addmm", 0, 1000)
    gpu = {"id": 0, "name": "Tesla T4", "computeMajor": 7, "computeMinor": 5}
    import_cpu(into, trace, gpu)


@fault("idle-gpu", "NVIDIA GeForce RTX 3060")
def quantized_layers_beside_a_gpu(into):
    trace = Made()
    trace.op("onednn::qlinear_pointwise", 0, 900)
    gpu = {"id": 0, "name": "NVIDIA GeForce RTX 3060", "computeMajor": 8, "computeMinor": 6}
    import_cpu(into, trace, gpu)


@fault("missing-kv-cache", "attention")
def batch_of_four_without_a_cache(into):
    import_cpu(into, decoding(*range(400, 440, 4)))


@fault("missing-kv-cache", "attention")
def decoding_on_a_gpu(into):
    trace, head = step(4000, "NVIDIA A100-SXM4-80GB")
    for number in range(12):
        dims = [[500 + number, 512], [512, 512]]
        trace.op("aten::mm", 300 * number, 20, **{"Input Dims": dims, "Input type": ["c10::Half"] * 2})
        trace.kernel(made.GEMM, 300 * number + 10, 285, 300 * number + 5)
    import_into(into, trace, **head)


@fault("operator-loop", "aten::bmm, aten::sigmoid, aten::mul")
def recurrence_of_small_products(into):
    trace = looping("aten::sigmoid", "aten::mul", passes=1, us=2.0)
    for number in range(40):
        at = 5000.0 + 130 * number
        for place, (name, us) in enumerate((("aten::bmm", 40.0), ("aten::sigmoid", 9.0), ("aten::mul", 8.0))):
            trace.op(name, at + 45 * place, us)
    import_cpu(into, trace)


@fault("operator-loop", "aten::select")
def heads_one_by_one_beside_a_gpu_that_was_not_recorded(into):
    trace = looping("aten::select", passes=300, us=4.0)
    for call in range(20):
        trace.event("call", "cudaLaunchKernel", 3000 + 20 * call, 6, 1, correlation=call + 1)
    import_cpu(into, trace)


@fault("activation-recomputation", "backward")
def convolutions_computed_again(into):
    import_cpu(into, backward_of(("aten::conv2d", 300.0), ("aten::batch_norm", 100.0), ("aten::relu_", 20.0)))


@fault("activation-recomputation", "backward")
def checkpoint_on_a_gpu(into):
    trace, head = step(2000, "NVIDIA A100-SXM4-80GB")
    trace.op("autograd::engine::evaluate_function: CheckpointFunctionBackward", 10, 150)
    for place, (name, us) in enumerate((("aten::layer_norm", 200), ("aten::linear", 800), ("aten::linear", 800))):
        trace.op(name, 20 + 20 * place, 15)
        trace.kernel(made.GEMM, 200 + 800 * place, us - 5, 25 + 20 * place)
    import_into(into, trace, **head)


@fault("layout-copies", "aten::clone")
def clones_before_each_layer(into):
    trace, at = Made(), 0.0
    for _ in range(8):
        for name, start, us in (("aten::clone", 0, 120), ("aten::copy_", 5, 110), ("aten::addmm", 120, 300)):
            trace.op(name, at + start, us)
        at += 420
    import_cpu(into, trace)


@fault("layout-copies", "aten::contiguous")
def weights_copied_on_a_gpu(into):
    trace, head = step(2000, "NVIDIA A100-SXM4-80GB")
    trace.op("aten::contiguous", 10, 30)
    trace.op("aten::copy_", 14, 20)
    trace.kernel(DIRECT_COPY, 60, 500, 18)
    product(trace, 565, 1400)
    import_into(into, trace, **head)


DIRECT_COPY = (
    "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>"
)
