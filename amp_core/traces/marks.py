"""Names of the ranges by which AMPscope marks a trace: written by `amp_core.record.observers.profile`, read by `_link`.

>>> f"{MODULE}blocks.0.attention"
'ampscope.module:blocks.0.attention'
"""

OURS = "ampscope."
"""What all of them begin with."""
MODULE = f"{OURS}module:"
"""Around the forward of a module; its name in `named_modules()` follows, nothing for the model itself."""
PHASE = f"{OURS}phase:"
"""A short range from which on its thread is in the phase that follows: data, forward, backward,
after_backward (data where another forward follows, else the optimizer's), optimizer or watch."""
