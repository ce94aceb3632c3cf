"""The guide to loss scaling, and to the order of a loop's calls."""

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
_DOCS = "torch.amp, Automatic Mixed Precision examples"

ENTRIES = (
    Entry(
        "calibration-skips",
        "info",
        "The scaler skips steps while it finds its scale, and once after a growth. That is its way of working.",
        "Steps whose gradients were not finite, with the scale before and after.",
        "Skips that begin in the first 25 steps (from 2^16 to 1 takes 16), later ones no more than growths. A warning "
        "where growing costs more than 2 % of the steps: PyTorch expects one skip in some hundreds.",
        "This is how a GradScaler works: it starts high, backs off at an overflow, and tries a larger scale after each "
        "growth interval. Nothing needs to change.",
    ),
    Entry(
        "scale-collapse",
        "error",
        "Step after step is skipped and the loss scale falls below 1: gradients are not finite at any scale.",
        "Consecutive skips, the scale, and whether the forward pass itself was finite.",
        "5 skips in a row and a scale below 1, where scaling only shrinks gradients. PyTorch's GradScaler says that a "
        "scale below 1 means that float16 cannot hold the gradients.",
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
        "The recorded loss, and the first module whose output was not finite.",
        "One such loss. One that was not recorded says nothing.",
        "Skipped steps are normal, a loss that is not finite never is: the forward pass itself overflowed or the data "
        "or learning rate broke it, and no loss scale can repair that. Find the first module whose output is not "
        "finite and run it in float32, or use bfloat16.",
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
        "FP16 autocast and no scale other than 1. FP16 rounds what is below 2^-25 to zero.",
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
        "end of the safe window, which keeps the cosine to FP32 above 0.999. An error where 10 % of a tensor's mass "
        "is lost.",
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
    Entry(
        "clip-before-unscale",
        "warning",
        "Gradients are clipped while they are still multiplied by the loss scale, so the threshold is divided by it.",
        "The order of calls: a clip between backward and `unscale_`.",
        f"One such clip in a step ({_DOCS}: unscale_ before clipping).",
        "The threshold meets gradients that are thousands of times too large, so nearly every step is shrunk to almost "
        "nothing. Call `scaler.unscale_(optimizer)` before clipping.",
        "scaler.scale(loss).backward()\n"
        "scaler.unscale_(optimizer)\n"
        "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)\n"
        "scaler.step(optimizer)\n"
        "scaler.update()",
        {
            "Accelerate": "accelerator.backward(loss)\n"
            "accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)   # unscales first",
            "Transformers Trainer": 'args = TrainingArguments(output_dir="out", fp16=True, max_grad_norm=1.0)',
            "Lightning": 'trainer = Trainer(precision="16-mixed", gradient_clip_val=1.0)',
        },
    ),
    Entry(
        "logged-scaled-values",
        "warning",
        "A logged loss or gradient norm is still multiplied by the loss scale, and jumps with it.",
        "What the loop logs against what was measured, and jumps of the logged norm at changes of the scale.",
        "Logged over true within 1 % of the scale; without a measurement, four of five changes of the scale followed "
        "by the norm within a factor of 2^0.25.",
        "The curve shows the loss scale, not the model: it doubles at each growth. Log the loss before `scaler.scale` "
        "and norms after `scaler.unscale_`.",
        "scaler.scale(loss).backward()\n"
        "scaler.unscale_(optimizer)\n"
        "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)\n"
        "rec.log(loss=loss, grad_norm=norm)",
    ),
    Entry(
        "unscale-per-microbatch",
        "error",
        "With gradient accumulation, gradients are unscaled or the scale updated before all micro-batches are in: "
        "scaled and unscaled gradients are added up.",
        "The order of calls: `scale` after `unscale_`, or several `unscale_` or `update`, before one step.",
        f"One such step ({_DOCS}: unscale, step and update once per effective batch).",
        "What is added after `unscale_` is thousands of times larger than what was there, so the update is wrong. "
        "Call `unscale_`, `step` and `update` only after the last micro-batch.",
        "for i, (x, y) in enumerate(batches):\n"
        "    with torch.autocast(device_type, dtype=torch.float16):\n"
        "        loss = loss_fn(model(x), y) / accumulate\n"
        "    scaler.scale(loss).backward()\n"
        "    if (i + 1) % accumulate == 0:\n"
        "        scaler.unscale_(optimizer)\n"
        "        scaler.step(optimizer)\n"
        "        scaler.update()\n"
        "        optimizer.zero_grad()",
        {
            "Accelerate": 'accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=4)\n'
            "with accelerator.accumulate(model):\n"
            "    accelerator.backward(loss)\n"
            "    optimizer.step()\n"
            "    optimizer.zero_grad()",
            "Transformers Trainer": 'args = TrainingArguments(output_dir="out", fp16=True, '
            "gradient_accumulation_steps=4)",
            "Lightning": 'trainer = Trainer(precision="16-mixed", accumulate_grad_batches=4)',
        },
    ),
    Entry(
        "missing-scaler-update",
        "error",
        "`scaler.update()` is left out, or only called sometimes: the next `unscale_` or `step` raises.",
        "The error that ended the run, and the calls before it.",
        "A second `unscale_` or `step` of one optimizer without an `update` between them (torch/amp/grad_scaler.py).",
        "The scaler still holds the state of the step before, so the scale cannot move and the next call is refused. "
        "Call `scaler.update()` once per iteration, also where the step was skipped.",
        LOOP,
    ),
    Entry(
        "optimizer-step-bypasses-scaler",
        "error",
        "`optimizer.step()` is called beside or in place of `scaler.step(optimizer)`: it uses gradients that are still "
        "scaled, or steps although they are not finite.",
        "Optimizer steps outside of `scaler.step` in an iteration in which the loss was scaled.",
        f"One such step ({_DOCS}: scaler.step in place of optimizer.step).",
        "The update uses gradients multiplied by the loss scale, and nothing protects the weights from infinities. "
        "Step only through `scaler.step(optimizer)`.",
        LOOP,
    ),
    Entry(
        "scheduler-steps-on-skip",
        "warning",
        "The learning-rate schedule goes on at skipped steps, so it runs ahead of the weights.",
        "Scheduler calls, or changes of the learning rate, after skipped steps.",
        "A schedule that moves with each step and moved at a skipped one (PyTorch warns of the same order).",
        "Each skip costs a step of warm-up or decay that no weight saw. Step the schedule only where the scale did "
        "not fall.",
        "before = scaler.get_scale()\n"
        "scaler.step(optimizer)\n"
        "scaler.update()\n"
        "if scaler.get_scale() >= before:   # made, not skipped\n"
        "    scheduler.step()",
        {
            "Accelerate": "scheduler = accelerator.prepare(scheduler)   # steps only where the optimizer did",
            "Lightning": "def configure_optimizers(self):\n"
            '    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}',
        },
    ),
    Entry(
        "shared-backoff",
        "warning",
        "Several optimizers share one scaler, and the infinities of one lower the scale for all; or the scale is "
        "updated once for each.",
        "Which optimizer's gradients were not finite, and how many updates there are per iteration.",
        "After the first 25 steps, skips of one optimizer alone that are more than growths; or an update after every "
        "optimizer in turn (torch.amp examples: update once, after all optimizers).",
        "`update()` adds up what all optimizers found, so one of them decides the scale of the others. Call it once "
        "at the end of the iteration, or give optimizers with losses of their own a scaler each.",
        "scaler_a = torch.amp.GradScaler(device_type)\n"
        "scaler_b = torch.amp.GradScaler(device_type)\n"
        "scaler_a.scale(loss_a).backward()\n"
        "scaler_a.step(optimizer_a)\n"
        "scaler_a.update()\n"
        "scaler_b.scale(loss_b).backward()\n"
        "scaler_b.step(optimizer_b)\n"
        "scaler_b.update()",
    ),
    Entry(
        "no-gradients",
        "error",
        "An optimizer steps and none of its parameters has a gradient.",
        "The error of the scaler, or a step without any gradient.",
        "No parameter of the optimizer has a gradient (torch/amp/grad_scaler.py, “No inf checks were recorded”).",
        "The loss does not depend on these parameters: it was detached, they are frozen, or they belong to another "
        "model than the one that was called. Make the optimizer from the parameters that train.",
        "optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)\nassert loss.requires_grad",
    ),
    Entry(
        "scaler-state-not-restored",
        "warning",
        "Training was resumed with the optimizer's state but a fresh scaler, which calibrates again.",
        "The optimizer's step count at the start, and whether the scaler brings clean steps or a scale of its own.",
        "An optimizer that has stepped beside a scaler that never has.",
        "The scale starts from its first value again, which costs skipped steps and a bump in the loss. Save and load "
        "`scaler.state_dict()` with the rest.",
        "torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict(), "
        "'scaler': scaler.state_dict()}, path)\n"
        "scaler.load_state_dict(torch.load(path)['scaler'])",
        {
            "Accelerate": "accelerator.save_state(folder)\naccelerator.load_state(folder)   # the scaler too",
            "Transformers Trainer": "trainer.train(resume_from_checkpoint=True)   # the scaler too",
            "Lightning": "trainer.fit(model, ckpt_path=path)   # the scaler too",
        },
    ),
    Entry(
        "rank-scale-desync",
        "error",
        "Processes of one training have different loss scales, or some skip a step that others make.",
        "Loss scale and skips of the ranks, step by step.",
        "One step at which they differ: replicas are then no longer the same.",
        "Each rank decides by the gradients that it holds, so scales drift apart and weights with them. With sharded "
        "gradients use a scaler that asks all ranks.",
        "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler\n\nscaler = ShardedGradScaler()",
    ),
    Entry(
        "branch-always-skipped",
        "warning",
        "A part of the training that comes seldom overflows whenever it comes, so it never learns.",
        "Skips by the set of parameters that have gradients; else skips at scales that other steps bear.",
        "A branch seen 3 times or more and skipped each time, others less than 1 time in 10; or 3 or more single skips "
        "at an eighth of a scale at which 10 steps had been made.",
        "Its gradients are larger than the others', and the scale grows back for those before it comes again. Scale "
        "its loss down, clip it, or give it a scaler of its own.",
        "loss = main_loss + 0.1 * rare_loss",
    ),
    Entry(
        "anomaly-mode-with-scaler",
        "warning",
        "Anomaly mode is on with a scaler: overflow that the scaler would have skipped ends the run, and every step is "
        "slow.",
        "Anomaly mode at backward; the error that it raised.",
        "Both at once.",
        "Scaled gradients overflow now and then by design, and anomaly mode takes that for an error. Turn it off, or "
        "on only for the few steps that you look into, once the scale has settled.",
        "torch.autograd.set_detect_anomaly(False)",
        {"Lightning": "trainer = Trainer(detect_anomaly=False)"},
    ),
    Entry(
        "scaled-gradient-penalty",
        "warning",
        "A gradient penalty is computed from gradients that are still multiplied by the loss scale.",
        "`torch.autograd.grad(…, create_graph=True)` of a scaled loss, and whether the scale was asked for after it.",
        f"The scale was not asked for before backward ({_DOCS}, gradient penalty).",
        "The penalty is too large by the loss scale, or by its square. Divide the gradients by `scaler.get_scale()` "
        "before taking their norm.",
        "scaled = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)\n"
        "grads = [g / scaler.get_scale() for g in scaled]\n"
        "with torch.autocast(device_type, dtype=torch.float16):\n"
        "    loss = loss + sum(g.pow(2).sum() for g in grads).sqrt()\n"
        "scaler.scale(loss).backward()",
    ),
)
