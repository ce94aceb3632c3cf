"""Watching a training step (needs torch): `watch` records any PyTorch loop into a run folder.

    from amp_core import watch

    with watch(model, optimizer, scaler=scaler, into="runs/a", every=10) as rec:
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_fn(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

Imports neither plotly nor streamlit, so it runs on a bare training node.
"""

from amp_core.record.fake_quantize import fake_quantize
from amp_core.record.recorder import Recorder
from amp_core.record.watching import watch

__all__ = ["Recorder", "fake_quantize", "watch"]
