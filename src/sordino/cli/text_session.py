"""A run of `sordino finetune`: to start, resume, measure, export and report."""

from __future__ import annotations

import math
import secrets
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sordino.accounting import Guarantee
from sordino.accounting.guarantee import UNPROTECTED
from sordino.books import LEDGER
from sordino.cli import announcing, config, launch
from sordino.cli.choosing_texts import ChosenTexts, choose, count_protected
from sordino.cli.config import Config
from sordino.cli.finetune import FinetuneFlags
from sordino.cli.session import PREPARATION, Session, choose_directory, explain_missing, prepare_records
from sordino.cli.terminal import caution, console, messages, say
from sordino.errors import BudgetExhausted, InvalidInput
from sordino.finetuning import losses, models
from sordino.finetuning.choice import CAUSAL, CLASSIFY, FLOAT, HALF, TextChoice
from sordino.finetuning.low_precision import autocast
from sordino.finetuning.models import BASE, Origin
from sordino.finetuning.text_files import find_owners, read_texts, spell_conversation, split_texts
from sordino.finetuning.tokens import Pad, Texts, encode_conversations, encode_texts, find_padding, has_tokenizer
from sordino.finetuning.tuned import locate_origin
from sordino.private import Private, Step
from sordino.recipe import Recipe
from sordino.run import HELD_OUT
from sordino.tables import reading
from sordino.tables.dataset import Data, Preprocessing
from sordino.tables.defaults import count_parameters, judge_size
from sordino.tables.encoding import NO_CLASS, encode_labels
from sordino.tables.reading import Sheet
from sordino.tables.release import plan_release
from sordino.tables.schema import Schema
from sordino.validation.first_step import watch_first_step
from sordino.vault import open_budget

TOKENS_AT_ONCE = 16_384
LOOK = 512
"""How many held-out texts are measured along the way; at the end all of them are."""
MODEL = "model"
"""The folder in a run that holds what was trained, in the form that transformers and PEFT read."""


@dataclass(frozen=True)
class TextSession(Session):
    """A run on texts. `tokenizer` made the records; `start` seeded the model's random weights."""

    tokenizer: Any
    start: int

    @property
    def choice(self) -> TextChoice:
        assert self.config.finetuning is not None
        return self.config.finetuning

    def steps(self) -> Iterator[Step]:
        """Take the remaining steps. The first must give noise to every trained tensor and change no frozen one."""
        try:
            with watch_first_step(self.model, self.private.bench.optimizer):
                first = self.private.step()
        except BudgetExhausted:
            return
        yield first
        yield from self.private.steps()

    def measure(self) -> tuple[float | None, float | None]:
        """Measure accuracy and mean loss on held-out texts: a few of them along the way, all of them at the end."""
        if not self.has_held_out:
            return None, None
        texts: Any = self.data.test_set
        count = len(texts)
        last = self.private.position == self.private.total
        part = range(count if last else min(count, LOOK))
        with autocast(self.choice.dtype, self.model):
            return measure(self.model, texts, part, Pad(find_padding(self.tokenizer)))

    def guarantee(self) -> Guarantee:
        """Return the guarantee, with what the fine-tuning took to be public."""
        spent, whose = self.private.guarantee(), "records" if self.choice.unit is None else "owners"
        public = (
            f"the names of the columns, the number of {whose} and what the user gave as public are public",
            "model and tokenizer were public before: nobody whose texts they were made from is protected",
        )
        begun = public[:1] if self.choice.random else public
        return replace(spent, assumptions=(*spent.assumptions, *begun, *self.data.caveats))


def tune_and_report(flags: FinetuneFlags) -> None:
    """Fine-tune, save, export, and report the outcome."""
    chosen = choose(flags)
    quiet = flags.json
    session = begin(chosen, flags.run, lambda: None if quiet else _announce_texts(chosen))
    finish_and_report(session, as_json=flags.json)


def finish_and_report(session: TextSession, *, as_json: bool) -> None:
    """Take the remaining steps, export the model, and say how to use it: the end of `finetune` and `resume`."""
    try:
        if not as_json:
            _announce_training(session)
        outcome = launch.finish(session, as_json=as_json)
        if not outcome.interrupted:
            export(session)
    finally:
        session.private.close()
    announcing.report(outcome, as_json=as_json)
    if not as_json:
        _suggest(session)


