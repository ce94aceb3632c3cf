"""A choice between few options."""

from collections.abc import Sequence
from typing import Any, TypeVar

import streamlit as st

T = TypeVar("T")


def one_of(label: str, options: Sequence[T], key: str, **look: Any) -> T:
    """A segmented control in which one option is always chosen: the session state holds the first choice as `key`.
    `look` holds more of its arguments."""
    chosen: T = st.segmented_control(label, options, required=True, key=key, **look)
    return chosen
