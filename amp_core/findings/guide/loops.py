"""The guide to the order of a loop's calls, and to what goes on around skipped steps."""

from amp_core.findings.guide.entry import Entry
from amp_core.findings.guide.scaling import LOOP

_DOCS = "torch.amp, Automatic Mixed Precision examples"

ENTRIES = (
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
        "scaled and unscaled gradients are added up. Or they are never cleared, and every step adds to all before it.",
        "The order of calls: `scale` after `unscale_`, or several `unscale_` or `update`, before one step. And "
        "gradients that are still as the optimizer's step left them when backward adds to them.",
        f"One such step ({_DOCS}: unscale, step and update once per effective batch). Gradients that were kept in each "
        "of the first five steps.",
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
        "update-without-step",
        "error",
        "`scaler.update()` is called twice for one step, or before any step, which the scaler refuses.",
        "The error that ended the run.",
        "An `update` with no `unscale_` or `step` since the one before (torch/amp/grad_scaler.py, “No inf checks were "
        "recorded prior to update”).",
        "`update()` takes in what the steps since the last call have found, and forgets it, so a second call has "
        "nothing. Call it once per iteration, after the steps of all optimizers.",
        LOOP,
        page="",
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
        "A schedule that moves with each step and moved at a skipped one (PyTorch warns of the same order). A remark "
        "where the loop works out the rate itself, from the number of the step: that is meant so.",
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
        "optimizer in turn (torch.amp examples: update once, after all optimizers), which is a remark in loops of "
        "Accelerate and Lightning: theirs do so by design.",
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
        "scaler.load_state_dict(torch.load(path, weights_only=True)['scaler'])",
        {
            "Accelerate": "accelerator.save_state(folder)\naccelerator.load_state(folder)   # the scaler too",
            "Transformers Trainer": "trainer.train(resume_from_checkpoint=True)   # the scaler too",
            "Lightning": "trainer.fit(model, ckpt_path=path)   # the scaler too",
        },
    ),
    Entry(
        "recording-incomplete",
        "warning",
        "Something that should be in the run was not recorded, so neither findings nor figures can tell of it.",
        "What the recorder says of itself, tables without rows, and backward passes after the last recorded step.",
        "One reason why something is missing that such a run could have. An error where no step at all was recorded; a "
        "remark where each step lacks a part.",
        "What is missing is not zero, and a finding that is not there says nothing of it. Give `watch` all optimizers "
        "that the loop steps, and a folder that it can write to.",
        'watch(model, [optimizer_a, optimizer_b], scaler=scaler, into="runs/a")',
        page="",
    ),
    Entry(
        "rank-ended",
        "error",
        "One of the processes that train together ended before the others, and took them with it.",
        "The end that each rank wrote, or did not write.",
        "A rank that failed by an error of its own, or that wrote no end, in a run of several processes.",
        "The others wait for it where gradients are exchanged, until they fail too or are stopped: what it says of its "
        "end is the cause. One without an end was killed, mostly for want of memory; look at the output of each rank.",
        "# torchrun --standalone --nproc-per-node 4 --tee 3 train.py   # each rank's output, its number before it",
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
        "A branch seen 3 times or more, not in the first 25 steps alone, and skipped each time, others less than 1 "
        "time in 10; or 3 or more single skips at an eighth of a scale at which 10 steps had been made.",
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
        "Both at once. An error where it ended the run.",
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