# -- a run, new or continued ------------------------------------------------------------------------------------------


def begin(chosen: ChosenTexts, run: Path | None, ready: Callable[[], None] = lambda: None) -> TextSession:
    """Start a new run in its own directory. Model and recipe are tried before anything is spent.

    If the classes have no names yet, these are released first; the model is tried on invented texts before that.
    """
    directory = run or choose_directory()
    if (directory / LEDGER).exists():
        raise InvalidInput(
            f"{directory} holds a run already: go on with `sordino resume {directory}` or choose another"
        )
    settled = chosen.config
    if chosen.plan is None:
        session = _assemble(settled, chosen.sheet, chosen.origin)
        _warn(session, chosen.origin)
        ready()
        session.private.resume(directory)
    else:
        with _assemble(settled, chosen.sheet, chosen.origin, invented=True).private:
            pass
        ready()
        settled = prepare_records(settled, chosen.sheet, chosen.plan, directory)
        session = _assemble(settled, chosen.sheet, chosen.origin)
        _warn(session, chosen.origin)
        session.private.load(directory)
    try:
        _keep_base(session, chosen.origin, directory)
        settled.write(directory)
    except BaseException:
        session.private.close()
        raise
    return _declare(session)


def reopen(directory: Path) -> TextSession:
    """Continue a run that was interrupted, killed or finished; the folder may come from anybody."""
    models.require_packages()
    settled = config.read_run_config(directory)
    found = settled or config.read_run_config(directory, PREPARATION)
    if found is None or found.finetuning is None or found.recipe is None:
        raise InvalidInput(explain_missing(directory))
    choice, target = found.finetuning, found.data.target
    named = [choice.text, *filter(None, (target, choice.unit))]
    table = read_texts(Path(found.data.source), named, choice.conversations)
    sheet = split_texts(table, choice, target, found.data.held_out)
    if (count := count_protected(sheet, choice)) != found.data.records:
        raise InvalidInput(
            f"data={found.data.source} has {count} training records, not {found.data.records} as when its run began: "
            "a guarantee is about the records it began with; start a new run"
        )
    origin = locate_origin(found.model.options, choice, directory)
    if settled is None:
        settled = _prepare_again(found, sheet, origin, directory)
    session = _assemble(settled, sheet, origin)
    session.private.load(directory)
    _keep_base(session, origin, directory)  # it was killed before this was kept
    (directory / PREPARATION).unlink(missing_ok=True)
    return _declare(session)


def _prepare_again(found: Config, sheet: Sheet, origin: Origin, directory: Path) -> Config:
    """Finish a run that was killed before its classes were named; its earlier releases stay charged."""
    data, recipe = found.data, found.recipe
    assert recipe is not None
    if found.schema is None or data.records is None or data.prepare is None:
        raise InvalidInput(f"{PREPARATION} of {data.source} is not whole: start a new run")
    sheet.check(found.schema)
    shared = found.run.dataset_budget is not None
    plan = plan_release(found.schema, data.records, recipe.budget, data.prepare, shared=shared)
    if plan is None:
        raise InvalidInput(f"{PREPARATION} of {data.source} leaves nothing open: start a new run")
    with _assemble(found, sheet, origin, invented=True).private:
        pass
    return prepare_records(found, sheet, plan, directory)


