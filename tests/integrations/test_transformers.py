"""PrivateTrainer, against the real transformers and PEFT: steps, prices, refusals, checkpoints, logs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from sordino import Budget, InvalidInput, Private, SordinoError, recipes
from sordino.errors import UnsupportedModel
from sordino.recipe import Recipe

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-integrations")
peft = pytest.importorskip("peft", reason="peft is not installed: make test-integrations")
from sordino.integrations.transformers import PrivateTrainer  # noqa: E402
from tests.finetuning.models import KINDS, RECORDS, Texts, adapt, build, collate  # noqa: E402

CLIP, RATE = 0.5, 0.8
BUDGET = Budget(epsilon=3, delta=1e-3)


def arguments(folder: Path, **settings: Any) -> Any:
    quiet = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "report_to": "none"}
    return transformers.TrainingArguments(str(folder), **{**quiet, **settings})


def whole_batch(**settings: Any) -> Recipe:
    """Everybody joins, and the noise is too small to be seen."""
    return recipes.dpsgd(**{"batch_size": RECORDS, "steps": 1, "clip": CLIP, "noise_multiplier": 1e-9, **settings})


def make(model: nn.Module, kind: str, folder: Path, **settings: Any) -> Any:
    ours = {name: settings.pop(name) for name in ("recipe", "budget", "options", "loss", "unit") if name in settings}
    dataset = settings.pop("train_dataset", None) or Texts(kind)
    more = {name: settings.pop(name) for name in ("optimizers", "eval_dataset", "callbacks") if name in settings}
    plain = {"optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant", "per_device_train_batch_size": 5}
    args = arguments(folder, **{**plain, **settings})
    return PrivateTrainer(model=model, args=args, train_dataset=dataset, data_collator=collate, **ours, **more)


def loop(model: nn.Module, kind: str, clip: float = CLIP) -> dict[str, Tensor]:
    """A step over single examples by the model's own loss, each clipped by itself; what the parameters are then."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p) for name, p in trained.items()}
    for item in Texts(kind):
        loss = model(**collate([item])).loss
        grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        found = {name: g for name, g in zip(trained, grads, strict=True) if g is not None}
        norm = torch.stack([g.norm() for g in found.values()]).norm()
        for name, grad in found.items():
            sums[name] += grad * (clip / norm).clamp(max=1.0)
    return {name: p.detach() - RATE * sums[name] / RECORDS for name, p in trained.items()}


FAST = {("gpt2", "full"), ("llama", "lora"), ("bert", "lora")}
WAYS = [(kind, way) for kind in KINDS for way in ("full", "lora")]
WAYS += [("gpt2", way) for way in ("dora", "ia3", "prompt", "prefix")] + [("t5", "prompt"), ("bert", "prompt")]


def mark(fast: set[tuple[str, str]], ways: list[tuple[str, str]]) -> list[Any]:
    return [pytest.param(*way, marks=[] if way in fast else pytest.mark.slow, id="-".join(way)) for way in ways]


@pytest.mark.parametrize(("kind", "way"), mark(FAST, WAYS))
def test_a_step_is_that_of_a_loop_over_single_examples(kind: str, way: str, tmp_path: Path) -> None:
    hold_against_a_loop(kind, way, tmp_path)


def hold_against_a_loop(kind: str, way: str, folder: Path, **settings: Any) -> nn.Module:
    model = build(kind) if way == "full" else adapt(build(kind), kind, way)
    if way in ("lora", "dora"):  # the second factor begins at zero, and with it the first one's gradient
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    twin = copy.deepcopy(model)
    make(model, kind, folder, recipe=whole_batch(), **settings).train()
    wanted = loop(twin, kind)
    moves = []
    for name, parameter in model.named_parameters():
        before = twin.get_parameter(name)
        expected = wanted.get(name, before)
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
        moves.append(float((expected - before).abs().max().detach()))
    assert max(moves) > 1e-3
    assert sum(move > 0 for move in moves) == len(wanted)
    return model


