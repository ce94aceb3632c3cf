"""The training that a case describes, watched or unwatched.

>>> training = Training(case, into=None)
>>> training.run()
>>> training.finish()                # everything that watching must not change, by promise
"""

import random
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from amp_core import watch
from tests.record.random_acts import ACTS
from tests.record.random_census import archive, flat, hook_count, module_hooks, owned, parameter_hooks, stable_text
from tests.record.random_hooks import READS
from tests.record.random_models import WIDTH, DataclassOutput, LazyOut, PlantedError, Stack

if TYPE_CHECKING:
    from tests.record.random_cases import Case

BATCH = 4
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}
PRECISIONS = ("fp32", "fp16", "bf16", "fp16_two_scalers", "fp16_scaler_each_step", "scaler_disabled", "fp16_unscaled")
ROOTS = ("backward", "autograd.grad", "two roots", "vector", "retain graph", "penalty")
BREAKS = ("forward", "backward", "before step", "in closure")


class Breaking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise PlantedError("planted in backward")


class Training:
    """One training; watched if `into` is a folder. `seen` lists its observations in order, for the comparison."""

    def __init__(self, case: "Case", into: Path | None) -> None:
        self.case, self.into = case, into
        torch.manual_seed(case.seed)
        random.seed(case.seed)
        np.random.seed(case.seed)
        self.numbered = 10**6
        RemovableHandle.next_id = self.numbered
        READS.clear()
        self.seen: dict[str, Any] = {}
        self.label_counts: Counter[str] = Counter()
        self.calls: list[str] = []
        self.handles: list[Any] = []
        self.hooks: list[int] = []
        self.counted: list[float] = []
        """Losses of the steps attempted by what is watched, while it is."""
        self.recorder: Any = None
        self.attempts = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = Stack(case.model.pieces, case.model.returns, case.model.tiny)
        self.fixed = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
        parameters = list(self.model.parameters())
        parts = [parameters] if case.loop.optimizers == "one" else [parameters[::2], parameters[1::2]]
        self.optimizers = [self.make_optimizer(part) for part in parts if part]
        count = {"fp16_two_scalers": 2}.get(
            case.loop.precision, int("fp16" in case.loop.precision or "scaler" in case.loop.precision)
        )
        self.scalers = [self.make_scaler(i) for i in range(count if case.loop.precision != "fp16_unscaled" else 0)]
        self.schedulers = (
            [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5) for o in self.optimizers] if case.loop.scheduler else []
        )
        self.given: list[Any] = []

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.case.loop.optimizer](parameters)

    def make_scaler(self, index: int) -> torch.amp.GradScaler:
        enabled = self.case.loop.precision != "scaler_disabled"
        return torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 - index), growth_interval=2, enabled=enabled)

    def begin_watching(self) -> None:
        """May be called again after the recorder was closed; then records into a second folder."""
        watching = self.case.watching
        folder = self.into if self.recorder is None else self.into.with_name(f"{self.into.name}-again-{len(self.seen)}")
        scaler = self.scalers[0] if self.scalers and watching.scaler == "given" else None
        kinds = (
            {} if watching.kinds == "standard" else {"kinds": ("weight_grad", "output_grad", "activation", "weight")}
        )
        self.given = list(self.optimizers)
        self.recorder = watch(
            self.model,
            self.optimizers[0] if len(self.optimizers) == 1 else self.optimizers,
            scaler=scaler,
            into=folder,
            every=watching.every,
            level=watching.level,
            budget=watching.budget,
            trace_ops=watching.trace_ops,
            **kinds,
        )

    # for acts

    def note(self, label: str, value: Any) -> None:
        self.label_counts[label] += 1
        self.seen |= flat(value, f"{label} #{self.label_counts[label]}")

    def tried(self, label: str, act: Callable[[], Any]) -> Any:
        """The result of `act`, or None; notes its exception, or the plain values in the result."""
        try:
            result = act()
        except Exception as error:
            self.note(label, f"{type(error).__name__}: {stable_text(str(error))}")
            return None
        self.note(label, result if isinstance(result, torch.Tensor | float | dict | list | None) else "done")
        return result

    def result_of(self, output: Any) -> torch.Tensor:
        if isinstance(output, tuple):
            return output[0]
        if isinstance(output, dict):
            return output["x"]
        return output.x if isinstance(output, DataclassOutput | LazyOut) else output

    def loss_of(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean squared error, and a little of every other floating tensor that the model returns."""
        if self.case.loop.entered == "parts" and hasattr(model, "through"):
            hidden, extras = model.through(x)
            output: Any = (model.head(hidden), *extras)
        else:
            output = model(x)
        result = self.result_of(output)
        loss = nn.functional.mse_loss(result.float(), y)
        outputs = output[1:] if isinstance(output, tuple) else [output["extra"]] if isinstance(output, dict) else []
        for extra in [*outputs, *([output.extra] if isinstance(output, DataclassOutput) else [])]:
            loss = loss + 0.01 * extra.float().square().mean()
        return loss

    # the loop

    def run(self) -> None:
        """Train, and note warnings, log messages and exceptions."""
        if self.into is not None:
            self.begin_watching()
        for number in range(self.case.loop.steps):
            self.act(number, inside=False)
            self.step(number)
            self.hooks.append(hook_count(self.model))

    def act(self, number: int, inside: bool) -> None:
        for act in self.case.acts:
            if (act.step, act.inside) == (number, inside):
                ACTS[act.name](self)

    def step(self, number: int) -> None:
        loop = self.case.loop
        if loop.precision == "fp16_scaler_each_step" and number:
            self.scalers = [self.make_scaler(0)]
        if loop.evaluate and number % 2:
            self.tried("evaluation", self.evaluate)
        turn = number % len(self.optimizers) if loop.optimizers == "in turn" else None
        used = [(i, o) for i, o in enumerate(self.optimizers) if turn in (None, i)]
        try:
            if loop.optimizer == "lbfgs":
                losses = [self.step_with_closure(number, optimizer) for _, optimizer in used]
            else:
                losses = self.step_after_backward(number, used)
        except Exception as error:
            self.note(f"step {number}", f"{type(error).__name__}: {stable_text(str(error))}")
            self.model.fails = False
        else:
            self.note(f"step {number}", losses)
            self.counted += losses if self.is_recorded() else []
        for scheduler in self.schedulers:
            scheduler.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=loop.set_to_none)

    def step_after_backward(self, number: int, used: list[tuple[int, torch.optim.Optimizer]]) -> list[float]:
        loop = self.case.loop
        scaler_of = {i: self.scalers[i % len(self.scalers)] if self.scalers else None for i, _ in used}
        losses = []
        for micro in range(loop.accumulate):
            last = micro == loop.accumulate - 1
            losses.append(self.backward(number, scaler_of[used[micro % len(used)][0]], last))
        self.act(number, inside=True)
        if self.breaks_at(number, "before step"):
            raise PlantedError("planted before the step")
        for index, optimizer in used:
            if scaler_of[index] is not None and loop.unscale:
                scaler_of[index].unscale_(optimizer)
        if loop.clip == "norm":
            self.note("norm", nn.utils.clip_grad_norm_(self.model.parameters(), 0.5))
        elif loop.clip == "value":
            nn.utils.clip_grad_value_(self.model.parameters(), 0.1)
        for index, optimizer in used:
            if scaler_of[index] is None:
                optimizer.step()
            else:
                scaler_of[index].step(optimizer)
            self.attempts += self.is_recorded(optimizer)
        for scaler in {id(s): s for s in scaler_of.values() if s is not None}.values():
            scaler.update()
        return losses

    def step_with_closure(self, number: int, optimizer: torch.optim.Optimizer) -> float:
        calls = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            with self.autocast():
                loss = self.loss_of(self.model, *self.batch(number))
            loss.backward()
            calls.append(loss.item())
            if len(calls) == 2 and self.breaks_at(number, "in closure"):
                raise PlantedError("planted in the closure")
            return loss

        optimizer.step(closure)
        self.attempts += self.is_recorded(optimizer)
        self.note("closures", calls)
        return calls[0]

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.Generator().manual_seed(number)
        x, y = torch.randn(BATCH, WIDTH, generator=drawn), torch.randn(BATCH, WIDTH, generator=drawn)
        if number == self.case.loop.overflow:
            x = x * 1e30
        dtype = self.model.head.weight.dtype
        return x.to(dtype), y.to(dtype)

    def autocast(self) -> torch.autocast:
        precision = self.case.loop.precision
        dtype = torch.bfloat16 if precision == "bf16" else torch.float16
        return torch.autocast("cpu", dtype=dtype, enabled=precision.startswith(("fp16", "bf16")))

    def backward(self, number: int, scaler: Any, last: bool) -> float:
        root = self.case.loop.root
        x, y = self.batch(number)
        self.model.fails = self.breaks_at(number, "forward")
        x.requires_grad_(root == "penalty")
        with self.autocast():
            loss = self.loss_of(self.model, x, y) / self.case.loop.accumulate
        logged = loss.item()
        if self.breaks_at(number, "backward"):
            loss = Breaking.apply(loss)
        if root == "penalty":
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + 0.1 * grad.float().square().sum()
            logged = loss.item()
        if root == "vector":
            loss = torch.stack([loss / 2, loss / 2])
        scaled = loss if scaler is None else scaler.scale(loss)
        if root == "autograd.grad":
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            for parameter, grad in zip(
                parameters, torch.autograd.grad(scaled, parameters, allow_unused=True), strict=True
            ):
                if grad is not None:
                    parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        elif root == "two roots":
            torch.autograd.backward([scaled * 0.75, scaled * 0.25])
        elif root == "vector":
            scaled.backward(gradient=torch.ones_like(scaled))
        else:
            scaled.backward(retain_graph=root == "retain graph")
            if root == "retain graph" and last:
                (scaled * 0).backward()
        return logged

    def evaluate(self) -> float:
        self.model.eval()
        try:
            with torch.inference_mode() if self.case.loop.evaluate == "inference" else torch.no_grad(), self.autocast():
                return self.loss_of(self.model, *self.batch(99)).item()
        finally:
            self.model.train()

    def breaks_at(self, number: int, where: str) -> bool:
        return self.case.loop.breaks == (number, where)

    def is_recorded(self, optimizer: Any = None) -> bool:
        if self.recorder is None or self.recorder.writer.closed:
            return False
        return any(o is (optimizer or self.optimizers[0]) for o in self.given)

    # afterwards

    def finish(self) -> dict[str, Any]:
        """Close, train one more step, and collect everything that can differ, by the name of the promise."""
        if self.recorder is not None:
            self.recorder.close()
        over: dict[str, Any] = {}
        over["hooks left on modules"] = module_hooks(self.model)
        over["hooks left on parameters"] = parameter_hooks(self.model)
        over["attributes left on optimizers"] = [owned(o) for o in self.optimizers]
        over["attributes left on scalers"] = [owned(s) for s in self.scalers]
        over["serialised after close"] = self.serialised()
        self.step(self.case.loop.steps)
        over["weights and buffers"] = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        over["optimizer state"] = [o.state_dict() for o in self.optimizers]
        over["scaler state"] = [s.state_dict() for s in self.scalers]
        over["reads of user code"] = dict(READS)
        over["own wrappers called"] = self.calls
        over["random generators"] = (torch.get_rng_state(), random.random(), float(np.random.random()))
        return {"what the loop saw": self.seen} | {promise: flat(value) for promise, value in over.items()}

    def serialised(self) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for name, thing in (("model", self.model), ("optimizers", self.optimizers), ("scalers", self.scalers)):
            try:
                members |= {f"{name} {member}": data for member, data in archive(thing).items()}
            except Exception as error:
                members[name] = f"{type(error).__name__}: {stable_text(str(error))}"
        return members
