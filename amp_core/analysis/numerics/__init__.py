"""Number ranges and loss scales: what is zero, subnormal, underflows or overflows in a format at a loss scale.

ranges, layers (what was recorded) -> histograms -> what_if, scale_limits -> safe_window, layer_advice
loss_scale: trace and skipped steps · audits: measured against predicted
"""
