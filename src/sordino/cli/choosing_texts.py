"""Makes one complete configuration from what the user of `sordino finetune` typed, then the defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sordino import mechanisms
from sordino.cli.choosing import calibrate, find_budget
from sordino.cli.config import Config, ModelChoice, RunChoice, name_classes
from sordino.cli.finetune import FinetuneFlags
from sordino.errors import InvalidInput
from sordino.finetuning import models
from sordino.finetuning.choice import CAUSAL, CLASSIFY, FLOAT, LENGTH, Lora, TextChoice, parse_lora
from sordino.finetuning.models import Origin
from sordino.finetuning.text_files import (
    check_texts,
    describe_columns,
    find_owners,
    holds_conversations,
    read_texts,
    split_texts,
)
from sordino.finetuning.tokens import require_template
from sordino.recipe import Optimizer, Recipe
from sordino.tables.defaults import Defaults
from sordino.tables.reading import HELD_OUT_SHARE, DataChoice, Sheet
from sordino.tables.release import ReleasePlan, plan_release

PREPARE = 0.1
"""The share of ε for the names of the classes: nothing else has to be released about a column of texts."""
TEXTS = Defaults(share=0.125, fewest=32, most=2048, most_epochs=10.0, optimizer=Optimizer("adam", lr=1e-3))
"""Large draws, because noise is added once per draw; few of them, because each takes long."""
CLIP = 0.1
"""Smaller than the gradients of most texts: Adam makes up for a small bound, and no text can dominate."""
RATES = {"adam": 1e-3, "adamw": 1e-3, "sgd": 0.5, "dog": 1.0}


@dataclass(frozen=True, eq=False)
class ChosenTexts:
    """A configuration, the texts that it names, the releases that must come first, and where the model comes from."""

    config: Config
    sheet: Sheet
    origin: Origin
    plan: ReleasePlan | None = None


def choose(flags: FinetuneFlags) -> ChosenTexts:
    """Read the texts, and decide everything that is public about the run; nothing is spent."""
    models.require_packages()
    origin = models.find_origin(flags.model)
    choice = _choose_task(flags, origin)
    named = [choice.text, *filter(None, (flags.target, choice.unit))]
    if len(set(named)) < len(named):
        raise InvalidInput(f"--text, --target and --unit are {', '.join(named)}: each needs a column of its own")
    choice = replace(choice, chat=choice.task == CAUSAL and holds_conversations(flags.data, choice.text))
    table = read_texts(flags.data, named, choice.conversations)
    classes = _name_classes(flags, choice)
    tokenizer = models.open_tokenizer(origin)
    if choice.chat:
        require_template(tokenizer, choice.text, origin.name)
    settings = models.load_config(origin, choice, tokenizer, classes or ("0", "1"))
    choice = replace(choice, length=models.find_length(settings, flags.length, LENGTH))
    held_out = HELD_OUT_SHARE if flags.held_out is None else flags.held_out
    sheet = split_texts(table, choice, flags.target, held_out)
    check_texts(sheet, choice)
    count = count_protected(sheet, choice)
    plan, share = None, PREPARE if flags.prepare is None else flags.prepare
    schema = None if flags.target is None else describe_columns(choice, classes)
    if schema is not None:
        sheet.check(schema)
        shared = flags.dataset_budget is not None
        plan = plan_release(schema, count, find_budget(None, flags, count), share, shared=shared)
    recipe = calibrate(_shape_recipe(flags, count), flags, count, plan)
    data = DataChoice(
        source=str(flags.data.resolve()),
        target=flags.target,
        held_out=held_out,
        records=count,
        prepare=share if plan else None,
    )
    run = replace(RunChoice(), **flags.given("seed", "engine", "microbatch", "save_every", "dataset_budget"))
    model = ModelChoice(origin.name, {"path": str(origin.folder)})
    settled = Config(data=data, schema=schema, model=model, recipe=recipe, run=run, finetuning=choice)
    return ChosenTexts(settled, sheet, origin, plan)


def _choose_task(flags: FinetuneFlags, origin: Origin) -> TextChoice:
    task = flags.task or (CLASSIFY if flags.target is not None else None)
    if task is None:
        raise InvalidInput("what is to be learnt is missing: give --target COLUMN to classify, or --task causal-lm")
    if task == CAUSAL and (flags.target is not None or flags.classes is not None):
        raise InvalidInput("--target and --classes are for classifying: a causal model learns the texts themselves")
    if task == CLASSIFY and flags.target is None:
        raise InvalidInput("target is missing: use --target COLUMN, the column that holds the class")
    if flags.full and flags.lora is not None:
        raise InvalidInput(f"--full and --lora {flags.lora} are both given: use one of them")
    if flags.per_unit is not None and flags.unit is None:
        raise InvalidInput(f"per-unit={flags.per_unit} belongs to --unit COLUMN, which names whose a text is")
    usual = None if flags.full or origin.random else Lora()
    lora = parse_lora(flags.lora) if flags.lora is not None else usual
    return TextChoice(
        task=task,
        text=flags.text,
        lora=None if lora is None else str(lora),
        random=origin.random,
        unit=flags.unit,
        per_unit=flags.per_unit,
        dtype=flags.dtype or FLOAT,
    )


def _name_classes(flags: FinetuneFlags, choice: TextChoice) -> tuple[str, ...] | None:
    if flags.classes is not None:
        given = flags.classes.strip()
        return name_classes(int(given) if given.isdecimal() else [name.strip() for name in given.split(",")])
    if choice.task == CLASSIFY and choice.unit is not None:
        raise InvalidInput(
            "--unit needs --classes NAME,NAME,...: releasing their names protects single records, not whole owners"
        )
    return None


def count_protected(sheet: Sheet, choice: TextChoice) -> int:
    """Return the public number that the price is about: training records, or their owners."""
    return len(sheet.train) if choice.unit is None else len(set(find_owners(sheet.train, choice.unit)))


def _shape_recipe(flags: FinetuneFlags, records: int) -> Recipe:
    """Make the recipe, without its noise."""
    if flags.epochs is not None and flags.steps is not None:
        raise InvalidInput(f"epochs={flags.epochs} and steps={flags.steps} are both given: use one of them")
    mechanism = mechanisms.find(flags.recipe or "dpadam")
    recipe = mechanism.recipe(batch_size=TEXTS.batch_size(records), epochs=TEXTS.epochs(records))
    kind = flags.optimizer or recipe.optimizer.kind
    optimizer = Optimizer(kind, lr=RATES.get(kind, 1e-3))  # refuses an unknown one
    changes: dict[str, Any] = flags.given("batch_size", "epochs", "steps", "clip", "noise_multiplier")
    if flags.recipe is None and flags.clip is None:
        changes["clip"] = CLIP
    if flags.epochs is not None:
        changes["steps"] = None
    chosen = replace(optimizer, **flags.given("lr", "momentum"))
    return replace(recipe, **changes, optimizer=recipe.optimizer.adopt(chosen))