@pytest.mark.parametrize(("kind", "way"), mark({("gpt2", "lora")}, [(k, w) for k in KINDS for w in ("full", "lora")]))
def test_so_is_one_with_checkpoints_of_activations(kind: str, way: str, tmp_path: Path) -> None:
    model = hold_against_a_loop(kind, way, tmp_path, activation_checkpointing=True)
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def test_checkpoints_change_no_numbers_where_there_is_dropout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is run a second time has the coins of the first time; for once both trainings have the same secret seeds."""
    monkeypatch.setattr("sordino.chance.secrets.randbits", lambda _: 11)
    found = []
    for on in (False, True):
        model = build("gpt2", dropout=0.3)
        torch.manual_seed(11)
        make(model, "gpt2", tmp_path / str(on), recipe=whole_batch(), activation_checkpointing=on).train()
        found.append(model)
    plain, checkpointed = found
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(checkpointed.get_parameter(name), parameter, rtol=1e-5, atol=1e-6)
    assert not torch.equal(plain.lm_head.weight, build("gpt2").lm_head.weight)  # type: ignore[union-attr]


def test_reentrant_checkpoints_of_the_models_own_are_refused(tmp_path: Path) -> None:
    model = build("gpt2")
    model.activation_checkpointing_enable({"use_reentrant": True})  # type: ignore[operator]  # of transformers
    with pytest.raises(InvalidInput, match="reentrant checkpoints on, which hide the parameters"):
        make(model, "gpt2", tmp_path, recipe=whole_batch())
    assert not (tmp_path / "sordino").exists()


class Noting(transformers.DataCollatorForLanguageModeling):  # type: ignore[misc]
    """Masks at random, and remembers what it made of every text."""

    def torch_mask_tokens(self, *given: Any, **more: Any) -> tuple[Tensor, Tensor]:
        masked = super().torch_mask_tokens(*given, **more)
        vars(self).setdefault("made", []).extend(zip(*(part.clone() for part in masked), strict=True))
        return masked  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", [None, pytest.param(5, marks=pytest.mark.slow)])
def test_masks_are_drawn_once_for_each_draw(seed: int | None, tmp_path: Path) -> None:
    """The step is that of a loop over the very texts that were masked for it, and each was masked once."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: place for place, word in enumerate(["<pad>", "<mask>", "<unk>", *map(str, range(28))])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    marks = {"pad_token": "<pad>", "mask_token": "<mask>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **marks)
    collator = Noting(tokenizer, mlm_probability=0.4, seed=seed)

    class Forget(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            collator.made = []

    torch.manual_seed(1)
    model = transformers.BertForMaskedLM(build("bert").config)
    twin = copy.deepcopy(model)
    texts = [{"input_ids": item["input_ids"]} for item in Texts("gpt2").items]
    trainer = PrivateTrainer(
        model=model, train_dataset=texts, data_collator=collator, recipe=whole_batch(), callbacks=[Forget()],
        args=arguments(tmp_path, per_device_train_batch_size=5, optim="sgd", learning_rate=RATE, max_steps=1,
                       lr_scheduler_type="constant"),
    )  # fmt: skip
    trainer.train()
    assert len(collator.made) == RECORDS
    total = {name: torch.zeros_like(p) for name, p in twin.named_parameters()}
    for ids, labels in collator.made:
        if not bool((labels != -100).any()):
            continue  # nothing of it was masked: no loss, no gradient
        loss = twin(input_ids=ids[None], labels=labels[None]).loss
        grads = torch.autograd.grad(loss, list(twin.parameters()), allow_unused=True)
        norm = torch.stack([g.norm() for g in grads if g is not None]).norm()
        for name, grad in zip(total, grads, strict=True):
            total[name] += 0 if grad is None else grad * (CLIP / norm).clamp(max=1.0)
    for name, p in twin.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), p - RATE * total[name] / RECORDS, rtol=1e-5, atol=1e-5)
    assert max(float(each.abs().max()) for each in total.values()) > 1e-2


# -- what it costs ----------------------------------------------------------------------------------------------------


def test_the_arguments_make_the_recipe_that_a_budget_pays_for(tmp_path: Path) -> None:
    trainer = make(
        build("bert"), "bert", tmp_path, budget=BUDGET, gradient_accumulation_steps=2, per_device_train_batch_size=3,
        num_train_epochs=1.5,
    )  # fmt: skip
    assert (trainer.recipe.batch_size, trainer.recipe.steps) == (6, 6)
    with pytest.raises(InvalidInput, match="before train"):
        trainer.guarantee()
    trainer.train()
    assert trainer.guarantee().epsilon == trainer.recipe.price(BUDGET.delta) <= BUDGET.epsilon
    assert len(trainer.private.run.ledger) == 6
    with pytest.raises(InvalidInput, match="has trained already"):
        trainer.train()  # a second run would have the budget again


