"""The guide to the loss, the loss scale and the scaler's settings."""

from amp_core.findings.guide.entry import Entry

BF16 = {
    "Accelerate": 'accelerator = Accelerator(mixed_precision="bf16")',
    "Transformers Trainer": 'args = TrainingArguments(output_dir="out", bf16=True, fp16=False)',
    "Lightning": 'trainer = Trainer(precision="bf16-mixed")',
}
LOOP = """\
with torch.autocast(device_type, dtype=torch.float16):
    loss = loss_fn(model(x), y)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
optimizer.zero_grad()"""

ENTRIES = (
    Entry(
        "calibration-skips",
        "info",
        "The scaler skips steps while it finds its scale, and once after a growth. That is its way of working, as "
        "long as it costs few steps.",
        "Steps whose gradients were not finite, with the scale before and after.",
        "Skips that begin in the first 25 steps (from 2^16 to 1 takes 16), later ones no more than growths. A warning "
        "where growing costs more than 2 % of the steps, as PyTorch expects one skip in some hundreds, or where the "
        "first scale took more than 25 halvings.",
        "An info needs no change: a GradScaler starts high, backs off at an overflow, and tries a larger scale after "
        "each growth interval. A warning costs a batch at each skip: use the default `growth_interval=2000` where the "
        "scale grows too often, and `init_scale=2.0**16` where it began too high.",
    ),
    Entry(
        "scale-collapse",
        "error",
        "Step after step is skipped and the loss scale falls below 1: gradients are not finite at any scale.",
        "Consecutive skips, the scale, and whether the forward pass itself was finite.",
        "5 skips in a row and a scale below 1, where scaling only shrinks gradients. PyTorch's GradScaler says that a "
        "scale below 1 means that float16 cannot hold the gradients. A warning where the last steps were made again.",
        "A smaller loss scale no longer helps: gradients are not finite whatever they are multiplied by, so the "
        "overflow is in the forward pass, the data or the learning rate. Check that the loss is finite, keep the "
        "module where it overflows in float32, or use bfloat16.",
        "with torch.autocast(device_type, dtype=torch.bfloat16):   # the range of float32: no GradScaler\n"
        "    loss = loss_fn(model(x), y)\n"
        "loss.backward()\n"
        "optimizer.step()",
        BF16,
    ),
    Entry(
        "loss-nonfinite",
        "error",
        "The loss is NaN or infinite. Gradients that are not finite are skipped; such a loss is never normal.",
        "The recorded loss, the first module whose output was not finite, and whether the loss rose before.",
        "One such loss. One that was not recorded says nothing. A loss that rose 10-fold or more while everything was "
        "finite is called a divergence.",
        "Skipped steps are normal, a loss that is not finite never is, and no loss scale repairs it: the data was not "
        "finite, the learning rate was too high, or the forward pass overflowed. Clean the data, lower the rate, or "
        "find the first module whose output is not finite and, where it overflows float16, run it in float32 or use "
        "bfloat16.",
        "def check(module, args, output):\n"
        "    if torch.is_tensor(output) and not output.isfinite().all():\n"
        "        raise FloatingPointError(f'{names[module]} gave a non-finite output')\n"
        "\n"
        "names = {module: name for name, module in model.named_modules()}\n"
        "for module in names:\n"
        "    module.register_forward_hook(check)",
        BF16,
        page="",
    ),
    Entry(
        "fp16-without-scaler",
        "error",
        "Training in float16 without a loss scale: small gradients become zero, and nothing says so.",
        "The dtype of autocast, and whether a scaler scaled by anything but 1.",
        "FP16 autocast and no scale other than 1. FP16 rounds what is below 2^-25 to zero. A "
        "warning where there is a scaler that `watch` was not given: call it after the scaler is made.",
        "Gradients smaller than 2^-25 become zero in float16, silently, and those below 2^-14 lose bits: a GradScaler "
        "lifts them above that before backward. Add one with its usual first scale of 2^16, or use bfloat16, which "
        "needs none.",
        "scaler = torch.amp.GradScaler(device_type)\n\n" + LOOP,
        {
            "Accelerate": 'accelerator = Accelerator(mixed_precision="fp16")   # makes the scaler\n'
            "accelerator.backward(loss)                          # in place of loss.backward()",
            "Transformers Trainer": 'args = TrainingArguments(output_dir="out", fp16=True)   # makes the scaler',
            "Lightning": 'trainer = Trainer(precision="16-mixed")   # makes the scaler',
        },
        page="number-ranges",
    ),
    Entry(
        "gradient-underflow",
        "warning",
        "At the loss scale in use, rounding in float16 takes more of the gradients than training should lose.",
        "Histograms of output and weight gradients, and the scale in effect when they were taken.",
        "A relative error above 0.0085 of a matrix's gradient at more than a quarter of the sampled steps: the lower "
        "end of the safe window, which keeps the cosine to FP32 above 0.999. Or a layer "
        "to which only zeros come back. An error where 10 % of a tensor's mass is lost.",
        "A part of the gradient is rounded to zero or to few bits before it reaches the weights. Begin with a higher "
        "loss scale or let it grow sooner, or use bfloat16.",
        "scaler = torch.amp.GradScaler(device_type, init_scale=2.0**16, growth_interval=500)",
        {
            "Accelerate": "scaling = GradScalerKwargs(init_scale=2.0**16, growth_interval=500)\n"
            'accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[scaling])',
            "Transformers Trainer": 'args = TrainingArguments(output_dir="out", bf16=True)',
            "Lightning": 'scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16, growth_interval=500)\n'
            'trainer = Trainer(plugins=[MixedPrecision("16-mixed", "cuda", scaler)])',
        },
        page="loss-scale",
    ),
    Entry(
        "scale-unbounded",
        "warning",
        "The loss scale grows and grows, because gradients are zero or so small that they never overflow.",
        "The scale, and the largest gradient at that scale.",
        "Every recorded gradient zero while the scale grows; or a scale of 2^24 or more, at which 2^-48 is still a "
        "number, with the largest value 2^8 or more below the largest of FP16.",
        "Nothing ever stops the growth, so the gradients that should flow are missing or vanishingly small. Look for a "
        "detached loss, a branch multiplied by zero or a loss divided too often, and use bfloat16 where such small "
        "gradients are meant.",
        "for name, parameter in model.named_parameters():\n"
        "    if parameter.grad is None or not parameter.grad.any():\n"
        "        print(name, 'has no gradient')",
        BF16,
    ),
    Entry(
        "scaler-with-bf16",
        "warning",
        "A GradScaler is at work although bfloat16 has the range of float32 and needs none.",
        "The dtype of autocast, and whether a scaler is enabled.",
        "Both at once: bfloat16 has the 8 exponent bits of float32.",
        "bfloat16 has the range of float32, so scaling saves no gradient, while the scaler still checks every gradient "
        "and may skip steps as its scale grows. Turn it off; the rest of the loop can stay.",
        "scaler = torch.amp.GradScaler(device_type, enabled=False)",
        BF16,
    ),
    Entry(
        "fp16-parameters",
        "error",
        "Parameters that train are stored in float16 beside a GradScaler, which refuses to unscale their gradients.",
        "dtypes of the parameters, and the error that ended the run.",
        "One float16 parameter that trains, with a scaler (torch/amp/grad_scaler.py: “Attempting to unscale FP16 "
        "gradients”).",
        "Unscaled float16 gradients would underflow, and small updates would not move float16 weights. Keep the "
        "parameters that train in float32 and let autocast cast them.",
        "for parameter in model.parameters():\n"
        "    if parameter.requires_grad:\n"
        "        parameter.data = parameter.data.float()",
        {"Transformers Trainer": "model = AutoModel.from_pretrained(name, dtype=torch.float32)"},
        page="",
    ),
)
