"""The guide to speed and memory."""

from amp_core.findings.guide.entry import Entry

ENTRIES = (
    Entry(
        "tf32-baseline",
        "warning",
        "The FP32 run that others are held against already uses TF32, so mixed precision looks as if it gained little.",
        "Kernels of precision tf32 in an FP32 run; torch's TF32 switches on a GPU that has it.",
        "One such kernel, or a switch that is on (compute capability 8.0 or newer). A remark for a trace, which does "
        "not say whether TF32 was meant.",
        "TF32 runs matrix products on tensor cores with 10 bits of mantissa, up to 8 times as fast as FP32. Turn it "
        "off for a fair baseline, or name the baseline TF32.",
        "torch.backends.cuda.matmul.allow_tf32 = False\ntorch.backends.cudnn.allow_tf32 = False",
        {
            "Transformers Trainer": 'args = TrainingArguments(output_dir="out", tf32=False)',
            "Lightning": 'torch.set_float32_matmul_precision("highest")',
        },
        page="compare",
    ),
    Entry(
        "no-tensor-cores-on-device",
        "warning",
        "The GPU has no tensor cores, so 16-bit matrix products are hardly faster there.",
        "Compute capability and name of the GPU.",
        "Capability below 7.0, or a Turing chip without them (GTX 16xx, T400 to T1200, MX450).",
        "Mixed precision saves memory here and little or no time. Stay in float32 unless memory is short, or take a "
        "GPU of the Volta generation or later.",
        "torch.cuda.get_device_capability()   # (7, 0) or more has tensor cores",
        page="",
    ),
    Entry(
        "launch-bound",
        "warning",
        "The GPU waits for the CPU to launch small kernels; casts of mixed precision add more of them.",
        "Busy and idle time of the GPU in profiled steps, and the length of its kernels.",
        "Idle more than half of the time, loading of data apart, with kernels of less than 10 µs on average: about "
        "what launching one takes.",
        "Faster arithmetic cannot help while the GPU waits. Give it larger batches, compile the model, capture CUDA "
        "graphs, and use fused optimizers.",
        'model = torch.compile(model, mode="reduce-overhead")\n'
        "optimizer = torch.optim.AdamW(model.parameters(), fused=True)",
        {
            "Transformers Trainer": 'args = TrainingArguments(output_dir="out", torch_compile=True, '
            'optim="adamw_torch_fused")',
        },
        page="step-cost",
    ),
    Entry(
        "kernels-off-tensor-cores",
        "warning",
        "Matrix products or convolutions in 16 bits run on kernels that do not use the tensor cores.",
        "Kernels of operators that have tensor-core kernels, by name.",
        "10 % of the time of all such operators: Amdahl allows at most that much to be won.",
        "The library chose a kernel without tensor cores, for the shape, the layout or its age. Let cuDNN try its "
        "algorithms, pad dimensions to multiples of 8, and use newer libraries.",
        "torch.backends.cudnn.benchmark = True\nmodel = model.to(memory_format=torch.channels_last)",
        page="tensor-cores",
    ),
    Entry(
        "unaligned-dims",
        "warning",
        "Dimensions of large matrix products are not multiples of 8, which tensor cores take 16-bit numbers in.",
        "Shapes of the weights of linear layers and convolutions.",
        "5 % of the weights of such layers. NVIDIA's guide to matrix multiplication: multiples of 16 bytes. It is a "
        "hint at efficiency: newer libraries use tensor cores anyway. On a CPU a remark.",
        "Such products are padded inside or run on slower kernels. Round vocabulary, channels and widths up to a "
        "multiple of 8.",
        "vocabulary = -(-vocabulary // 8) * 8\nhead = torch.nn.Linear(width, vocabulary)",
        {"Transformers Trainer": "model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=8)"},
        page="tensor-cores",
    ),
    Entry(
        "layout-transposes",
        "warning",
        "Convolutions turn their inputs from NCHW to NHWC and back at each call.",
        "Kernels that change the layout.",
        "5 % of the time of all kernels.",
        "Tensor-core convolutions want channels last, and the model gives channels first. Turn the model and its "
        "inputs once.",
        "model = model.to(memory_format=torch.channels_last)\nx = x.to(memory_format=torch.channels_last)",
        page="step-cost",
    ),
    Entry(
        "memory-not-lower",
        "warning",
        "Mixed precision does not lower the peak of memory.",
        "Memory by category, or the peak of an FP32 run beside it.",
        "Weights, gradients and optimizer state, which stay in FP32 under autocast, are 80 % of the peak or more; or a "
        "peak within 5 % of the FP32 run's.",
        "Autocast halves activations alone, and adds 16-bit copies of the weights. Use the room for larger batches, or "
        "lower what dominates: an 8-bit optimizer, sharding, checkpointing.",
        "from torch.utils.checkpoint import checkpoint\n\ny = checkpoint(block, x, use_reentrant=False)",
        page="memory",
    ),
    Entry(
        "host-syncs",
        "warning",
        "The CPU waits for the GPU in each step: for the scaler's flag, for `get_scale()` or for a logged loss.",
        "Calls that wait, per profiled step; `get_scale` in the order of calls.",
        "More than the one per step and optimizer that the scaler itself needs.",
        "While the CPU waits it launches nothing. Use a fused optimizer, which skips on the device, and read losses "
        "and scales only now and then.",
        "optimizer = torch.optim.AdamW(model.parameters(), fused=True)\n"
        "if step % 50 == 0:\n"
        "    print(loss.item(), scaler.get_scale())",
        {"Transformers Trainer": 'args = TrainingArguments(output_dir="out", optim="adamw_torch_fused")'},
        page="step-cost",
    ),
    Entry(
        "autocast-inactive",
        "warning",
        "A layer that autocast should run in 16 bits runs in float32.",
        "dtypes of output gradients, operators and kernels of linear layers and convolutions.",
        "5 % of the weights of such layers; below that a remark, for a small float32 part is often meant.",
        "The layer lies in a region where autocast is off, in another thread, or behind an operator that autocast does "
        "not know. Open the region around it, or leave it where float32 is meant.",
        "with torch.autocast(device_type, dtype=dtype):\n    y = layer(x)",
        page="precision-map",
    ),
    Entry(
        "graphed-callable-cache",
        "error",
        "`make_graphed_callables` refuses to run under autocast with its cache.",
        "The error that ended the run.",
        "torch's own words for it (torch/cuda/graphs.py).",
        "A captured graph cannot use cast weights that live only as long as an autocast region. Open the region "
        "without the cache.",
        "with torch.autocast('cuda', dtype=dtype, cache_enabled=False):\n"
        "    model = torch.cuda.make_graphed_callables(model, (x,))",
        page="",
    ),
    Entry(
        "watch-overhead",
        "info",
        "Watching itself takes a noticeable part of the time.",
        "Time spent watching over the time of all steps.",
        "5 % on average, the first steps apart.",
        "The times of this run are those of a watched one. Sample more seldom, or give a budget.",
        'watch(model, optimizer, into="runs/a", every=100, budget=0.02)',
        page="",
    ),
)
