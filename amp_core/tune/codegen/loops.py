"""The loops of `recipe_code`: a function per framework that writes `train(model, batches, loss_fn, steps)`.

    >>> print(LOOPS["plain"](TrainConfig(precision="bf16").resolved()))

Accelerate and the Trainer train in FP32 without a word where they find no CUDA device and are asked for FP16, so their
programs say that instead of training.
"""

from collections.abc import Callable

from amp_core.settings.training import TrainConfig

_ENDLESS = '''\
def endless(batches):
    """Batch after batch, from the first again whenever they end."""
    while True:
        yield from batches
'''
_DOC = '    """Train for so many steps; gives the loss of each."""'
_GUARD = "{name} trains in FP32 on a CPU when it is asked for FP16; take bf16 there"
_FIXED = ("growth_interval=2147483647", "backoff_factor=1 - 2**-30")
"""Of a static loss scale: the greatest interval that a scaler's 32-bit tracker counts, and a factor, which must be
below 1, that the scale's FP32 rounds away: a skipped step leaves it as it was."""
_WIDTH = 120


def plain(config: TrainConfig) -> str:
    """A loop of one's own."""
    autocast = config.recipe.autocast
    scaled = config.recipe.scaler
    many = config.accumulate > 1
    lines = [
        _ENDLESS,
        "",
        "def train(model, batches, loss_fn, steps):",
        _DOC,
        "    model = prepare(model)",
        "    optimizer = make_optimizer(model)",
    ]
    lines += _scaler(config, "scaler") if scaled else []
    lines += ["    model.train()", "    losses = []", "    stream = endless(batches)", "    for _ in range(steps):"]
    lines += ["        total = 0.0", "        for _ in range(ACCUMULATE):"] if many else []
    inner = []
    inner += ["batch = tree_map(lambda x: x.to(DEVICE) if isinstance(x, torch.Tensor) else x, next(stream))"]
    computed = f"loss = loss_fn(model, batch){' / ACCUMULATE' if many else ''}"
    if autocast:
        inner += [f"with torch.autocast(DEVICE, dtype=torch.{autocast}):", f"    {computed}"]
    else:
        inner += [computed]
    inner += [f"{'scaler.scale(loss)' if scaled else 'loss'}.backward()"]
    inner += ["total += loss.detach()"] if many else []
    lines += [f"{'    ' * (3 if many else 2)}{line}" for line in inner]
    if config.clip_norm is not None:
        lines += ["        scaler.unscale_(optimizer)"] if scaled else []
        lines += [f"        torch.nn.utils.clip_grad_norm_(model.parameters(), {config.clip_norm!r})"]
    lines += ["        scaler.step(optimizer)", "        scaler.update()"] if scaled else ["        optimizer.step()"]
    lines += ["        optimizer.zero_grad(set_to_none=True)"]
    lines += [
        f"        losses.append({'total' if many else 'loss.detach()'})",
        "    return [float(loss) for loss in losses]",
    ]
    return "\n".join(lines)


def accelerate(config: TrainConfig) -> str:
    """Hugging Face Accelerate."""
    mixed = {"float16": "fp16", "bfloat16": "bf16", None: "no"}[config.recipe.autocast]
    options = [f'mixed_precision="{mixed}"', "gradient_accumulation_steps=ACCUMULATE", 'cpu=DEVICE == "cpu"']
    lines = [_ENDLESS, "", "def train(model, batches, loss_fn, steps):", _DOC]
    if config.recipe.scaler:
        lines += _call("scaling = GradScalerKwargs", _scaling(config))
        options += ["kwargs_handlers=[scaling]"]
    lines += [
        "    accelerator = Accelerator(",
        *(f"        {option}," for option in options),
        "    )",
        *_guard(config, "accelerator.scaler", "Accelerate", "    "),
        "    model = prepare(model)",
        "    model, optimizer = accelerator.prepare(model, make_optimizer(model))  # a DataLoader too",
        "    model.train()",
        "    losses = []",
        "    stream = endless(batches)",
        "    for _ in range(steps * ACCUMULATE):",
        "        batch = next(stream)",
        "        batch = tree_map(lambda x: x.to(accelerator.device) if isinstance(x, torch.Tensor) else x, batch)",
        "        with accelerator.accumulate(model):",
        "            with accelerator.autocast():",
        "                loss = loss_fn(model, batch)",
        "            accelerator.backward(loss)",
    ]
    if config.clip_norm is not None:
        lines += [
            "            if accelerator.sync_gradients:",
            f"                accelerator.clip_grad_norm_(model.parameters(), {config.clip_norm!r})",
        ]
    lines += [
        "            optimizer.step()",
        "            optimizer.zero_grad()",
        "        losses.append(loss.detach())",
        *_by_step("losses", "    "),
    ]
    return "\n".join(lines)


