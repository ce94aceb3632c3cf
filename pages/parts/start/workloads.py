"""The built-in workloads, as the forms of Start a run and of Tune offer them.

st.selectbox("Workload and size", workloads.ALL, format_func=workloads.label, help=workloads.HELP)
"""

from amp_core.settings.training import WORKLOADS
from pages.parts import words
from pages.parts.start import devices

ALL = [(workload.name, size) for workload in WORKLOADS.values() for size in workload.sizes]
"""Name and size of each workload."""
HELP = "\n".join(f"- **{w.label}** ({w.name}): {w.description}" for w in WORKLOADS.values())
HELP += "\n\nA size in GiB is about what FP32 with Adam takes at the default batch size; 16-bit autocast takes less."
MIN_SHOWN_BYTES = 2**30
"""From this memory on, a size states what it needs."""


def label(choice: tuple[str, str]) -> str:
    """Name and size of a workload, its parameters, and its share of this machine's memory."""
    workload, size = WORKLOADS[choice[0]], WORKLOADS[choice[0]].sizes[choice[1]]
    facts = f"{words.compact(size.parameters)} parameters"
    needed = size.memory_bytes()
    if needed >= MIN_SHOWN_BYTES:
        most = max((devices.memory_bytes(name) or 0 for name, _ in devices.available()[0]), default=0)
        if 0 < most < needed:
            facts = f"{words.compact(size.parameters)}; needs {words.size(needed)} of {words.size(most)}"
        else:
            facts += f", {words.size(needed)}"
    return f"{workload.label} · {size.name} ({facts})"
