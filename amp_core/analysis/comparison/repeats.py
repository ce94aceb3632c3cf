"""Which of several runs are one recipe repeated under other seeds, and what differs between runs.

>>> [group.label for group in repeats([fp32, fp32_seed1, bf16, bf16_seed1])]
['fp32', 'bf16']
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from amp_core.analysis.steps import recipe, whole_number
from amp_core.store.run import Run

_OWN = ("seed", "steps", "every", "profile", "trace_ops", "audit_every", "evaluate", "comparison")
"""Settings in which repeats may differ: they decide no update of the weights but through the seed."""


@dataclass(frozen=True)
class Group:
    """Runs of one recipe that differ in the seed alone; one run by itself where that is not known."""

    label: str
    places: tuple[int, ...]
    """Which of the runs."""
    seeds: tuple[int, ...]
    """Their seeds; of a run that does not tell it, its place below zero, so that it is no other's."""


def repeats(runs: Sequence[Run], labels: Sequence[str]) -> list[Group]:
    """The runs in groups, in the order of their first. A second run of one recipe and seed begins a group of its own:
    it is there to be compared. A group is called like its recipe where no other has that, else like its first run."""
    found: list[tuple[object, list[int], list[int]]] = []
    for place, run in enumerate(runs):
        seed = whole_number(run.head.config.get("seed"))
        settings = {k: v for k, v in flat(run.head.config).items() if k.partition(".")[0] not in _OWN}
        key = None if seed is None or recipe(run) is None else tuple(sorted(settings.items()))
        mine = next((g for g in found if key is not None and g[0] == key and seed not in g[2]), None)
        if mine is None:
            mine = (key, [], [])
            found.append(mine)
        mine[1].append(place)
        mine[2].append(seed if seed is not None else -1 - place)
    names = [recipe(runs[places[0]]) for _, places, _ in found]
    groups = []
    for name, (_, places, seeds) in zip(names, found, strict=True):
        own = name if name is not None and names.count(name) == 1 and len(places) > 1 else labels[places[0]]
        groups.append(Group(own, tuple(places), tuple(seeds)))
    return groups


_NO_SETTINGS = {"comparison", "products_seen", "resumed.first_scale"}
"""What a head's config holds besides settings: who took turns with whom, and what was counted while training."""


def differences(runs: Sequence[Run], labels: Sequence[str]) -> pd.DataFrame:
    """Settings that are not the same in all runs: `setting`, then one column of text per run."""
    own = [
        {k: v for k, v in flat(run.head.config).items() if not {k, k.partition(".")[0]} & _NO_SETTINGS} for run in runs
    ]
    found = [one | flat(run.head.environment, "environment.") for one, run in zip(own, runs, strict=True)]
    rows = []
    for setting in dict.fromkeys(setting for one in found for setting in one):
        texts = [one.get(setting, _missing(setting, one)) for one in found]
        if len(set(texts)) > 1:
            rows.append([setting, *texts])
    return pd.DataFrame(rows, columns=["setting", *labels], dtype="str")


def flat(settings: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Settings as text; those within a setting follow it with a dot, as in `scaler.growth_interval`."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found[f"{before}{key}"] = "on" if value.get("enabled", True) else "off"
            found |= flat({k: v for k, v in value.items() if k != "enabled"}, f"{before}{key}.")
        elif isinstance(value, list):
            found[f"{before}{key}"] = ", ".join(str(v) for v in value)
        else:
            found[f"{before}{key}"] = (
                "off" if value is None or value is False else "on" if value is True else str(value)
            )
    return found


def _missing(setting: str, found: Mapping[str, str]) -> str:
    """What stands for a setting that a run lacks: of what is off, no details are missing."""
    return "–" if found.get(setting.rpartition(".")[0]) == "off" else "not recorded"
