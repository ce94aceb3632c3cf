"""Number ranges and loss scales: what is zero, subnormal, lost or too large, in which format, at which loss scale.

ranges, layers (what was recorded) -> histograms -> what_if, scale_limits -> safe_window, layer_advice
loss_scale: trace and skipped steps · audits: measured beside predicted
"""
