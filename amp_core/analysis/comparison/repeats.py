"""Group runs that repeat a recipe with other seeds, and list the settings in which runs differ.

>>> [group.label for group in repeats([fp32, fp32_seed1, bf16, bf16_seed1])]
['fp32', 'bf16']
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from amp_core.analysis.steps import recipe, whole_number
from amp_core.store.run import Run

_OWN = ("seed", "steps", "every", "profile", "trace_ops", "blocks", "audit_every", "evaluate", "comparison")
"""Settings in which repeats may differ: only the seed among them affects the updates of weights."""


@dataclass(frozen=True)
class Group:
    """Runs of one recipe that differ only in the seed; a single run if its seed is unknown."""

    label: str
    places: tuple[int, ...]
    """Indices of the runs."""
    seeds: tuple[int, ...]
    """Their seeds; a unique negative number for a run without one."""


def repeats(runs: Sequence[Run], labels: Sequence[str]) -> list[Group]:
    """The runs in groups, in the order of their first runs. A second run of the same recipe and seed begins a new
    group, so that the two are compared. A group's label is its recipe if no other group has that, else its first run's
    label."""
    grouped: list[tuple[object, list[int], list[int]]] = []
    for place, run in enumerate(runs):
        seed = whole_number(run.head.config.get("seed"))
        settings = {k: v for k, v in flat(run.head.config).items() if k.partition(".")[0] not in _OWN}
        key = None if seed is None or recipe(run) is None else tuple(sorted(settings.items()))
        group = next((g for g in grouped if key is not None and g[0] == key and seed not in g[2]), None)
        if group is None:
            group = (key, [], [])
            grouped.append(group)
        group[1].append(place)
        group[2].append(seed if seed is not None else -1 - place)
    names = [recipe(runs[places[0]]) for _, places, _ in grouped]
    groups = []
    for name, (_, places, seeds) in zip(names, grouped, strict=True):
        own = name if name is not None and names.count(name) == 1 and len(places) > 1 else labels[places[0]]
        groups.append(Group(own, tuple(places), tuple(seeds)))
    return groups


_NO_SETTINGS = {"comparison", "products_seen", "resumed.first_scale"}
"""Keys of a head's config that are not settings: turns with other runs, and counts made while training."""


def differences(runs: Sequence[Run], labels: Sequence[str]) -> pd.DataFrame:
    """Settings that are not the same in all runs: `setting`, then one column of text per run."""
    configs = [
        {k: v for k, v in flat(run.head.config).items() if not {k, k.partition(".")[0]} & _NO_SETTINGS} for run in runs
    ]
    settings = [values | flat(run.head.environment, "environment.") for values, run in zip(configs, runs, strict=True)]
    rows = []
    for setting in dict.fromkeys(setting for values in settings for setting in values):
        texts = [values.get(setting, _missing(setting, values)) for values in settings]
        if len(set(texts)) > 1:
            rows.append([setting, *texts])
    return pd.DataFrame(rows, columns=["setting", *labels], dtype="str")


def flat(settings: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Settings as text; nested keys are joined with a dot, as in `scaler.growth_interval`."""
    texts: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            texts[f"{before}{key}"] = "on" if value.get("enabled", True) else "off"
            texts |= flat({k: v for k, v in value.items() if k != "enabled"}, f"{before}{key}.")
        elif isinstance(value, list):
            texts[f"{before}{key}"] = ", ".join(str(v) for v in value)
        else:
            texts[f"{before}{key}"] = (
                "off" if value is None or value is False else "on" if value is True else str(value)
            )
    return texts


def _missing(setting: str, values: Mapping[str, str]) -> str:
    """The text for a setting that a run lacks: the details of a feature that is off are not missing."""
    return "–" if values.get(setting.rpartition(".")[0]) == "off" else "not recorded"