def _assemble(settled: Config, sheet: Sheet, origin: Origin, *, invented: bool = False) -> TextSession:
    """Bind texts, tokenizer, model and recipe together in memory; `invented` texts stand in for the real ones."""
    choice, recipe, seed = settled.finetuning, settled.recipe, settled.run.seed
    assert choice is not None
    assert recipe is not None
    tokenizer = models.open_tokenizer(origin)
    classes = (settled.schema.classes if settled.schema else None) or (("0", "1") if choice.task == CLASSIFY else ())
    data = _invent(tokenizer, choice, recipe, classes) if invented else _encode(tokenizer, sheet, choice, classes)
    shape = models.load_config(origin, choice, tokenizer, classes)
    start = secrets.randbits(62) if seed is None else seed
    base, new = models.load_base(origin, choice, shape, start)
    if new and not invented:
        caution(f"the folder of {origin.name} does not hold {models.name_tensors(new)}: random at first")
    model = models.adapt(base, choice, start)
    pad = Pad(find_padding(tokenizer))
    with models.quiet(), autocast(choice.dtype, model):
        losses.require_own(model, pad([_invent(tokenizer, choice, recipe, classes).train_set[0]]))  # type: ignore[list-item]  # of Texts
    owners = {} if choice.unit is None or invented else _name_owners(sheet, choice)
    private = Private(
        model,
        recipe.optimizer.build(p for p in model.parameters() if p.requires_grad),
        data.train_set,
        losses.TaskLoss(dtype=torch.bfloat16 if choice.dtype == HALF else None),
        recipe,
        collate=pad,
        seed=seed,
        engine=settled.run.engine,
        microbatch=settled.run.microbatch or max(1, TOKENS_AT_ONCE // choice.length),
        vault=open_budget(named) if (named := settled.run.dataset_budget) and not invented else None,
        **owners,
    )
    return TextSession(settled, data, private, tokenizer, start)


def _name_owners(sheet: Sheet, choice: TextChoice) -> dict[str, Any]:
    assert choice.unit is not None
    return {"unit": find_owners(sheet.train, choice.unit), "per_unit": choice.per_unit}


def _encode(tokenizer: Any, sheet: Sheet, choice: TextChoice, classes: Sequence[str]) -> Data:
    """Encode the records as tokens and classes, each from that record alone."""
    parts = []
    for table in (sheet.train, sheet.held_out):
        rows = _find_tokens(tokenizer, list(table.columns[choice.text]), choice)
        if choice.task == CAUSAL:
            parts.append(Texts(rows))
        else:
            parts.append(Texts(rows, torch.from_numpy(encode_labels(table.columns[sheet.target], classes))))
    how = "bytes" if tokenizer.__class__.__name__ == "ByT5Tokenizer" else "the tokenizer of the model's folder"
    what = "conversations, spelt by the tokenizer's template," if choice.chat else "texts"
    steps = [Preprocessing(f"{what} cut to {choice.length} tokens by {how}")]
    if len(sheet.held_out):
        steps.append(reading.HELD_OUT)
    return Data(sheet.train.name, parts[0], parts[1], tuple(classes), tuple(steps))  # type: ignore[arg-type]  # records by name, not by place


def _find_tokens(tokenizer: Any, cells: Sequence[str], choice: TextChoice) -> list[Tensor]:
    """Find the tokens of each record, which depend on no other record."""
    if choice.chat:
        return encode_conversations(tokenizer, cells, choice.length)
    return encode_texts(tokenizer, cells, choice.length, generative=choice.task == CAUSAL)


def _invent(tokenizer: Any, choice: TextChoice, recipe: Recipe, classes: Sequence[str]) -> Data:
    """Invent texts, to try model and recipe on."""
    words = ("a", "text", "of", "nobody")
    texts = [" ".join(words[: 1 + i % 4]) for i in range(4)]
    if choice.chat:
        texts = [spell_conversation([("user", text), ("assistant", text)]) for text in texts]
    rows = _find_tokens(tokenizer, texts, choice)
    count = recipe.records or 1
    rows = [rows[i % 4] for i in range(count)]
    labels = None if choice.task == CAUSAL else torch.arange(count) % max(1, len(classes))
    return Data("stand-in", Texts(rows, labels), Texts([]), tuple(classes))  # type: ignore[arg-type]  # records by name, not by place


def _keep_base(session: TextSession, origin: Origin, directory: Path) -> None:
    """If the weights are random, keep those that the run began with: nobody else could draw the same ones.

    They are drawn again from the same seed, because adapters have changed the model's layers by now.
    """
    folder, choice = directory / BASE, session.choice
    if not choice.random or folder.exists():
        return
    shape = models.load_config(origin, choice, session.tokenizer, session.data.classes)
    base, _ = models.load_base(origin, choice, shape, session.start)
    models.save_model(base, session.tokenizer, folder)


def _declare(session: TextSession) -> TextSession:
    """Note in the ledger which records no guarantee covers."""
    if session.has_held_out:
        session.private.declare(UNPROTECTED, HELD_OUT)
    return session


def _warn(session: TextSession, origin: Origin) -> None:
    """Warn if the weights are random: the model then learns everything from these records."""
    if origin.random:
        caution(f"the weights of {origin.name} are random: it knows no language before your texts")
        if (words := judge_size(session.private.bench.recipe, count_parameters(session.model))) is not None:
            caution(words)


# -- what came out ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure(model: nn.Module, texts: Texts, places: Sequence[int], pad: Pad) -> tuple[float | None, float | None]:
    """Return the share of texts classified correctly and the mean loss; for a causal model, only the loss per token."""
    right = known = 0
    total = weight = 0.0
    for start in range(0, len(places), 64):
        batch = pad([texts[place] for place in places[start : start + 64]])
        if texts.labels is None:
            tokens = (batch["labels"][:, 1:] != losses.IGNORED).sum(1)
            total += float((losses.loss(model, batch).double() * tokens).sum())
            weight += int(tokens.sum())
            continue
        labels = batch.pop("labels")
        logits: Tensor = model(**batch).logits.double()
        right += int((logits.argmax(1) == labels).sum())
        known += len(labels)
        total += float(cross_entropy(logits, labels, ignore_index=NO_CLASS, reduction="sum"))
        weight += int((labels != NO_CLASS).sum())
    loss = total / weight if weight else math.nan
    return right / known if known else None, loss if math.isfinite(loss) else None


def export(session: TextSession) -> None:
    """Write the trained model to `RUN/model`, as transformers or PEFT read it: again each time, whole or not at all."""
    base = session.run / BASE if session.choice.random else Path(session.config.model.options["path"])
    models.save_model(session.model, session.tokenizer, session.run / MODEL, base.resolve())


def _announce_texts(chosen: ChosenTexts) -> None:
    """Say which texts are used, before anything is spent."""
    settled, sheet, choice = chosen.config, chosen.sheet, chosen.config.finetuning
    assert choice is not None
    held = f", {len(sheet.held_out):,} held out, not protected" if len(sheet.held_out) else ", none held out"
    owned = "" if choice.unit is None else f" of {settled.data.records:,} owners"
    say("Texts", f"{len(sheet.train):,}{owned} of {Path(settled.data.source).name} to learn from{held}")
    how = (
        "its own tokenizer" if has_tokenizer(chosen.origin.folder) else "bytes: it has no tokenizer, and none is learnt"
    )
    say("Tokens", f"{choice.length} of each text at most, by {how}")
    if chosen.plan is not None:
        say("Released", f"names of the classes, with noise, for {settled.data.prepare:.0%} of ε")


def _announce_training(session: TextSession) -> None:
    """Say what is trained, when model and classes are known and before the first step."""
    recipe, choice = session.private.bench.recipe, session.choice
    schema: Schema | None = session.config.schema
    if schema is not None and schema.classes is not None:
        say("Classes", announcing.list_classes(schema.classes))
    trained = count_parameters(session.model)
    every = sum(value.numel() for value in session.model.state_dict().values())
    how = f"LoRA {choice.lora}: {trained:,} of {every:,} weights" if choice.lora else f"all {trained:,} weights"
    kept = "" if choice.dtype == FLOAT else f", in {choice.dtype} but for what is trained"
    say("Model", f"{session.config.model.name}, {how} are trained{kept}")
    noise = f"noise {recipe.noise_multiplier:.3g} × clip {recipe.clip:g}"
    whose = "records" if choice.unit is None else "owners"
    say("Recipe", f"{recipe.name}, {recipe.steps:,} steps of about {recipe.batch_size:,} {whose}, {noise}")
    messages().print()


def _suggest(session: TextSession) -> None:
    """Suggest what to do with the run now."""
    run, out = shlex.quote(str(session.run)), console()
    use = f"sordino generate {run} --records 100 --out synthetic.jsonl"
    if session.choice.task == CLASSIFY:
        use = f"sordino predict {run} --data new.csv --out predicted.csv"
    out.print("\nNext:", markup=False)
    for line in (f"sordino report {run}", use):
        out.print(f"  {line}", markup=False)
    kind = "PEFT" if session.choice.lora else "transformers"
    out.print(f"  {session.run / MODEL} is the model for {kind}", markup=False)