def transformers(config: TrainConfig) -> str:
    """Hugging Face Transformers' Trainer."""
    precision = {"float16": ["fp16=True"], "bfloat16": ["bf16=True"], None: []}[config.recipe.autocast]
    arguments = [
        'output_dir="out"',
        "max_steps=steps",
        *precision,
        "gradient_accumulation_steps=ACCUMULATE",
        f"max_grad_norm={config.clip_norm or 0.0!r}",
        f"learning_rate={config.lr!r}",
        'lr_scheduler_type="constant"',
        "per_device_train_batch_size=1  # its batches are made already",
        "remove_unused_columns=False",
        'use_cpu=DEVICE == "cpu"',
        'save_strategy="no"',
        'logging_strategy="no"',
        "report_to=[]",
        "disable_tqdm=True",
    ]
    lines = [
        "class Batches(IterableDataset):",
        '    """Batch after batch, from the first again whenever they end."""',
        "",
        "    def __init__(self, batches):",
        "        self.batches = batches",
        "",
        "    def __iter__(self):",
        "        while True:",
        '            yield from ({"batch": batch} for batch in self.batches)',
        "",
        "",
        "class Task(Trainer):",
        '    """A Trainer with a loss of one\'s own; models that compute theirs need none of it."""',
        "",
        "    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):",
        "        with self.accelerator.autocast():",
        '            loss = self.loss_fn(model, inputs["batch"])',
        "        self.losses.append(loss.detach())",
        "        return (loss, None) if return_outputs else loss",
        "",
        "",
        "def arguments(steps):",
        '    """The recipe as the Trainer takes it."""',
        "    return TrainingArguments(",
        *(f"        {_comma(argument)}" for argument in arguments),
        "    )",
        "",
        "",
        "def train(model, batches, loss_fn, steps):",
        _DOC,
        "    model = prepare(model)",
        "    trainer = Task(",
        "        model,",
        "        arguments(steps),",
        "        train_dataset=Batches(batches),",
        "        data_collator=lambda batches: batches[0],",
        "        optimizers=(make_optimizer(model), None),",
        "    )",
        "    trainer.loss_fn, trainer.losses = loss_fn, []",
        *_guard(config, "trainer.accelerator.scaler", "The Trainer", "    "),
    ]
    if config.recipe.scaler:
        lines += _scaler(config, "trainer.accelerator.scaler")
    return "\n".join([*lines, "    trainer.train()", *_by_step("trainer.losses", "    ")])


def lightning(config: TrainConfig) -> str:
    """PyTorch Lightning."""
    options = [
        'accelerator="cpu" if DEVICE == "cpu" else "gpu"',
        "devices=1",
        "max_steps=steps",
        "max_epochs=-1",
        "accumulate_grad_batches=ACCUMULATE",
    ]
    options += [f"gradient_clip_val={config.clip_norm!r}"] if config.clip_norm is not None else []
    if config.recipe.scaler:
        options += ['plugins=[MixedPrecision("16-mixed", DEVICE, scaler)]']
    else:
        options += [f'precision="{"bf16-mixed" if config.recipe.autocast else "32-true"}"']
    options += [f"{name}=False" for name in ("logger", "enable_checkpointing", "enable_progress_bar")]
    options += ["enable_model_summary=False"]
    return "\n".join(
        [
            "class Task(lightning.LightningModule):",
            '    """A model, its loss and its optimizer."""',
            "",
            "    def __init__(self, model, loss_fn):",
            "        super().__init__()",
            "        self.model, self.loss_fn, self.losses = model, loss_fn, []",
            "",
            "    def training_step(self, batch, batch_index):",
            "        loss = self.loss_fn(self.model, batch)",
            "        self.losses.append(loss.detach())",
            "        return loss",
            "",
            "    def configure_optimizers(self):",
            "        return make_optimizer(self.model)",
            "",
            "",
            "def train(model, batches, loss_fn, steps):",
            _DOC,
            "    task = Task(prepare(model), loss_fn)",
            *(_scaler(config, "scaler") if config.recipe.scaler else []),
            "    trainer = lightning.Trainer(",
            *(f"        {option}," for option in options),
            "    )",
            "    trainer.fit(task, batches)",
            *_by_step("task.losses", "    "),
        ]
    )


LOOPS: dict[str, Callable[[TrainConfig], str]] = {
    "plain": plain,
    "accelerate": accelerate,
    "transformers": transformers,
    "lightning": lightning,
}


def _scaling(config: TrainConfig) -> str:
    """The scaler's settings, as arguments."""
    if config.loss_scale != "dynamic":
        return ", ".join([f"init_scale={config.loss_scale!r}", *_FIXED])
    given = {"init_scale": config.init_scale, "growth_interval": config.growth_interval}
    given |= {"growth_factor": config.growth_factor} if config.growth_factor != 2.0 else {}
    given |= {"backoff_factor": config.backoff_factor} if config.backoff_factor != 0.5 else {}
    return ", ".join(f"{name}={value!r}" for name, value in given.items())


def _scaler(config: TrainConfig, name: str) -> list[str]:
    return _call(f"{name} = torch.amp.GradScaler", f"DEVICE, {_scaling(config)}")


def _call(name: str, arguments: str) -> list[str]:
    """A statement of a function, over three lines where one would be too long."""
    line = f"    {name}({arguments})"
    return [line] if len(line) <= _WIDTH else [f"    {name}(", f"        {arguments}", "    )"]


def _guard(config: TrainConfig, scaler: str, name: str, indent: str) -> list[str]:
    if not config.recipe.scaler:
        return []
    return [f"{indent}if {scaler} is None:", f'{indent}    raise RuntimeError("{_GUARD.format(name=name)}")']


def _by_step(losses: str, indent: str) -> list[str]:
    """Of the losses of micro-batches the mean of each step's."""
    return [
        f"{indent}micro = [float(loss) for loss in {losses}]",
        f"{indent}return [sum(micro[i : i + ACCUMULATE]) / ACCUMULATE for i in range(0, len(micro), ACCUMULATE)]",
    ]


def _comma(argument: str) -> str:
    """An argument on a line of its own, its comma before its comment."""
    value, hash_, comment = argument.partition("  # ")
    return f"{value},{hash_}{comment}"
