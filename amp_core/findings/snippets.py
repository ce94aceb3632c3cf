"""Code that several guide entries and remedies show: plain PyTorch, and the same in frameworks."""

BF16 = {
    "Accelerate": 'accelerator = Accelerator(mixed_precision="bf16")',
    "Transformers Trainer": 'args = TrainingArguments(output_dir="out", bf16=True, fp16=False)',
    "Lightning": 'trainer = Trainer(precision="bf16-mixed")',
}
"""Training in bfloat16, by framework."""
LOOP = """\
with torch.autocast(device_type, dtype=torch.float16):
    loss = loss_fn(model(x), y)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
optimizer.zero_grad()"""
"""A step with a GradScaler."""
WITH_SCALER = "scaler = torch.amp.GradScaler(device_type)\n\n" + LOOP
ISLAND = """\
class InFloat32(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        with torch.autocast(inputs[0].device.type, enabled=False):
            return self.module(*(x.float() if x.is_floating_point() else x for x in inputs))"""
"""A module that runs in float32 inside of autocast."""
FIND_WAITS = 'torch.cuda.set_sync_debug_mode("warn")   # names each call that waits'
"""Finds synchronizations with the device, but for those of the whole device."""
LAUNCH_BEFORE_WAITS = "launch(next_batch)   # first, where it does not need these results\ndone.synchronize()"
"""Before waits for events, which that mode does not name."""
TIME_BY_EVENTS = (
    "start.record()   # torch.cuda.Event(enable_timing=True), and no torch.cuda.synchronize() until all is timed"
)
"""Instead of synchronizations of the whole device."""
TORCH_EXAMPLES = "torch.amp, Automatic Mixed Precision examples"
"""The source of several thresholds."""
PROFILE = """\
from torch.profiler import ProfilerActivity, profile, schedule

with profile(
    activities=[ProfilerActivity.CPU, ProfilerActivity.{activity}],
    schedule=schedule(wait=5, warmup=2, active=3),
    record_shapes=True,
) as prof:
    for batch in loader:
        train_step(batch)
        prof.step()
prof.export_chrome_trace("trace.json.gz")"""
"""Records a trace of three steps after a warm-up, with the activity of a type of device."""
