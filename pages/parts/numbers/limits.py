"""The fields above a chart of exponents: formats whose limits it shows, and whether the loss scale is taken out."""

import streamlit as st

from amp_core.formats import FORMATS, limits_to_show
from pages.parts import address, glossary


def pick(page: str) -> tuple[list[str], bool]:
    """The formats, and whether exponents are shown without the loss scale; `page` begins the fields' keys."""
    known = limits_to_show()  # at each pass: a format may be registered while the server runs
    formats_key, unscaled_key = f"{page}.formats", f"{page}.unscaled"
    address.take("format", formats_key, address.several(known), ["fp16"])
    formats = st.pills(
        "Limits of",
        known,
        selection_mode="multi",
        format_func=lambda name: FORMATS[name].label,
        key=formats_key,
        help=glossary.tip("underflow"),
    )
    address.keep("format", formats_key, ",".join(formats) if formats != ["fp16"] else "")
    address.take("true", unscaled_key, lambda text: text == "1", False)
    unscaled = st.toggle(
        "Without the loss scale",
        key=unscaled_key,
        help="Moves each histogram by the loss scale of its step: where the true gradient lies.",
    )
    address.keep("true", unscaled_key, "1" if unscaled else "")
    return formats, unscaled
