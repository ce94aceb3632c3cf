"""A training's state on disk. A run resumed from it continues as if it had never stopped.

    >>> save(folder, step=500, model=model, optimizer=optimizer, scaler=scaler)
    >>> state = read(folder)
    >>> restore(state, model=model, optimizer=optimizer, scaler=scaler)
    >>> state["step"]
    500

`checkpoint.pt` lies in the run folder beside the tables; it is not part of the run, and packing omits it. It holds
weights, the optimizer's and the scaler's state, random number generators and the number of steps made. It is read with
`weights_only`, so that an untrusted file cannot run code.
"""

import pickle
from pathlib import Path
from typing import Any

import torch

from amp_core.record.backends import BACKENDS, accelerators
from amp_core.record.backends.cpu import Cpu
from amp_core.schema import RunError
from amp_core.store.atomic import temporary
from amp_core.store.run import load_run

FILE = "checkpoint.pt"


def save(
    folder: Path, *, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
) -> None:
    """Write the state after `step` steps; the previous checkpoint stays intact until this one is complete."""
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "random": torch.get_rng_state(),
        **{f"{b.type}_random": b.random_states() if b.available() else [] for b in BACKENDS.values() if b is not Cpu},
    }
    with temporary(folder / f".{FILE}.tmp") as unfinished:
        torch.save(state, unfinished)
        unfinished.replace(folder / FILE)


def read(folder: Path) -> dict[str, Any] | None:
    """The state in `folder`; None if none was saved yet. Raises `RunError` if the run saves none."""
    file = folder / FILE
    if not file.exists():
        if (folder / "run.json").exists() and load_run(folder).head.config.get("checkpoint_every") is None:
            raise RunError(
                f"out={str(folder)!r} holds a run without {FILE}; only runs with checkpoint_every can be resumed"
            )
        return None
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        return dict(state) | {"step": int(state["step"])}
    except (RuntimeError, KeyError, ValueError, TypeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise RunError(f"{str(file)!r} is not a readable checkpoint: {_first_line(error)}") from error


def restore(
    state: dict[str, Any], *, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
) -> None:
    """Load `state`. Raises `RunError` if it belongs to another model."""
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["random"])
        for backend in accelerators():
            states = state.get(f"{backend.type}_random", [])
            if len(states) == backend.count():
                backend.set_random_states(states)
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        raise RunError(f"{FILE} does not match this training: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