@pytest.mark.parametrize(("kind", "way"), mark(set(), [(k, w) for k in KINDS for w in ("full", "lora")]))
def test_the_price_is_that_of_the_recipe(kind: str, way: str, tmp_path: Path) -> None:
    model = build(kind) if way == "full" else adapt(build(kind), kind, way)
    trainer = make(model, kind, tmp_path, budget=BUDGET, max_steps=2)
    trainer.train()
    assert 2.9 < trainer.guarantee().epsilon == trainer.recipe.price(BUDGET.delta) <= BUDGET.epsilon


def test_a_recipe_keeps_its_own_draws_steps_and_price(tmp_path: Path) -> None:
    recipe = recipes.automatic(batch_size=8, steps=2, noise_multiplier=1.5)
    trainer = make(build("bert"), "bert", tmp_path, recipe=recipe)
    trainer.train()
    assert trainer.state.global_step == trainer.private.position == 2
    wanted = recipe.for_records(RECORDS).price(1e-3)
    assert trainer.guarantee(delta=1e-3).epsilon == pytest.approx(wanted, rel=1e-9)


# -- what is refused, before anything is spent ------------------------------------------------------------------------

REFUSED: dict[str, Any] = {
    "max_grad_norm": 0.5,
    "fp16": True,
    "train_sampling_strategy": "group_by_length",
    "neftune_noise_alpha": 5.0,
    "torch_compile": True,
    "auto_find_batch_size": True,
    "include_num_input_tokens_seen": "all",
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
    "activation_checkpointing_kwargs": {"preserve_rng_state": False},
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "optim": "lomo",
    "optim_target_modules": "all-linear",
    "use_liger_kernel": True,
    "skip_memory_metrics": False,
    "debug": "underflow_overflow",
    "enable_jit_checkpoint": True,
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_break_the_guarantee_are_refused(name: str, tmp_path: Path) -> None:
    args = arguments(tmp_path, eval_strategy="no")
    value = REFUSED[name]
    setattr(args, name, transformers.training_args.OptimizerNames(value) if name == "optim" else value)
    with pytest.raises(InvalidInput, match=f"{name}=.*is refused for private training: ."):
        PrivateTrainer(
            model=build("bert"), args=args, train_dataset=Texts("bert"), data_collator=collate, budget=BUDGET
        )
    assert not (tmp_path / "sordino").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "budget="),
        ({"budget": BUDGET, "recipe": whole_batch()}, "budget="),
        ({"recipe": whole_batch(), "max_steps": 7}, "max_steps=7, but the recipe has 1 steps"),
        ({"recipe": whole_batch(), "gradient_accumulation_steps": 2}, "on average"),
        ({"recipe": whole_batch(), "num_train_epochs": 9}, "num_train_epochs=9, but the recipe has 1"),
        ({"budget": BUDGET, "train_dataset": iter([]), "max_steps": 2}, "no records by index"),
    ],
)
def test_what_contradicts_itself_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=message):
        make(build("bert"), "bert", tmp_path, **settings)


def test_training_records_are_never_evaluated(tmp_path: Path) -> None:
    texts = Texts("bert")
    with pytest.raises(InvalidInput, match="hold some out"):
        make(build("bert"), "bert", tmp_path, budget=BUDGET, train_dataset=texts, eval_dataset={"a": texts})
    trainer = make(build("bert"), "bert", tmp_path, recipe=whole_batch(), train_dataset=texts)
    for look in (trainer.evaluate, trainer.predict):
        for some in (texts, Subset(texts, [0, 1])):
            with pytest.raises(InvalidInput, match="hold some out"):
                look(some)
    with pytest.raises(InvalidInput, match="cost privacy too"):
        trainer.hyperparameter_search()


