"""Names of the ranges with which AMPscope marks a trace: `amp_core.record.observers.profile` writes, `link` reads them.

>>> f"{MODULE}blocks.0.attention"
'ampscope.module:blocks.0.attention'
"""

PREFIX = "ampscope."
"""Prefix of all of them."""
MODULE = f"{PREFIX}module:"
"""Around the forward of a module; its name in `named_modules()` follows, empty for the model itself."""
PHASE = f"{PREFIX}phase:"
"""A short range at which its thread enters the phase that follows in the name: data, forward, backward,
after_backward (data if another forward comes next, else optimizer), optimizer or watch."""
