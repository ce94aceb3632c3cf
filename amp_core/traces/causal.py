"""Whether an operator of attention masks causally, by its recorded arguments.

>>> is_causal("aten::scaled_dot_product_attention", ["", "", "", "", "0.", "True", "0.125", "False"])
True
"""

_IS_CAUSAL = {
    "scaled_dot_product_attention": 5,
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_fused_attention_overrideable": 5,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_flash_attention_forward": 8,
    "_cudnn_attention_forward": 10,
    "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_efficient_attention_backward": 11,
    "_scaled_dot_product_cudnn_attention_backward": 14,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 7,
    "_flash_attention_backward": 11,
    "_cudnn_attention_backward": 14,
}
"""Place of the argument `is_causal` among an operator's inputs (native_functions.yaml)."""
_MASK_TYPE = {"_efficient_attention_forward": 9, "_efficient_attention_backward": 14}
"""Place of `custom_mask_type`: 0 is no mask, 1 and 2 are causal from the first and up to the last key."""


def is_causal(op: str, inputs: object) -> bool:
    """Whether the concrete inputs of the operator `op` say so; False for other operators and where nothing tells it."""
    name = op.removeprefix("aten::")
    at = _IS_CAUSAL.get(name, _MASK_TYPE.get(name))
    if at is None or not isinstance(inputs, list) or len(inputs) <= at:
        return False
    return str(inputs[at]) in (("1", "2") if name in _MASK_TYPE else ("True",))
