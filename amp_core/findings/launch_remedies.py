"""Advice for traces in which the device waits for launches, by what runs.

>>> NO_OPTIMIZER.snippet
'model = torch.compile(model, mode="reduce-overhead")'
"""

from amp_core.findings.model import Remedy
from amp_core.findings.snippets import FIND_WAITS

IN_PIECES = Remedy(
    "Faster arithmetic does not help while the GPU waits. Each call of compiled code replays many graphs, between "
    "which what is not captured is launched, as attention in serving engines: nothing breaks the graph, it is split on "
    "purpose. Capture whole passes where the engine can, split at fewer places, or use larger batches.",
    '# vLLM: --compilation-config \'{"cudagraph_mode": "FULL"}\'   # where the attention backend allows it',
)
OF_ENGINE = Remedy(
    "Faster arithmetic does not help while the GPU waits. The engine compiles the model in pieces, which it splits on "
    "purpose, and replays no graph: let it capture CUDA graphs, or use larger batches.",
    '# vLLM: --compilation-config \'{"cudagraph_mode": "FULL_AND_PIECEWISE"}\'',
)
BEYOND_CAPTURED = Remedy(
    "Faster arithmetic does not help while the GPU waits. The engine compiles the model in pieces, which it splits on "
    "purpose, and replays no graph. The smallest pass has {tokens:,} tokens, and by default it captures none of more "
    "than {most}: let it capture this size, or use larger batches.",
    "# vLLM: --compilation-config '{{\"max_cudagraph_capture_size\": {tokens}}}'   # or cudagraph_capture_sizes",
)
ON_NPU = Remedy(
    "Faster arithmetic does not help while the device waits. Use larger batches, torch_npu's fused operators and "
    "optimizers, and for inference its graphs.",
    "import torchair\n\nmodel = torch.compile(model, backend=torchair.get_npu_backend())   # inference",
)
FIRST_PASS = Remedy(
    "Most of this is the first of several equal series of launches, which sets up libraries, loads kernels and fills "
    "caches. Profile after a warm-up: what the later ones wait is what can be saved.",
    "for _ in range(5):\n    train_step(batch)   # before the profiler starts",
)
AT_START = Remedy(
    "The device waits for launches at the start alone: from then on the host is ahead of it, so faster launches save "
    "no more than that. Where it recurs in each pass, launch the next one before the results of this one are read.",
    "following = model(next_batch)   # where each pass waits; before results of the last one are read",
)
AT_START_OF_STEPS = Remedy(
    "The device waits for launches at the start of the step alone: from then on the host is ahead of it, so faster "
    "launches save no more than that. A host that waits for the device at the end of a step or early in it, as by "
    "torch.cuda.synchronize() or .item(), starts with nothing queued: leave such waits out, or read values a step "
    "later.",
    FIND_WAITS,
)
EARLY = Remedy(
    "From then on the host is ahead of the device. Where what comes before is set-up, captures of graphs or first "
    "passes, do it before the work that counts, and profile what follows; where each pass begins so, compile it or "
    "capture it too.",
    "for _ in range(5):\n    train_step(batch)   # before the profiler starts, in every size that occurs",
)
EARLY_BEFORE_GRAPH = Remedy(
    "From then on the host is ahead of the device. A graph is replayed already: where each pass begins so, upload it "
    "before the first replay, and launch what comes before it as one more graph or fewer kernels.",
    "graph.replay()   # once, before the profiler starts; in C++: cudaGraphUpload(graph, stream)",
)
LACKS_MODEL = Remedy(
    "Hardly anything runs on the device, and no product of matrices: what is to be made faster may not be in the "
    "trace. Profile that, after a warm-up.",
    "for _ in range(5):\n    train_step(batch)   # before the profiler starts",
)
BESIDE_GRAPH = Remedy(
    "Faster arithmetic does not help while the GPU waits. Each step replays one graph already, so nothing breaks it: "
    "what remains are the gaps between its kernels and between replays. Fuse small kernels, use larger batches, or "
    "launch the next replay before the results of this one are read.",
    "for x in batches:\n    static_x.copy_(x, non_blocking=True)\n    graph.replay()   # and read results afterwards",
)
AHEAD_OF_GRAPH = Remedy(
    "Faster arithmetic does not help while the GPU waits. Each step replays one graph already, and the host's waits "
    "for its results hardly delay the next: fuse small kernels, use larger batches, and shorten what the host does "
    "between replays.",
    "static_x.copy_(torch.cat(requests), non_blocking=True)   # more of them in each replay\ngraph.replay()",
)
"""Where the device hardly waits for calls that wait for it."""
UNBLOCKED = Remedy(
    "Each launch returns only when its kernel has ended, so the host is never ahead of the GPU. That is for finding "
    "errors: switch it off, and profile again before anything else is changed.",
    "env -u CUDA_LAUNCH_BLOCKING -u AMD_SERIALIZE_KERNEL python main.py   # and not in a debugger",
)
ONE_COPY = Remedy(
    "Values are copied to the host one by one, and each copy costs a call and a wait, whatever its bytes. Copy the "
    "whole tensor once, or reduce it on the device.",
    "values = x.tolist()   # one copy, instead of x[i].item() or x[i].cpu() in a loop",
)
SORTED_ANEW = Remedy(
    "A product with a sparse matrix that is not coalesced sorts its entries anew, and the host waits for their number; "
    "a transposed one is not coalesced. Coalesce it once, or keep it as CSR.",
    "weight = weight.t().coalesce()   # once, before the loop; or weight.to_sparse_csr()",
)
WAITS = "Faster arithmetic does not help while the GPU waits."
WAITS_ELSEWHERE = "Faster arithmetic does not help while the device waits."
REDUCE_OVERHEAD = 'model = torch.compile(model, mode="reduce-overhead")'
GRAPH_BREAKS = "   # TORCH_LOGS=graph_breaks names what breaks the graph"
BETWEEN_STEPS = Remedy(
    "The GPU is idle between steps: the host waits for it, and only then launches the first work of the next step. "
    "Start that work, as the copy of the next batch, before the wait, or wait in fewer steps.",
    FIND_WAITS,
)
NO_OPTIMIZER = Remedy(f"{WAITS} Use larger batches, compile the model, or capture CUDA graphs.", REDUCE_OVERHEAD)
"""Advice for traces of inference and of optimizers that are fused already."""
SCRIPTED = Remedy(
    f"{WAITS} The model is scripted by torch.jit, which torch.compile does not take: compile the module that was "
    "scripted instead, use larger batches, or capture CUDA graphs.",
    'model = torch.compile(module, mode="reduce-overhead")   # the module itself, without torch.jit.script',
)
RECURRENT = Remedy(
    f"{WAITS} Use larger batches, or capture CUDA graphs by hand: torch.compile leaves recurrent layers out of its "
    "graphs.",
    "model = torch.cuda.make_graphed_callables(model, (x,))   # inputs of fixed sizes",
)
RECURRENT_AND_OPTIMIZER = Remedy(
    f"{RECURRENT.advice} Use a fused optimizer, too.",
    f"{RECURRENT.snippet}\n"
    "optimizer = type(optimizer)(model.parameters(), lr=lr, fused=True)   # Adam, AdamW, SGD, Adagrad",
)
BEFORE_TRITON = Remedy(
    f"{WAITS} Use larger batches, or capture CUDA graphs by hand: this GPU is too old for torch.compile's Triton "
    "(compute capability 7.0).",
    RECURRENT.snippet,
)
BEFORE_TRITON_WITH_OPTIMIZER = Remedy(
    f"{BEFORE_TRITON.advice} Use a fused optimizer, too.", RECURRENT_AND_OPTIMIZER.snippet
)
WITHOUT_MODEL = Remedy(
    f"{WAITS_ELSEWHERE} No product of matrices runs here, and nothing repeats: the model may not be in the trace. "
    "Profile what it does, after a warm-up.",
    "for _ in range(5):\n    model(batch)   # before the profiler starts",
)
FUSED_OPTIMIZER = Remedy(
    f"{WAITS_ELSEWHERE} Nearly all launches are the optimizer's: its fused implementation needs a few.",
    "optimizer = type(optimizer)(model.parameters(), lr=lr, fused=True)   # Adam, AdamW, SGD, Adagrad",
)
COMPILED_OPTIMIZER = Remedy(
    f"{WAITS_ELSEWHERE} Nearly all launches are the optimizer's, which takes no fused=True: compile its step, or take "
    "one of torch.optim with fused=True, where it does the same.",
    "compiled_step = torch.compile(optimizer.step)",
)
COMPILED_STEP = "compiled_step = torch.compile(optimizer.step)   # the optimizer takes no fused=True"
OWN_OPTIMIZER = Remedy(
    f"{WAITS} Use larger batches, compile the model and the optimizer's step, or capture CUDA graphs.",
    f"{REDUCE_OVERHEAD}\n{COMPILED_STEP}",
)
OWN_OPTIMIZER_ELSEWHERE = Remedy(
    f"{WAITS_ELSEWHERE} Use larger batches, and compile the model and the optimizer's step.",
    f"model = torch.compile(model)\n{COMPILED_STEP}",
)
COMPILED = Remedy(
    f"{WAITS} Part of the model is compiled already: find what breaks its graph, so that more of it is, let the "
    "compiler capture CUDA graphs too, or use larger batches.",
    REDUCE_OVERHEAD + GRAPH_BREAKS,
)
BESIDE = " One compiled graph launches part of it, so no break of a graph shows: compile what is launched beside it"
COMPILED_ONCE = Remedy(
    f"{WAITS}{BESIDE}, let the compiler capture CUDA graphs too, or use larger batches.", REDUCE_OVERHEAD
)
GATHERED = "FSDP gathers weights between the blocks, so that no graph holds several"
SHARDED = Remedy(
    f"{WAITS} Use larger batches, or compile each block: {GATHERED}.",
    "for block in model.layers:\n    block.compile()   # before fully_shard(block)",
)
SHARDED_COMPILED = Remedy(
    f"{WAITS} Part of the model is compiled already: compile each block in one graph, for {GATHERED}, or use larger "
    "batches.",
    "for block in model.layers:\n    block.compile(fullgraph=True)   # before fully_shard(block)",
)
ALL_COMPILED = Remedy(
    f"{WAITS} All of it is launched from compiled code already: let the compiler capture CUDA graphs too, or use "
    "larger batches.",
    REDUCE_OVERHEAD,
)
ALL_COMPILED_ELSEWHERE = Remedy(
    f"{WAITS_ELSEWHERE} All of it is launched from compiled code already: use larger batches.", "x = torch.cat(inputs)"
)
DOES_NOT_FUSE = (
    " The model is compiled in one graph, but into one kernel per operator: its backend does not fuse, so take one "
    "that does, as inductor, or use larger batches."
)
UNFUSED = Remedy(
    f"{WAITS}{DOES_NOT_FUSE}",
    'model = torch.compile(model, backend="inductor", mode="reduce-overhead")   # not eager, aot_eager or ts',
)
UNFUSED_ELSEWHERE = Remedy(
    f"{WAITS_ELSEWHERE}{DOES_NOT_FUSE}", 'model = torch.compile(model, backend="inductor")   # not eager or aot_eager'
)
GRAPHS_AND_COMPILED = Remedy(
    f"{WAITS} Part of the model is compiled and replayed as graphs already: find what breaks its graph, so that more "
    "of it is, or use larger batches.",
    REDUCE_OVERHEAD + GRAPH_BREAKS,
)
UNBROKEN = Remedy(
    f"{WAITS} Each step replays one compiled graph forward and one backward, so nothing breaks it: compile what is "
    "launched beside them too, as the loss and the optimizer's step, or use larger batches.",
    'compiled_loss = torch.compile(lambda x, y: loss_fn(model(x), y), mode="reduce-overhead")\n'
    "compiled_step = torch.compile(optimizer.step)",
)
UNBROKEN_OF_INFERENCE = Remedy(
    f"{WAITS} Each call of compiled code replays one graph, so nothing breaks it: compile what is launched beside it "
    "too, or use larger batches.",
    REDUCE_OVERHEAD,
)
GRAPHS = Remedy(
    f"{WAITS} Graphs are replayed already: capture what is still launched kernel by kernel too, as the loss, "
    "zero_grad and a capturable optimizer, or use larger batches.",
    "with torch.cuda.graph(graph):   # the whole step, with inputs of fixed sizes\n"
    "    loss = loss_fn(model(x), y)\n    loss.backward()\n    optimizer.step()   # capturable=True",
)
GRAPHS_OF_INFERENCE = Remedy(
    f"{WAITS} Graphs are replayed already: capture what is still launched kernel by kernel too, or use larger batches.",
    "with torch.cuda.graph(graph):   # all of it, with inputs of fixed sizes\n    y = model(x)\ngraph.replay()",
)
ELSEWHERE = Remedy(
    f"{WAITS_ELSEWHERE} Use larger batches, compile the model, and use fused optimizers.",
    "model = torch.compile(model)\n"
    "optimizer = type(optimizer)(model.parameters(), lr=lr, fused=True)   # Adam, AdamW, SGD, Adagrad",
)
NO_OPTIMIZER_ELSEWHERE = Remedy(
    f"{WAITS_ELSEWHERE} Use larger batches, or compile the model.", "model = torch.compile(model)"
)
COMPILED_ELSEWHERE = Remedy(
    f"{WAITS_ELSEWHERE} Part of the model is compiled already: find what breaks its graph, so that more of it is, or "
    "use larger batches.",
    f"model = torch.compile(model){GRAPH_BREAKS}",
)
COMPILED_ONCE_ELSEWHERE = Remedy(f"{WAITS_ELSEWHERE}{BESIDE}, or use larger batches.", "model = torch.compile(model)")
"""Advice for accelerators without CUDA graphs."""