def test_a_model_that_generates_is_evaluated_by_generating(tmp_path: Path) -> None:
    from sordino.integrations.transformers import PrivateSeq2SeqTrainer

    common = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "report_to": "none", "max_steps": 1}
    args = transformers.Seq2SeqTrainingArguments(
        str(tmp_path), **common, predict_with_generate=True, generation_max_length=5, eval_strategy="steps"
    )
    made: dict[str, Any] = {"train_dataset": Texts("t5"), "data_collator": collate, "budget": BUDGET}
    written: list[Any] = []

    def measure(found: Any) -> dict[str, float]:
        written.append(found.predictions)
        return {}

    trainer = PrivateSeq2SeqTrainer(
        model=build("t5"), args=args, **made, eval_dataset=Texts("t5", 4, 9), compute_metrics=measure
    )
    trainer.train()
    (texts,) = written
    assert (texts.ndim, len(texts)) == (2, 4), "tokens, not the scores of each"
    assert (texts[:, 5:] <= 0).all(), "tokens up to generation_max_length, then padding"
    assert trainer.guarantee().epsilon == trainer.recipe.price(BUDGET.delta)
    args.sortish_sampler = True
    with pytest.raises(InvalidInput, match="sortish_sampler=True is refused"):
        PrivateSeq2SeqTrainer(model=build("t5"), args=args, **made)


def test_one_trainer_trains_once_and_says_what_it_was_shown(tmp_path: Path) -> None:
    """Twice, its guarantee would be about the second time alone."""
    trainer = make(build("gpt2"), "gpt2", tmp_path / "first", recipe=whole_batch())
    trainer.train()
    trainer.predict(Texts("gpt2"))
    assert trainer.guarantee(delta=1e-3).unprotected, "predict publishes what it finds"
    trainer.args.output_dir = str(tmp_path / "second")
    for resume in (None, True):
        with pytest.raises(SordinoError):
            trainer.train(resume_from_checkpoint=resume)
    assert not (tmp_path / "second" / "sordino").exists()
    trainer.private.close()


def test_a_loss_of_ones_own_is_asked_for_per_example(tmp_path: Path) -> None:
    class Focal(PrivateTrainer):
        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Tensor:
            return model(**inputs).loss.sqrt()  # type: ignore[no-any-return]

    args = arguments(tmp_path, per_device_train_batch_size=8, optim="sgd", learning_rate=RATE, max_steps=1)
    common: dict[str, Any] = {"args": args, "train_dataset": Texts("bert"), "data_collator": collate}
    with pytest.raises(InvalidInput, match=r"Focal\.compute_loss would not be called"):
        Focal(model=build("bert"), **common, recipe=whole_batch())

    def squared(model: nn.Module, batch: Any) -> Tensor:
        from sordino.finetuning.losses import loss

        return loss(model, batch).square()

    model = build("bert")
    Focal(model=model, **common, recipe=whole_batch(), loss=squared).train()
    assert not torch.equal(model.classifier.weight, build("bert").classifier.weight)  # type: ignore[union-attr]


def test_a_collator_that_packs_is_refused(tmp_path: Path) -> None:
    packing = transformers.DataCollatorWithFlattening()
    with pytest.raises(InvalidInput, match="DataCollatorWithFlattening packs several records"):
        PrivateTrainer(
            model=build("llama"), args=arguments(tmp_path), train_dataset=Texts("llama"), data_collator=packing,
            budget=BUDGET,
        )  # fmt: skip


def test_forward_replaced_on_the_object_is_refused(tmp_path: Path) -> None:
    model = build("bert")
    model.forward = model.forward  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModel, match="replaced on the object"):
        make(model, "bert", tmp_path, recipe=whole_batch()).train()
    assert "forward" in vars(model)


# -- what is shown and saved ------------------------------------------------------------------------------------------


