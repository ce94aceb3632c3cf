"""The guide to number ranges, precision and dtypes."""

from amp_core.findings.guide.entry import Entry
from amp_core.findings.guide.scaling import BF16, LOOP

ISLAND = """\
class InFloat32(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return self.module(x.float())"""

ENTRIES = (
    Entry(
        "activation-overflow",
        "error",
        "A module's output does not fit float16: its largest number is 65504, what is larger becomes infinite.",
        "The first module, in the order of forward, with a non-finite float16 output from finite input and weights; "
        "outputs that come within a factor of 2 of the limit.",
        "One infinite value; a warning from 32752 on, where one doubling remains.",
        "No loss scale helps: it is the forward pass that overflows. Run this module in float32, bring its input or "
        "weights down, or use bfloat16.",
        ISLAND,
        BF16,
        page="layer-detail",
    ),
    Entry(
        "bf16-model-in-fp16",
        "error",
        "A model trained in bfloat16 runs in float16, whose range is smaller: its activations or weights overflow.",
        "Weights at the start: those from a bfloat16 checkpoint have 8 significant bits even when held in float32.",
        "99 % of the nonzero weights of matrices are exact in bfloat16 (1 in 65,536 of others is), or a weight is "
        "above 65504, and autocast is float16. A warning until something overflows.",
        "What bfloat16 holds up to 3e38 ends at 65504 here, so activations that were ordinary become infinite. Train "
        "it in bfloat16, as it was made.",
        "with torch.autocast(device_type, dtype=torch.bfloat16):\n    loss = loss_fn(model(x), y)",
        BF16,
        page="number-ranges",
    ),
    Entry(
        "eps-rounds-to-zero",
        "warning",
        "A small constant that keeps a divisor, root or logarithm off zero is itself zero in float16.",
        "Constants of additions and lower bounds whose result is 16-bit, in the first step; `eps` of a module that "
        "works in float16.",
        "A constant of at most 2^-25, half of the smallest float16 number: it rounds to 0. An error where something "
        "was not finite.",
        "Where the value beside it is zero, this divides by zero and gives NaN. Do this operation in float32, or make "
        "the constant 1e-4 or larger.",
        "with torch.autocast(x.device.type, enabled=False):\n"
        "    x = x.float()\n"
        "    y = x / (x.norm(dim=-1, keepdim=True) + 1e-6)",
        page="number-ranges",
    ),
    Entry(
        "optimizer-eps-rounds-to-zero",
        "error",
        "The optimizer's eps is zero in the dtype of its float16 parameters: an update is then 0/0 or huge.",
        "eps of the optimizer and dtypes of its parameters.",
        "At most 2^-25 with float16 parameters: half of the smallest float16 number rounds to 0.",
        "Where a second moment is zero, and in float16 it soon is, the update divides by zero. Keep float32 weights "
        "under autocast, or give the optimizer an eps of 1e-4.",
        "model.float()                                   # float32 weights; autocast does the rest\n"
        "optimizer = torch.optim.AdamW(model.parameters(), eps=1e-8)",
        page="",
    ),
    Entry(
        "mask-constant-overflow",
        "warning",
        "A mask uses a constant such as -1e9, which float16 cannot hold: it raises an error or becomes -inf.",
        "The error that ended the run; constants above 65504 in operators whose result is 16-bit, in the first step.",
        "Any finite constant above the largest number of its dtype. An error where the run ended of it or something "
        "was not finite.",
        "A row that is masked altogether is then -inf everywhere, and its softmax NaN. Take the smallest number of "
        "the dtype at hand.",
        "scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)",
        page="layer-detail",
    ),
    Entry(
        "bce-banned",
        "error",
        "`binary_cross_entropy` is refused under autocast on CUDA: its gradient does not fit float16.",
        "The error that ended the run, or the operator under autocast on another device.",
        "Any use (torch/csrc/autocast_mode.h lists it as banned). A warning on devices that allow it.",
        "The logarithm of a probability rounded to 16 bits loses what it needs. Leave the sigmoid out and use the "
        "loss that takes logits.",
        "loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, y)",
        page="",
    ),
    Entry(
        "batchnorm-poisoned",
        "error",
        "Running statistics of a normalisation layer hold NaN or infinity: training goes on, evaluation is broken.",
        "running_mean and running_var after each step (on a GPU after each tenth).",
        "One value that is not finite: an average that took one in never forgets it.",
        "A forward pass that was not finite went into the statistics; a scaler that skips the step does not undo that. "
        "Reset them, and where float16 overflowed, keep the input of that layer in float32.",
        "for module in model.modules():\n"
        "    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):\n"
        "        if not (module.running_mean.isfinite().all() and module.running_var.isfinite().all()):\n"
        "            module.reset_running_stats()",
        page="layer-detail",
    ),
    Entry(
        "lost-weight-updates",
        "warning",
        "Weights are stored in 16 bits and most updates are too small to change them.",
        "Elements that have a gradient and are the same after the step as before it.",
        "Half of the elements or more. An update below half a unit in the last place is lost: 2^-9 of a bfloat16 "
        "weight, 2^-12 of a float16 one (Mixed Precision Training, section 3.1).",
        "The optimizer computes updates that rounding throws away, so learning stalls. Keep the weights in float32 and "
        "let autocast cast them, or use stochastic rounding.",
        "model.float()\nwith torch.autocast(device_type, dtype=torch.bfloat16):\n    loss = loss_fn(model(x), y)",
        BF16,
        page="layer-detail",
    ),
    Entry(
        "half-accumulation",
        "warning",
        "A loss, a metric or gradients are added up in 16 bits: after a few hundred terms nothing is added any more.",
        "dtype of the loss that backward starts from, of buffers that grow, of gradients over several micro-batches; "
        "significant bits of the recorded loss.",
        "10 or more different losses that are all exact in 8 (bfloat16) or 11 bits (float16), or any such dtype: a sum "
        "256 (2048) times its term no longer moves. An error where the loss overflowed in it.",
        "The loss has two or three digits, and sums of it fewer. Compute and add up losses and metrics in float32.",
        "loss = loss_fn(model(x).float(), y)\ntotal += loss.detach().double()",
        page="",
    ),
    Entry(
        "custom-function-dtype",
        "error",
        "An operator got float16 and float32 together, mostly in a custom autograd function or layer that autocast "
        "does not handle.",
        "The error that ended the run.",
        "torch's own words for it: expected one scalar type and found another.",
        "Autocast casts the inputs of torch's operators, not those of one's own functions. Say what dtype they take.",
        "class MyFunction(torch.autograd.Function):\n"
        "    @staticmethod\n"
        '    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)\n'
        "    def forward(ctx, x): ...\n"
        "\n"
        "    @staticmethod\n"
        '    @torch.amp.custom_bwd(device_type="cuda")\n'
        "    def backward(ctx, grad): ...",
        page="",
    ),
    Entry(
        "checkpoint-dtype-mismatch",
        "warning",
        "Activation checkpointing computes a module again in another dtype than the first time.",
        "dtypes of outputs in forward and in the recomputation; the error of torch.utils.checkpoint.",
        "Any difference: gradients are then those of another function. An error where the run ended of it.",
        "The recomputation runs under other autocast settings than forward did. Use torch's checkpoint, which keeps "
        "them, and open no other autocast region around backward.",
        "from torch.utils.checkpoint import checkpoint\n\ny = checkpoint(block, x, use_reentrant=False)",
        page="",
    ),
    Entry(
        "backward-under-autocast",
        "warning",
        "backward() is called inside the autocast region.",
        "Autocast at the call of backward.",
        "Once. torch.amp: backward under autocast is not recommended; operators run in the dtypes of forward anyway. A "
        "remark in Lightning's manual optimization, which does so by design.",
        "Operators of backward that have no counterpart in forward are cast again, which costs time and can overflow. "
        "Close the region before backward.",
        LOOP,
        page="",
    ),
    Entry(
        "compile-autocast-mismatch",
        "warning",
        "A compiled model and autocast disagree: backward inherits autocast, or a graph break leaves it in another "
        "state.",
        "A compiled model with autocast on at backward, or other after forward than before.",
        "Once, with torch.compile.",
        "The compiled backward is traced under the autocast that is on when it is called. Call backward outside of "
        "the region, and compare its gradients with those of the eager model.",
        "model = torch.compile(model)\n\n" + LOOP,
        page="",
    ),
    Entry(
        "autocast-cache-no-grad",
        "error",
        "The model ran without gradients and then with, in one autocast region: the cached 16-bit weights of the first "
        "run have no graph, so these weights get no gradient.",
        "Parameters without a gradient in a step that had a forward under no_grad inside autocast.",
        "One such parameter.",
        "Autocast keeps the cast weights of the first run to the end of its region. Give the run without gradients a "
        "region of its own.",
        "with torch.no_grad(), torch.autocast(device_type, dtype=dtype):\n"
        "    target = model(x)\n"
        "with torch.autocast(device_type, dtype=dtype):\n"
        "    loss = loss_fn(model(x), target)",
        page="",
    ),
    Entry(
        "autocast-not-in-thread",
        "warning",
        "A part of the model runs in another thread, which does not inherit autocast and so computes in float32.",
        "Autocast in the threads in which modules run.",
        "A module run by another thread without autocast while it is on in the main one: its state is a thread's own.",
        "This part is neither faster nor smaller than in float32. Open autocast inside the function that the thread "
        "runs, or use DistributedDataParallel.",
        "def work(x):\n    with torch.autocast(device_type, dtype=dtype):\n        return block(x)",
        page="",
    ),
    Entry(
        "half-model",
        "warning",
        "The model, or a part of it, was turned to float16 with `.half()`, and nothing is left in float32.",
        "dtypes of parameters, and whether a scaler or autocast is at work.",
        "All parameters of a module and of what is in it in float16. An error where something was not finite that no "
        "skipped step kept off the weights.",
        "Weights, statistics and updates are then held in 11 bits, which autocast avoids. Keep float32 weights under "
        "autocast, and turn back to float32 or bfloat16 what must not overflow.",
        "model.float()\nscaler = torch.amp.GradScaler(device_type)\n\n" + LOOP,
        BF16,
        page="number-ranges",
    ),
    Entry(
        "amp-loss-gap",
        "warning",
        "The model learns worse in mixed precision than in FP32.",
        "Final losses of two runs of the same task, held against their noise; or gradients replayed in FP32.",
        "Worse by more than 5 % and by more than the noise of both runs; or a gradient whose cosine to FP32 is below "
        "0.99 in the median, an error of a seventh of its length.",
        "Rounding takes something that this model needs. Keep the parts that the audit or the comparison names in "
        "float32, or train in bfloat16 or TF32.",
        ISLAND,
        page="compare",
    ),
)
