"""Whether an attention kernel leaves out the scores after each position, by the template arguments in its name.

>>> masks_causally("void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>, false, true, false>(Params)")
True
"""

import re

_FLASH = re.compile(
    r"flash_(?:fwd|fwd_splitkv|bwd_dq_dk_dv_loop(?:_seqk_parallel)?)_kernel<(?:\w+::)*\w+_kernel_traits<", re.IGNORECASE
)
_FLAGS = re.compile(r"\s*,\s*(true|false)\s*,\s*(true|false)")


def masks_causally(name: str) -> bool | None:
    """Whether FlashAttention 2's kernel of that name applies a causal mask; None for other kernels.

    Its arguments after the traits are `Is_dropout, Is_causal, ...`, of the one that splits keys and values `Is_causal,
    Is_local, ...` (flash_fwd_launch_template.h and flash_bwd_launch_template.h of FlashAttention).
    """
    if (found := _FLASH.search(name)) is None:
        return None
    depth, at = 1, found.end()
    while depth and at < len(name):
        depth += {"<": 1, ">": -1}.get(name[at], 0)
        at += 1
    if depth or (flags := _FLAGS.match(name, at)) is None:
        return None  # a table cut the name off
    return flags[1 if "splitkv" in found[0] else 2] == "true"