class Seen(transformers.TrainerCallback):  # type: ignore[misc]
    """Everything that a tracker would be sent."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []
        self.calls: list[str] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.calls.append("begin")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.calls.append("end")

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.calls.append("epoch")


def test_nothing_of_the_training_batches_is_shown_or_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = Seen()
    trainer = make(
        build("bert", dropout=0.1), "bert", tmp_path, budget=BUDGET, max_steps=4, logging_steps=1,
        save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, eval_dataset=Texts("bert", 6, 9),
        callbacks=[seen], lr_scheduler_type="linear", load_best_model_at_end=True, per_device_train_batch_size=8,
    )  # fmt: skip
    done = trainer.train()
    shown = {name for log in (*seen.logs, *trainer.state.log_history) for name in log} | set(done.metrics)
    assert {name for name in shown if not name.startswith("eval_")} == {"learning_rate", "epoch", "step"}
    assert "eval_loss" in shown
    trainer.log_metrics("train", done.metrics)  # as scripts do, which an empty dictionary would end
    assert [log["learning_rate"] for log in seen.logs if "learning_rate" in log] == pytest.approx(
        [RATE * share for share in (1.0, 0.75, 0.5, 0.25)]
    )
    assert seen.calls == ["begin", "end"] * 3 + ["epoch"] + ["begin", "end", "epoch"]
    assert done.training_loss != done.training_loss  # NaN: it is private
    files = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert files >= {
        "model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "trainer_state.json",
        "checkpoint-000000002.pt",
    }
    assert not any("rng" in name for name in files)
    assert trainer.state.total_flos == 0
    assert "'loss'" not in capsys.readouterr().out
    assert "held-out records are NOT protected" in str(trainer.guarantee())
    trainer.create_model_card()
    trainer.create_model_card()  # stated once
    card = (tmp_path / "README.md").read_text()
    assert card.count("## Privacy") == 1
    assert str(trainer.guarantee()) in card


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    class Stop(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 3

    recipe = recipes.dpsgd(batch_size=8, steps=5, noise_multiplier=2.0)
    settings: dict[str, Any] = {"recipe": recipe, "save_strategy": "steps", "save_steps": 2}
    first = make(build("gpt2"), "gpt2", tmp_path, **settings, callbacks=[Stop()])
    first.train()
    assert (first.private.position, len(first.private.run.ledger)) == (3, 3)
    first.private.close()
    second = make(build("gpt2"), "gpt2", tmp_path, **settings)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert (second.private.position, second.state.global_step) == (5, 5)
    assert len(second.private.run.ledger) == 6  # the third step was taken twice and is charged twice
    planned = recipe.for_records(RECORDS).price(1e-3)
    assert second.guarantee(delta=1e-3).epsilon > planned
    second.private.close()
    third = make(build("gpt2"), "gpt2", tmp_path, **{**settings, "recipe": whole_batch(steps=6)})
    with pytest.raises(SordinoError, match="follows recipe"):
        third.train(resume_from_checkpoint=True)


# -- adapters ---------------------------------------------------------------------------------------------------------


def test_an_optimizer_built_before_the_adapters_is_refused(tmp_path: Path) -> None:
    model = build("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    trainer = make(adapt(model, "gpt2"), "gpt2", tmp_path, recipe=whole_batch(), optimizers=(optimizer, None))
    with pytest.raises(InvalidInput, match=r"does not hold .*lora_A.*never be trained"):
        trainer.train()
    assert not (tmp_path / "sordino").exists()


def test_adapters_added_after_the_trainer_are_trained(tmp_path: Path) -> None:
    model = build("gpt2")
    trainer = make(model, "gpt2", tmp_path, recipe=whole_batch(steps=2))
    before = {name: p.detach().clone() for name, p in adapt(model, "gpt2").named_parameters()}
    trainer.train()
    after = {f"base_model.model.{name}": p for name, p in model.named_parameters()}
    changed = {name for name, p in after.items() if not torch.equal(p, before[name])}
    assert changed == {name for name in after if "lora_" in name}


def test_adapters_added_after_private_are_refused() -> None:
    from sordino.finetuning.losses import loss

    model = build("gpt2")
    recipe = whole_batch().for_records(RECORDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    private = Private(model, optimizer, Texts("gpt2"), loss, recipe, collate=collate)
    adapt(model, "gpt2")
    with pytest.raises(SordinoError, match="no trainable parameter"):
        private.step()
    assert len(private.run.ledger) == 0


def test_adapters_added_in_the_middle_are_refused(tmp_path: Path) -> None:
    class Late(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            adapt(model, "gpt2")

    trainer = make(build("gpt2"), "gpt2", tmp_path, recipe=whole_batch(steps=3), callbacks=[Late()])
    with pytest.raises(InvalidInput, match=r"does not hold .*lora_"):
        trainer.train()
    assert len(trainer.private.run.ledger) == 1


class Careless(torch.optim.SGD):
    """Writes to what it does not hold."""

    stranger: nn.Parameter

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        with torch.no_grad():
            self.stranger.mul_(0.9)
        return result


def test_a_step_that_changes_a_frozen_tensor_is_found(tmp_path: Path) -> None:
    model = adapt(build("gpt2"), "gpt2")
    optimizer = Careless([p for p in model.parameters() if p.requires_grad], lr=RATE)
    name, optimizer.stranger = next((n, p) for n, p in model.named_parameters() if not p.requires_grad)
    trainer = make(model, "gpt2", tmp_path, recipe=whole_batch(), optimizers=(optimizer, None))
    with pytest.raises(UnsupportedModel, match=f"changed {name}, which is frozen"):
        trainer.train()


def test_a_tensor_without_noise_is_found() -> None:
    from sordino.validation.first_step import watch_first_step

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].weight.grad = torch.ones(2, 2)
    model[0].bias.grad = torch.zeros(2)
    with (
        pytest.raises(UnsupportedModel, match=r"0\.bias, 1\.weight, 1\.bias had received no noise"),
        watch_first_step(model, optimizer),
    ):
        optimizer.step()


@pytest.mark.parametrize("way", ["lora", pytest.param("ia3", marks=pytest.mark.slow)])
def test_merged_and_reloaded_adapters_predict_the_same(way: str, tmp_path: Path) -> None:
    model = adapt(build("llama"), "llama", way).eval()
    make(model, "llama", tmp_path / "run", recipe=whole_batch(steps=2)).train()
    model.eval()
    batch = collate([Texts("llama")[i] for i in range(3)])
    with torch.no_grad():
        wanted = model(**batch).logits
        assert not torch.allclose(wanted, build("llama").eval()(**batch).logits, atol=1e-4)
        model.save_pretrained(tmp_path / "adapter")
        reloaded = peft.PeftModel.from_pretrained(build("llama"), tmp_path / "adapter").eval()
        torch.testing.assert_close(reloaded(**batch).logits, wanted)
        merged = model.merge_and_unload().eval()
        torch.testing.assert_close(merged(**batch).logits, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_frozen_base_in_bf16_stays_as_it_is(tmp_path: Path) -> None:
    model = adapt(build("llama").to(torch.bfloat16), "llama")
    before = copy.deepcopy(model.state_dict())
    make(model, "llama", tmp_path, recipe=whole_batch(steps=2)).train()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) != ("lora_" in name)


def test_autocast_to_bf16_is_near_the_step_in_float32(tmp_path: Path) -> None:
    model = build("gpt2")
    twin = copy.deepcopy(model)
    make(model, "gpt2", tmp_path, recipe=whole_batch(), bf16=True).train()
    for name, expected in loop(twin, "gpt2").items():
        assert model.get_parameter(name).dtype == torch.float32
        torch.testing.assert_close(model.get_parameter(name), expected, rtol=0, atol=2e-3)


# -- units ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_table", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_user_can_be_the_unit(as_table: bool, tmp_path: Path) -> None:
    rows = [{**item, "user_id": f"u{i % 6}"} for i, item in enumerate(Texts("bert").items)]
    dataset: Any = rows
    if as_table:
        dataset = pytest.importorskip("datasets").Dataset.from_list(rows)
    trainer = make(
        build("bert"), "bert", tmp_path, budget=Budget(3, 1e-2), train_dataset=dataset, unit="user_id",
        options={"per_unit": 2}, per_device_train_batch_size=3, max_steps=3,
    )  # fmt: skip
    assert trainer.recipe.records == 6
    trainer.train()
    assert trainer.guarantee().unit == "user"
    assert "user" in str(trainer.guarantee())
    assert trainer.guarantee().epsilon == trainer.recipe.price(1e-2)


def test_a_users_step_clips_the_mean_of_its_records(tmp_path: Path) -> None:
    """Two users: the step is that of two examples, each the mean of its user's losses."""
    items = Texts("gpt2").items[:6]
    owners = [0, 0, 1, 1, 1, 0]
    model = build("gpt2")
    twin = copy.deepcopy(model)
    recipe = recipes.dpsgd(batch_size=2, steps=1, clip=CLIP, noise_multiplier=1e-9)
    make(model, "gpt2", tmp_path, recipe=recipe, train_dataset=items, unit=owners).train()
    total = {name: torch.zeros_like(p) for name, p in twin.named_parameters()}
    for owner in (0, 1):
        own = [item for item, each in zip(items, owners, strict=True) if each == owner]
        loss = torch.stack([twin(**collate([item])).loss for item in own]).mean()
        grads = torch.autograd.grad(loss, list(twin.parameters()))
        norm = torch.stack([g.norm() for g in grads]).norm()
        for name, grad in zip(total, grads, strict=True):
            total[name] += grad * (CLIP / norm).clamp(max=1.0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, twin.get_parameter(name) - RATE * total[name] / 2, rtol=1e-5, atol=1e-5)
