"""What the user typed, on top of a configuration file, on top of the defaults, as one complete configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from sordino import recipes
from sordino.accounting import Budget
from sordino.cli import architectures, sources
from sordino.cli.common import caution, delta_for
from sordino.cli.config import Config, DataChoice, read
from sordino.data import LOADERS, Data
from sordino.errors import InvalidInput
from sordino.propose import Optimizer
from sordino.recipe import Recipe

BATCH_SIZE = 256
EPOCHS = 20.0
OPTIMIZERS = {
    "sgd": Optimizer("sgd", lr=0.25, momentum=0.9),
    "adam": Optimizer("adam", lr=0.01),
    "adamw": Optimizer("adamw", lr=0.01),
}
"""Good for small models and some hundred steps; found on digits, which are public."""
MODELS = {"mnist": "mnist-cnn", "fashion-mnist": "mnist-cnn", "cifar10": "cifar-cnn"}
_PRICE = ("epsilon", "delta", "accountant", "adjacency", "batch_size", "epochs", "steps")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The options of `sordino train`; None where the user said nothing."""

    data: str | None = None
    target: str | None = None
    epsilon: float | None = None
    delta: float | None = None
    epochs: float | None = None
    steps: int | None = None
    batch_size: int | None = None
    clip: float | None = None
    lr: float | None = None
    momentum: float | None = None
    optimizer: str | None = None
    recipe: str | None = None
    noise_multiplier: float | None = None
    accountant: str | None = None
    adjacency: str | None = None
    model: str | None = None
    held_out: float | None = None
    scale: float | None = None
    bounds: str | None = None
    classes: int | None = None
    config: Path | None = None
    run: Path | None = None
    save_every: int | None = None
    seed: int | None = None
    engine: str | None = None
    microbatch: int | None = None
    non_private_twin: bool = False
    json: bool = False

    def given(self, *names: str) -> dict[str, Any]:
        """Those of the named options that the user gave."""
        assert set(names) <= {f.name for f in fields(self)}
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def choose(flags: Flags) -> tuple[Config, Data]:
    """The complete configuration and the records that it names."""
    base = read(flags.config) if flags.config else Config()
    chosen = _data(base.data, flags)
    data = sources.load(chosen)
    count = sources.require_count(chosen, data)
    chosen = replace(chosen, records=count)
    shape = data.train_set[0][0].shape
    named = replace(base.model, name=flags.model, options={}) if flags.model else base.model
    config = Config(
        data=chosen,
        model=architectures.choose(named, MODELS.get(chosen.source, "mlp"), shape, len(data.classes)),
        recipe=_calibrated(_shaped(base.recipe, flags, count), flags, count),
        run=replace(base.run, **flags.given("seed", "engine", "microbatch", "save_every")),
    )
    return config, data


def _data(base: DataChoice, flags: Flags) -> DataChoice:
    choice = replace(base, **flags.given("target", "scale", "held_out", "classes"))
    if flags.data is not None:
        choice = replace(choice, source=flags.data if flags.data in LOADERS else str(Path(flags.data).resolve()))
    if flags.bounds is not None:
        choice = replace(choice, bounds=_bounds(flags.bounds))
    if choice.source in LOADERS:
        if ignored := flags.given("target", "scale", "bounds", "held_out", "classes"):
            option = min(ignored).replace("_", "-")
            caution(f"--{option} is for files: {choice.source} comes scaled, with held-out records of its own")
    elif choice.scale is None and choice.bounds is None:
        caution(
            "inputs are used as they are: if they are far from the size of 1, give --scale or --bounds, public numbers"
        )
    return choice


def _bounds(text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise InvalidInput(f"bounds={text!r} must be two numbers with a comma between them, such as 0,255") from None
    return low, high


def _shaped(base: Recipe | None, flags: Flags, records: int) -> Recipe:
    """The recipe before its noise is known."""
    if base is None:
        base = _default(flags.recipe or "dpsgd", records)
    elif flags.recipe is not None:
        raise InvalidInput(f"recipe={flags.recipe!r} and the configuration's [recipe] are both given: use one of them")
    changes = flags.given("batch_size", "epochs", "steps", "clip", "noise_multiplier")
    if flags.epochs is not None and flags.steps is not None:
        raise InvalidInput(f"epochs={flags.epochs} and steps={flags.steps} are both given: use one of them")
    if flags.epochs is not None:
        changes["steps"] = None
    if flags.given(*_PRICE) and flags.noise_multiplier is None:
        changes["noise_multiplier"] = None  # what the file was calibrated for is no longer what is asked for
    optimizer = OPTIMIZERS.get(flags.optimizer or "", base.optimizer)
    if flags.optimizer is not None:
        optimizer = replace(optimizer, kind=flags.optimizer)  # an unknown one is refused here
    return replace(base, **changes, optimizer=replace(optimizer, **flags.given("lr", "momentum")))


def _default(name: str, records: int) -> Recipe:
    if name.replace("-", "_") not in recipes.__all__:
        raise InvalidInput(f"recipe={name!r} must be one of {', '.join(recipes.__all__)}")
    batch_size = min(BATCH_SIZE, max(1, records // 4))
    recipe: Recipe = getattr(recipes, name.replace("-", "_"))(batch_size=batch_size, epochs=EPOCHS)
    return replace(recipe, optimizer=OPTIMIZERS[recipe.optimizer.kind])


def _calibrated(recipe: Recipe, flags: Flags, records: int) -> Recipe:
    if flags.epsilon is None and recipe.budget is None:
        if lonely := flags.given("delta", "accountant", "adjacency"):
            raise InvalidInput(f"{min(lonely)} belongs to a budget: give --epsilon too")
        if recipe.noise_multiplier is None:
            raise InvalidInput("epsilon is missing: use --epsilon 3, or --noise-multiplier for a run without a budget")
        return recipe.for_records(records)
    stated = recipe.budget or Budget(epsilon=1.0, delta=delta_for(None, records))
    budget = replace(stated, **flags.given("epsilon", "delta", "accountant", "adjacency"))
    return recipe.calibrate(budget, records=records)
