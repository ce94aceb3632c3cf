"""The module that was running when an exception ended the run."""

import sys

import torch

from amp_core.record.model.frames import local_variables
from amp_core.record.model.parameters import named_modules, unwrapped
from amp_core.record.observer import Observer
from amp_core.record.torch_internals.quiet_mode import QuietMode
from amp_core.store.writer import RunWriter

_OF_MODES = ("torch._compile", "torch._dynamo")
"""Modules whose functions call those of a mode."""


class FailedIn(Observer):
    """Reports the module that was running when an exception ended the run, from the exception's traceback."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module) -> None:
        self._writer = writer
        self._model = unwrapped(model)
        self._step: int | None = None
        self._before = getattr(sys, "last_value", None)

    def step_began(self, step: int) -> None:
        self._step = step

    def close(self) -> None:
        error = sys.exc_info()[1]
        if error is None:  # uncaught, while Python exits: it keeps the last exception
            error = getattr(sys, "last_value", None)
            if error is self._before:
                return
        names = {id(m): n for n, m in named_modules(self._model)}
        module: str | None = None
        function = ""
        in_backward = False
        trace = error.__traceback__ if error is not None else None
        while trace is not None:
            frame, trace = trace.tb_frame, trace.tb_next
            within = str(frame.f_globals.get("__name__"))
            if within == QuietMode.__module__:  # what it calls is the operator
                break
            if within.startswith(_OF_MODES):
                continue
            owner = local_variables(frame).get("self")
            function = frame.f_code.co_qualname
            if isinstance(owner, torch.nn.Module) and id(owner) in names:
                module = names[id(owner)]
            elif function == "BackwardCFunction.apply":  # a custom autograd function's backward
                in_backward, module = True, None
        if error is not None:
            phase = "backward" if in_backward and module else None
            self._writer.event("failed in", module or "", type(error).__name__, self._step, op=function, phase=phase)
