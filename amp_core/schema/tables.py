"""The tables of a run folder: their columns, with types, units and defaults. Import them from `amp_core.schema`.

>>> TABLES["steps"].schema.field("step_ms").type
DataType(double)
"""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from amp_core.phases import PHASES


@dataclass(frozen=True)
class Column:
    """One column of the contract. `default` replaces a column that a file lacks; otherwise it is null."""

    name: str
    type: pa.DataType
    doc: str
    default: Any = None
    required: bool = False


@dataclass(frozen=True)
class Table:
    """One table of a run folder: its columns in order, and the columns by which its rows are ordered."""

    name: str
    doc: str
    shows: str
    """What is not known of a run without it."""
    order: tuple[str, ...]
    columns: tuple[Column, ...]

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema that a writer uses."""
        return pa.schema([pa.field(c.name, c.type) for c in self.columns])


def _column(name: str, kind: str, doc: str, default: Any = None, required: bool = False) -> Column:
    types = {"i": pa.int64(), "f": pa.float64(), "s": pa.string(), "b": pa.bool_()}
    types |= {"li": pa.list_(pa.int64()), "lf": pa.list_(pa.float64())}
    return Column(name, types[kind], doc, default, required)


_RANK = _column("rank", "i", "process rank that wrote the row", default=0)
_TIME = _column("time_s", "f", "seconds since the run was created")

TABLES: dict[str, Table] = {
    t.name: t
    for t in (
        Table(
            "steps",
            "one row per optimizer step attempted",
            "losses, loss scales, skipped steps and step times",
            ("step", "rank"),
            (
                _column("step", "i", "step number, from 0", required=True),
                _TIME,
                _column(
                    "loss",
                    "f",
                    ("loss that the step's gradients are derived from, unscaled, summed over its micro-batches"),
                ),
                _column("loss_scale", "f", "loss scale in effect at the step; 1 without a scaler"),
                _column("skipped", "b", "the scaler found a non-finite gradient and skipped the optimizer step", False),
                _column("growth_tracker", "i", "clean steps since the loss scale last changed"),
                _column("grad_norm", "f", "2-norm of all gradients of the optimizer, unscaled, before clipping"),
                _column("lr", "f", "learning rate of the first parameter group"),
                _column("samples", "i", "samples used by the step, all micro-batches together"),
                _column("step_ms", "f", "time from the end of the previous step to the end of this one"),
                *(_column(phase.column, "f", phase.meaning) for phase in PHASES.values()),
                _column("memory_allocated_bytes", "i", "GPU: by torch, null if not counted; CPU: resident set"),
                _column("memory_peak_bytes", "i", "highest value of the same so far"),
                _RANK,
                _column("optimizer", "i", "index of the optimizer that stepped, in the order given to watch", 0),
            ),
        ),
        Table(
            "tensors",
            "one row per sampled step × tensor × kind",
            "number ranges, underflow and overflow by layer, and predictions for other formats and loss scales",
            ("step", "rank"),
            (
                _column("step", "i", "step number", required=True),
                _column("name", "s", "name in model.named_parameters() or model.named_modules()", required=True),
                _column("kind", "s", "weight_grad, output_grad, activation or weight", "weight_grad"),
                _column("dtype", "s", "the tensor's own dtype, e.g. float16"),
                _column("loss_scale", "f", "factor by which the values were multiplied", 1.0),
                _column("numel", "i", "number of elements; the five counts add up to it"),
                _column("zero", "i", "exact zeros"),
                _column("subnormal", "i", "nonzero values below the smallest normal of the dtype"),
                _column("normal", "i", "finite values of full precision"),
                _column("inf", "i", "positive and negative infinities"),
                _column("nan", "i", "not-a-numbers"),
                _column("absmax", "f", "largest finite magnitude; 0 if there is none"),
                _column("rms", "f", "root of the mean square of the finite values"),
                _column("exp_min", "i", "exponent of the bin exp_counts[0]"),
                _column("exp_counts", "li", "finite nonzero values with floor(log2|x|) = exp_min + i"),
                _RANK,
                _column("absmin", "f", "smallest nonzero magnitude; 0 if there is none"),
                _column("abs_sum", "f", "sum of finite magnitudes: the gradient's mass"),
                _column("capped_min", "i", "exponent of the bin capped_counts[0]"),
                _column(
                    "capped_counts",
                    "li",
                    "weight_grad: as exp_counts, with each value capped at its channel's largest output gradient",
                ),
            ),
        ),
        Table(
            "blocks",
            "one row per sampled step × operand of a linear layer × product × way of scaling it",
            "predictions for formats with a scale per block",
            ("step", "rank"),
            (
                _column("step", "i", "step number", required=True),
                _column("name", "s", "name of a weight's parameter, otherwise of the module", required=True),
                _column("kind", "s", "weight, activation (the layer's input) or output_grad", required=True),
                _column(
                    "product",
                    "s",
                    "forward, input_grad or weight_grad: blocks extend along its contraction; null: the same for all",
                ),
                _column("dtype", "s", "the tensor's own dtype, e.g. bfloat16"),
                _column("block", "s", "values that share a scale: 16, 32, 128, row, tensor or, in tiles, 128x128"),
                _column("scaling", "s", "format and rule of the scale, e.g. e8m0 floor; `amp_core.quantization`"),
                _column("numel", "i", "number of elements"),
                _column("nonzero", "i", "finite nonzero values"),
                _column("absmax", "f", "largest finite magnitude; 0 if there is none"),
                _column("abs_sum", "f", "sum of finite magnitudes"),
                _column("sq_sum", "f", "sum of squares of finite values"),
                _column(
                    "counts",
                    "li",
                    "finite nonzero values by their distance below twice the top of their block: eighths of the "
                    "four highest octaves, then octaves",
                ),
                _column("ties", "li", "of these, the ones that are a power of two below the top, by octave"),
                _column("top_sums", "lf", "for each of `counts`: sum of the tops of the blocks of those values"),
                _column("top_squares", "lf", "the same for the squares of the tops"),
                _RANK,
            ),
        ),
        Table(
            "quantized",
            "one row per sampled step × operand of a linear layer × product that was really cast to 8 or 4 bits",
            "the casts to 8 and 4 bits, and what they lost",
            ("step", "rank"),
            (
                _column("step", "i", "number of the step", required=True),
                _column("name", "s", "the parameter of a weight, else the module", required=True),
                _column("kind", "s", "weight, activation (the layer's input) or output_grad", required=True),
                _column(
                    "product", "s", "forward, input_grad or weight_grad; null: one cast, or equal ones, for all of them"
                ),
                _column("recipe", "s", "a name of `amp_core.quantization.RECIPES`; null: none of them"),
                _column("library", "s", "who made the cast: torchao, transformer_engine or ampscope (emulated)"),
                _column("element", "s", "format of the values, e.g. fp8-e4m3"),
                _column("block", "s", "values that share a scale: 16, 32, 128, row, tensor or, in tiles, 128x128"),
                _column("dtype", "s", "dtype before the cast, e.g. bfloat16"),
                _column("numel", "i", "number of elements"),
                _column("nonzero", "i", "finite nonzero values before the cast"),
                _column("amax", "f", "largest finite magnitude before the cast"),
                _column("scale", "f", "by what values were multiplied before rounding; the smallest of the scales"),
                _column("scale_max", "f", "largest of the scales; the same as scale where there is one"),
                _column("scale_age", "i", "steps since the amax behind the scale was measured; 0: that of this tensor"),
                _column(
                    "saturated_frac",
                    "f",
                    "of nonzero values (TE's logs: of all), those beyond what the scale holds",
                ),
                _column(
                    "underflow_frac",
                    "f",
                    "of nonzero values (TE's logs: of all), those that became 0",
                ),
                _column("underflow_mass_frac", "f", "share of the sum of magnitudes that those carried"),
                _column("sq_error", "f", "sum of (after - before)^2"),
                _column("rel_error", "f", "root of sq_error over the sum of squares before the cast"),
                _column("casts", "i", "how often the operand was cast in the step"),
                _column("calls", "i", "calls of the layer in the step; null where its calls are not seen"),
                _RANK,
            ),
        ),
        Table(
            "device",
            "one row per device sample (NVML, GPM)",
            "utilisation, power and temperature of the devices",
            ("time_s", "index"),
            (
                _column("time_s", "f", "seconds since the run was created", required=True),
                _column("index", "i", "device index", 0),
                _column(
                    "gpu_util_frac", "f", "share of time in which any kernel ran (not a measure of tensor-core use)"
                ),
                _column("memory_used_bytes", "i", "device memory in use by all processes"),
                _column("power_w", "f", "power draw, watts"),
                _column("temperature_c", "f", "temperature, degrees Celsius"),
                _column("sm_active_frac", "f", "share of time in which multiprocessors were active (GPM)"),
                _column("tensor_active_frac", "f", "share of time in which tensor cores were active (GPM)"),
                _column("dram_active_frac", "f", "share of time in which device memory was moving data (GPM)"),
                _RANK,
                _column("hmma_active_frac", "f", "share of time in which tensor cores multiplied 16-bit floats (GPM)"),
                _column("memory_total_bytes", "i", "device memory in total"),
                _column("power_limit_w", "f", "power limit, watts"),
                _column("sm_clock_mhz", "f", "multiprocessor clock, MHz"),
                _column("mem_clock_mhz", "f", "memory clock, MHz"),
                _column("throttle", "s", "reason for reduced clocks, in words; `none` without one"),
            ),
        ),
        Table(
            "kernels",
            "one row per kernel × op × module × phase × shapes × profiled window",
            "kernels, and what ran on tensor cores",
            ("step", "rank"),
            (
                _column("step", "i", "first step of the profiled window; null if the trace has no step markers"),
                _column("name", "s", "kernel name as recorded by the profiler; on a CPU the operator", required=True),
                _column("count", "i", "launches in the window"),
                _column("total_us", "f", "time of all launches, microseconds; on a CPU the operator's self time"),
                _column("tensor_core", "s", "yes, no or unknown; null on a CPU", "unknown"),
                _column("precision", "s", "precision of its inputs, if the name or the op determines it"),
                _column("op", "s", "innermost operator that launched it, e.g. aten::addmm"),
                _column(
                    "module",
                    "s",
                    "module that launched it (in backward: the module whose forward it belongs to); empty: the "
                    "model; null: none",
                ),
                _column("phase", "s", "data, forward, backward, optimizer, or watch for AMPscope's own"),
                _RANK,
                _column("device", "s", "cuda:0, cpu, …"),
                _column("steps", "i", "steps in the window; null if the trace has no step markers"),
                _column(
                    "category",
                    "s",
                    "gemm, conv, attention, norm, elementwise, reduction, cast, layout, optimizer, embedding, memcpy, "
                    "memset, communication or other",
                ),
                _column("in_shapes", "s", "shapes of the operator's inputs, a JSON list as recorded by the profiler"),
                _column("in_dtypes", "s", "types of the operator's inputs, a JSON list as recorded by the profiler"),
                _column("top_op", "s", "outermost operator around it, e.g. aten::linear or AddmmBackward0"),
                _column(
                    "serves", "s", "on a CPU, the product of which it is a copy, fill, allocation or view; null if none"
                ),
                _column("longest_us", "f", "time of the longest launch; null where launches are not told apart"),
                _column("beside_us", "f", "part of total_us with a collective of the same device running beside it"),
                _column(
                    "counted_us",
                    "f",
                    "part of total_us that counts once: of kernels that run at the same time on a device, products "
                    "count first, then what began first; null where launches are not told apart",
                ),
                _column("moved_bytes", "i", "bytes that copies or fills move; null for kernels and where not recorded"),
                _column(
                    "lone_us",
                    "f",
                    "part of total_us in launches with no kernel right before or after on the stream that is of a kind "
                    "that compilers fuse; 0 on a CPU",
                ),
                _column(
                    "scores_us",
                    "f",
                    "part of total_us between two products of batches with a softmax and no other product between "
                    "them: on the scores of attention; 0 on a CPU",
                ),
                _column(
                    "fused_away_us",
                    "f",
                    "part of total_us that chains of kernels that memory bounds take beyond the longest kernel of "
                    "each; 0 on a CPU",
                ),
                _column(
                    "op_calls",
                    "i",
                    "of a product: calls of its operator that launch it first; one call may launch several, as for "
                    "parts; 0 for other kernels",
                ),
                _column(
                    "causal_count",
                    "i",
                    "of attention: launches by calls whose recorded argument says that the mask is causal",
                ),
                _column(
                    "convolution_flops",
                    "i",
                    "of forward convolutions: floating-point operations of their calls, by the recorded stride, "
                    "padding and dilation; 0 where these are not recorded",
                ),
            ),
        ),
        Table(
            "windows",
            "one row per profiled window × device",
            "busy and idle time of the devices",
            ("step", "rank"),
            (
                _column("step", "i", "first step of the window; null if the trace has no step markers"),
                _column("steps", "i", "whole steps in it; null if the trace has no step markers"),
                _column("device", "s", "cuda:0, cpu, …", required=True),
                _column("device_name", "s", "device name"),
                _column(
                    "wall_us",
                    "f",
                    "from the start of the first step to the end of the last and of its last kernel, on the device; "
                    "without step markers from the first kernel to the last",
                ),
                _column(
                    "busy_us", "f", "part of wall_us with a kernel, copy or fill running; on a CPU with an operator"
                ),
                _column("idle_us", "f", "the rest of wall_us: busy_us + idle_us = wall_us"),
                _column(
                    "reach_frac",
                    "f",
                    "share of the time by which all kernels but collectives are shorter, a quarter, that the window "
                    "ends sooner, while the host launches as it does; null on a CPU and without launches",
                ),
                _column("reach_half_frac", "f", "the same where they are shorter by half"),
                _column("reach_most_frac", "f", "the same where they are shorter by three quarters"),
                _column("reach_all_frac", "f", "the same where they take no time at all"),
                _column(
                    "unwaited_us",
                    "f",
                    "how much sooner the window ends if the host does not wait for the device in it; null on a CPU and "
                    "without launches",
                ),
                _column(
                    "unwaited_op",
                    "s",
                    "operator in which the host waited the longest between the first and the last launch, but not for "
                    "results that it works on; null outside operators",
                ),
                _column("unwaited_op_us", "f", "how long it waited there"),
                _column("unwaited_alone_us", "f", "as unwaited_us, without the waits in unwaited_op alone"),
                _column(
                    "optimizer_sooner_us",
                    "f",
                    "at most how much sooner the window ends if the host takes no time in an optimizer's marked steps; "
                    "0 without marks, null on a CPU and without launches",
                ),
                _column(
                    "longest_idle_us", "f", "the longest part of idle_us in one piece, without that within data_us"
                ),
                _column("data_us", "f", "host time spent loading data; null if nothing marks it"),
                _column("idle_data_us", "f", "part of idle_us within data_us"),
                _column(
                    "optimizer_us",
                    "f",
                    "on a CPU, time within marked steps of optimizers; null on others or without marks",
                ),
                _column(
                    "watch_us",
                    "f",
                    ("part of wall_us spent on recording only: its own kernels, or idle time during it"),
                ),
                _column("kernel_us", "f", "sum over kernels, copies and fills; more than busy_us if streams overlap"),
                _column("launches", "i", "kernels, copies and fills; null on a CPU"),
                _column("cast_us", "f", "sum over kernels of category cast"),
                _column("communication_us", "f", "part of busy_us with a communication kernel running"),
                _column("communication_alone_us", "f", "part of communication_us with nothing else running"),
                _column(
                    "idle_between_collectives_us",
                    "f",
                    "part of idle_us between two collectives with three other kernels at most between them",
                ),
                _column(
                    "copies_alone_us", "f", "part of busy_us with copies or fills, and no kernel except communication"
                ),
                _column("sync_us", "f", "host time spent waiting for the device in calls that synchronize"),
                _column("syncs", "i", "number of such calls"),
                _column("last_syncs", "f", "those of them after which the trace launches nothing more"),
                _column("inner_syncs", "f", "those of them between the first and the last launch of a step's kernels"),
                _RANK,
                _column(
                    "idle_sync_us",
                    "f",
                    "part of idle_us after the host waited for the device, at most as long as it waited; without data "
                    "loading",
                ),
                _column(
                    "idle_wait_us",
                    "f",
                    "part of idle_us, in gaps of 10 µs or more, in which launched work had not started",
                ),
                _column("idle_latency_us", "f", "the same in gaps below 10 µs, the latency of starting a kernel"),
                _column(
                    "idle_filling_us",
                    "f",
                    "part of idle_us in the first of several equal passes, while the queue of launches fills: later "
                    "ones do not wait for launches",
                ),
                _column(
                    "idle_late_start_us",
                    "f",
                    "part of idle_wait_us with nothing in the trace to wait for: in a window with work on one device "
                    "alone, and without host functions; without idle_graph_us",
                ),
                _column(
                    "idle_wait_lost_us",
                    "f",
                    "part of idle_wait_us that delays nothing, since what follows is launched too late in any case",
                ),
                _column("idle_graph_us", "f", "part of idle_wait_us that ends with the work of a captured graph"),
                _column(
                    "idle_handover_us",
                    "f",
                    "part of idle_wait_us between work of two streams, of which one waits for an event of the other",
                ),
                _column(
                    "idle_dispatch_us",
                    "f",
                    "part of idle_us, in gaps below 300 µs, in which the host had not launched the next kernel",
                ),
                _column(
                    "longer_gap_steps",
                    "f",
                    "steps of the window with longer gaps of that kind; null where no steps are marked",
                ),
                _column("longer_optimizer_us", "f", "part of these gaps in which the host is in an optimizer's step"),
                _column(
                    "longer_call",
                    "s",
                    "calls of these gaps that allocate memory, load kernels, set up the device or compile, the longest",
                ),
                _column("longer_call_us", "f", "how long the host was in calls of that kind during them"),
                _column("longer_compile_us", "f", "how long Triton compiled or loaded kernels beside those calls"),
                _column(
                    "longer_function",
                    "s",
                    "Python function in which the host spent the longest of the rest of these gaps, chosen as "
                    "host_function",
                ),
                _column("longer_function_us", "f", "how long it was in that function during them"),
                _column(
                    "longer_place",
                    "s",
                    "function, operator or range with most of that rest, of those with a third of their time in it and "
                    "half of the window at most",
                ),
                _column("longer_place_us", "f", "how long it was in that place during them"),
                _column("longer_second", "s", "the same of the gaps without longer_place"),
                _column("longer_second_us", "f", "how long it was in that place during them"),
                _column(
                    "longer_host_wait_us",
                    "f",
                    "part of longer_place_us and longer_second_us in collectives between hosts, as those of gloo",
                ),
                _column(
                    "longer_function_launches",
                    "f",
                    "calls that launch work of the window in that function and in what it calls, those of a graph too",
                ),
                _column(
                    "idle_between_waits_us",
                    "f",
                    "part of idle_us in which the host had not launched the next kernel, with few launches from one of "
                    "its waits to the next",
                ),
                _column("launches_between_waits", "f", "how many launches these are on average; 0 if there are none"),
                _column(
                    "host_op",
                    "s",
                    "operator in which the host spent the longest of lead_us and of longer gaps of that kind; null if "
                    "it spent them outside operators",
                ),
                _column("host_op_us", "f", "how long it was in that operator during them"),
                _column(
                    "host_function",
                    "s",
                    "Python function of the loop's thread in which the host spent the longest of the same, of 300 µs "
                    "or more and without longer ones that it calls; on a CPU, of idle_us without idle_data_us; null "
                    "without stacks",
                ),
                _column("host_function_us", "f", "how long it was in that function during them"),
                _column(
                    "host_function_launches",
                    "f",
                    "launches of the window that the host makes in that function and in what it calls",
                ),
                _column(
                    "host_second",
                    "s",
                    "the same as host_function without the time in that, of functions that do not call it",
                ),
                _column("host_second_us", "f", "how long it was in that second function during them"),
                _column("data_function", "s", "host_function during idle_data_us and lead_data_us"),
                _column("data_function_us", "f", "how long it was in that function during them"),
                _column(
                    "host_call",
                    "s",
                    "calls of one kind into the device's runtime, of 50 µs or more each and without waits, in which "
                    "the host spent the longest of lead_us and of all idle time before late launches; null if it spent "
                    "it outside such calls",
                ),
                _column(
                    "host_call_kind",
                    "s",
                    "that kind: allocation, uncached (allocation with a free between most launches), compiling, "
                    "torch.compile (while it compiles, whatever it calls), loading, graphs (with their captures), "
                    "copies, setup (with a first cudaFree of 20 ms or more) or other",
                ),
                _column("host_call_us", "f", "how long it was in calls of that kind during it"),
                _column("sync_op", "s", "operator in which the host waited the longest; null outside operators"),
                _column("inner_sync_op", "s", "the same of inner_syncs"),
                _column(
                    "lead_us",
                    "f",
                    "idle time before wall_us while the host was already in the first step, until the first kernel; "
                    "0 if the device does not mark its steps",
                ),
                _column("lead_data_us", "f", "part of lead_us spent loading data; null if nothing marks it"),
                _column(
                    "late_until_us",
                    "f",
                    "from the start of wall_us, of several steps from that of each, until nearly all idle time before "
                    "late launches is over; 0 without any",
                ),
                _column("late_us", "f", "lead_us and the part of idle_us in which the host had not launched"),
                _column("late_step", "i", "step with most of late_us; null where no steps are marked"),
                _column("late_step_us", "f", "part of late_us in that step"),
                _column(
                    "lead_outside_us",
                    "f",
                    "part of lead_us without lead_data_us in which the host is in no operator and no call; 0 if no "
                    "operator was recorded",
                ),
                _column(
                    "host_call_op",
                    "s",
                    "outermost operator in which the host was for the longest of host_call_us; null if it was in none",
                ),
                _column("host_call_op_us", "f", "how long it was in that operator during host_call_us"),
                _column("host_rest_op", "s", "as host_op, without the time in calls of that kind"),
                _column("host_rest_op_us", "f", "how long it was in that operator then"),
                _column(
                    "host_outside_us",
                    "f",
                    "how long the host was in no operator and no call, of the same time as host_rest_op; 0 if no "
                    "operator was recorded",
                ),
                _column(
                    "host_between",
                    "s",
                    "the two operators, one after the other, between which the longest of host_outside_us is; "
                    "`torch.tensor` for those of that function; null without such operators",
                ),
                _column("host_between_us", "f", "how much of host_outside_us is between these operators"),
                _column(
                    "alone_loading_us",
                    "f",
                    "part of communication_alone_us in which the host stays in one launch, as the first of a kernel",
                ),
                _column("products", "i", "GEMM/conv and attention that operators called, nested ones as one"),
                _column(
                    "began_us",
                    "f",
                    "when the host began the window, on the clock of collectives: its first step, or without step "
                    "markers what it did first; null if nothing of the host was recorded",
                ),
                _column(
                    "pause_us",
                    "f",
                    "the longest part of idle time before late launches in which the host is in no operator and no "
                    "call, mean over steps, if it is equally long in each of three or more steps; else 0",
                ),
                _column(
                    "idle_elsewhere_us",
                    "f",
                    "part of idle_us without idle_data_us in which another device of the process works, and which has "
                    "no other cause here",
                ),
                _column(
                    "idle_copy_us",
                    "f",
                    "part of lead_us and of idle_us before late launches right before or after a copy to the device "
                    "from memory that is not pinned, in gaps below 300 µs, or between two copies as in "
                    "idle_copy_sync_us",
                ),
                _column(
                    "idle_copy_sync_us",
                    "f",
                    "part of idle_sync_us between two copies of 64 KiB or more from or to memory that is not pinned, "
                    "in gaps in which the host is in other than their calls for less than 300 µs",
                ),
                _column(
                    "idle_profiling_us",
                    "f",
                    "part of lead_us, of alone_loading_us and of idle_us before late launches in which the profiler "
                    "does work of its own; on a CPU, of idle_us without idle_data_us",
                ),
                _column(
                    "host_us",
                    "f",
                    "host time in operators during the window, without waits for the device and calls of 50 µs or "
                    "more; without steps, at least from the first launch to the last, without these",
                ),
                _column(
                    "host_kernel",
                    "s",
                    "kernel, copy or fill that ends the longest of idle_us in longer gaps in which the host had not "
                    "launched it; null without such gaps",
                ),
                _column("host_kernel_us", "f", "how long these gaps before it are"),
                _column(
                    "host_range",
                    "s",
                    "the shortest range of the program's own (record_function) that contains half or more of lead_us "
                    "and of all idle time before late launches; on a CPU, of the window; null without one",
                ),
                _column("host_range_us", "f", "how much of them it contains"),
                _column(
                    "idle_sync_op",
                    "s",
                    "operator in which the host waited before most of idle_sync_us without idle_copy_sync_us; null "
                    "outside operators",
                ),
                _column("idle_syncs", "f", "synchronizations after which idle_sync_us without idle_copy_sync_us lies"),
                _column("idle_sync_op_us", "f", "part of idle_sync_us after its waits"),
                _column(
                    "idle_wait_op",
                    "s",
                    "operator in which the host waited during most of idle_wait_us; null outside operators",
                ),
                _column("idle_wait_op_us", "f", "part of idle_wait_us with the host in its waits"),
                _column("idle_wait_sync_us", "f", "part of idle_wait_us with the host in any wait for the device"),
            ),
        ),
        Table(
            "collectives",
            "one row per communication kernel of a profiled window, or without a device per collective of the host",
            "communication between devices",
            ("step", "rank", "number"),
            (
                _column("step", "i", "step in which it was launched; null if the trace has no step markers"),
                _column(
                    "number", "i", "its index among the collectives of its group in the step, in order of launch", 0
                ),
                _column("name", "s", "all_reduce, all_gather, reduce_scatter, all_to_all, …", "other"),
                _column(
                    "group", "s", "process group: its name, and its ranks if the trace has them; null: not recorded"
                ),
                _column("group_size", "i", "ranks of the group"),
                _column("dtype", "s", "dtype of the elements, e.g. bfloat16"),
                _column(
                    "message_bytes",
                    "i",
                    "bytes of the whole message: what all_gather gathers, or all_reduce and reduce_scatter reduce",
                ),
                _column("total_us", "f", "time of its kernel: waiting for the rank that enters last, and transfer"),
                _column("alone_us", "f", "part of total_us with no other kernel running on the device"),
                _column(
                    "launched_us",
                    "f",
                    "when its host launched it, on the clock of its machine; null if not known",
                ),
                _column("ended_us", "f", "when its kernel ended, on the same clock"),
                _column("phase", "s", "forward, backward, optimizer, …"),
                _column("device", "s", "cuda:0, …"),
                _column("kernel", "s", "kernel name"),
                _RANK,
            ),
        ),
        Table(
            "timeline",
            "one row per kernel, copy or fill of one profiled step, the one of median length",
            "the timeline of the profiled step",
            ("step", "rank", "start_us"),
            (
                _column("step", "i", "the step; null if the trace has no step markers"),
                _column("name", "s", "name as recorded by the profiler", required=True),
                _column("start_us", "f", "start time, from the start of the step on the device"),
                _column("total_us", "f", "duration"),
                _column("queue_us", "f", "from its launch to its start; null if the launch is unknown"),
                _column("stream", "i", "stream of the device"),
                _column("device", "s", "cuda:0, …"),
                _column("category", "s", "as in kernels"),
                _column("tensor_core", "s", "yes, no or unknown", "unknown"),
                _column("precision", "s", "precision of its inputs, if the name or the op determines it"),
                _column("phase", "s", "data, forward, backward, optimizer, or watch"),
                _column("module", "s", "as in kernels"),
                _column("op", "s", "innermost operator that launched it"),
                _column("occupancy_frac", "f", "occupancy as estimated by the profiler; null if not estimated"),
                _column("blocks_per_sm", "f", "blocks of the grid per multiprocessor; null if not recorded"),
                _RANK,
            ),
        ),
        Table(
            "ops",
            "one row per op × dtypes × shapes × policy × module × phase of a traced step",
            "operators, casts, and the precision of each module",
            ("step", "rank"),
            (
                _column("step", "i", "the traced step"),
                _column(
                    "module",
                    "s",
                    "module that called the op (in backward: the module whose forward it belongs to); empty: the "
                    "model; null: none",
                ),
                _column("op", "s", "operator name, e.g. aten::addmm", required=True),
                _column(
                    "policy",
                    "s",
                    "autocast policy that decided its dtype; none: it is in no list; not applied: it is in a list, "
                    "without effect; null: no autocast around it",
                ),
                _column("in_dtypes", "s", "dtypes of its tensor inputs, each once, separated by commas"),
                _column("out_dtype", "s", "dtype of its first output"),
                _column("count", "i", "calls"),
                _column("cast_bytes", "i", "bytes written by the casts that autocast made for it"),
                _RANK,
                _column("phase", "s", "forward (including the loss), backward or optimizer"),
                _column("device", "s", "cuda:0, cpu, …"),
                _column(
                    "autocast",
                    "s",
                    "dtype of the enclosing autocast region; disabled: a region switched off inside an active one; "
                    "null: no region",
                ),
                _column("in_shapes", "s", "shapes of its inputs, a JSON list as recorded by the profiler"),
                _column("out_bytes", "i", "bytes of its outputs"),
                _column("casts", "i", "casts that autocast made for it"),
                _column(
                    "cache_hits",
                    "i",
                    ("weights for which it used 16-bit copies that autocast had made for an earlier op"),
                ),
                _column("flops", "i", "floating-point operations of matrix products; null for other operators"),
                _column(
                    "cast_by", "s", "for casts, the origin: autocast, code, operator (inside), gradient (backward)"
                ),
                _column("cast_of", "s", "for casts, what is cast: parameter or other"),
                _column("repeated", "i", "casts of a tensor that had been cast to the same dtype before"),
                _column("undone", "i", "casts of a cast's result back to its original dtype"),
            ),
        ),
        Table(
            "audits",
            "one row per tensor per FP32-replay audit: of a gradient, or of a module's output in forward",
            "audits: measured underflow, and errors of outputs",
            ("step", "rank"),
            (
                _column("step", "i", "the audited step", required=True),
                _column("name", "s", "name of the parameter, or of the module", required=True),
                _column("loss_scale", "f", "loss scale of the replay", 1.0),
                _column("precision", "s", "recipe that was replayed against FP32"),
                _column("numel", "i", "number of elements"),
                _column("lost", "i", "nonzero in FP32, zero in the recipe"),
                _column("lost_mass_frac", "f", "share of the FP32 gradient's mass in those elements"),
                _column("rel_error", "f", "2-norm of the difference over 2-norm of the FP32 gradient"),
                _column("cosine", "f", "cosine between the two gradients"),
                _column("nonzero", "i", "elements that are nonzero in FP32"),
                _column("nonfinite", "i", "elements that are infinite or NaN in the recipe"),
                _RANK,
                _column("loss_change", "f", "loss of the batch in the recipe minus that in FP32"),
                _column(
                    "kind",
                    "s",
                    "weight_grad; activation: the module's output; compiled: that in compiled code against eager mode",
                    "weight_grad",
                ),
            ),
        ),
        Table(
            "updates",
            "one row per parameter and step for which the update was compared with one in float64",
            "what rounding took from updates of weights",
            ("step", "rank"),
            (
                _column("step", "i", "number of the step", required=True),
                _column("name", "s", "name of the parameter", required=True),
                _column("elements", "i", "elements compared: all, or evenly spaced ones of large tensors"),
                _column("unchanged_frac", "f", "of elements with a nonzero update, those that did not change"),
                _column("lost_mass_frac", "f", "sum of |after - before - u| over that of |u|, at most 1; u in float64"),
                _column("lost_decay_frac", "f", "share of weight decay that had no effect; null without weight decay"),
                _column("moved", "i", "elements with a nonzero update"),
                _column("dtype", "s", "dtype of the parameter"),
                _column("numel", "i", "elements of the parameter"),
                _column(
                    "cure",
                    "s",
                    "what prevents rounding from losing updates: fp32 masters, kahan summation, stochastic "
                    "rounding; null: nothing",
                ),
                _column("update_rms", "f", "root of the mean square of u"),
                _column("weight_rms", "f", "root of the mean square of the weights before the step"),
                _RANK,
                _column("optimizer", "i", "index of the optimizer that stepped, in the order given to watch", 0),
            ),
        ),
        Table(
            "averages",
            "one row per parameter and step for which an averaged 16-bit copy (EMA, SWA) was compared",
            "what rounding took from averaged weights",
            ("step", "rank"),
            (
                _column("step", "i", "number of the step", required=True),
                _column("name", "s", "name of the averaged parameter", required=True),
                _column("dtype", "s", "dtype of the average"),
                _column("elements", "i", "elements compared: all, or evenly spaced ones of large tensors"),
                _column("unchanged_frac", "f", "of elements that differ from their weight, those that did not change"),
                _column(
                    "lost_mass_frac", "f", "sum of |change - expected| over that of |expected|; null: decay unknown"
                ),
                _column("decay", "f", "decay of the average, estimated from elements that moved far enough"),
                _RANK,
            ),
        ),
        Table(
            "memory",
            "one row per moment of a sampled step: memory in use, and the peak since the previous moment",
            "memory by category, and the peak of a step",
            ("step", "rank", "number"),
            (
                _column("step", "i", "the sampled step", required=True),
                _column("number", "i", "index of the moment within the step, from 0", 0),
                _column(
                    "moment", "s", "step begins, module, forward ends, loss computed, backward begins, gradient, …"
                ),
                _column("name", "s", "the module that ran, or the parameter whose gradient was computed", ""),
                _column("phase", "s", "forward, backward or optimizer: the phase that ends with this moment"),
                _column("device", "s", "cpu, cuda:0, …"),
                _column("allocated_bytes", "i", "GPU: by torch, null if not counted; CPU: resident set"),
                _column("peak_bytes", "i", "peak of the same since the previous moment; null on a CPU"),
                _column("reserved_bytes", "i", "reserved by torch's allocator, in use or not; null on a CPU"),
                _column("parameters_bytes", "i", "parameters of the model"),
                _column("buffers_bytes", "i", "buffers of the model"),
                _column("gradients_bytes", "i", "gradients in .grad"),
                _column("optimizer_bytes", "i", "state of the optimizers"),
                _column(
                    "activations_bytes", "i", ("tensors that autograd saves for backward, without casts of weights")
                ),
                _column("autocast_bytes", "i", "16-bit copies of weights that autocast made and backward needs"),
                _RANK,
            ),
        ),
        Table(
            "events",
            "one row per event: started, skipped, non-finite, phase change, warning, ended, others of `EVENT_KINDS`",
            "why steps were skipped, what the recorder warned of, and all findings about calls and modules",
            ("time_s", "rank"),
            (
                _column("step", "i", "step during which it happened; null outside steps"),
                _TIME,
                _column("kind", "s", "what happened", required=True),
                _column("name", "s", "what it concerns: a tensor, a module, a setting", ""),
                _column("detail", "s", "in words", ""),
                _RANK,
                _column("value", "f", "the observed value; `EVENT_KINDS` says of what"),
                _column("limit", "f", "the limit it is compared with"),
                _column("count", "i", "number of affected elements, tensors or steps"),
                _column("dtype", "s", "dtype concerned, e.g. float16"),
                _column("phase", "s", "forward, backward or optimizer"),
                _column("op", "s", "operator or class of module responsible"),
                _column("optimizer", "i", "index of the optimizer concerned, in the order given to watch"),
            ),
        ),
    )
}
"""The tables of a run folder, by name."""
