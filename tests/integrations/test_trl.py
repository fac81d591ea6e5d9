"""PrivateSFTTrainer, with TRL's own tokenising, templates and collators."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sordino import Budget, InvalidInput, recipes

trl = pytest.importorskip("trl", reason="trl is not installed: make test-integrations")
datasets = pytest.importorskip("datasets", reason="datasets is not installed: make test-integrations")
peft = pytest.importorskip("peft", reason="peft is not installed: make test-integrations")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed: make test-integrations")
import transformers  # noqa: E402

from sordino.integrations.trl import PrivateSFTTrainer  # noqa: E402
from tests.finetuning.models import build  # noqa: E402

RECORDS, CLIP, RATE = 12, 0.5, 0.8
WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefg", "user", "assistant", ":", "yes", "no"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    words = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    made.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.chat_template = "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} <eos> {% endfor %}"
    return made


def answers() -> Any:
    """Prompts of different lengths with their completions, by four authors."""
    rows = [
        {"prompt": " ".join("abcdefg"[: 2 + n % 5]), "completion": f" {('yes', 'no')[n % 2]}", "author": n % 4}
        for n in range(RECORDS)
    ]
    return datasets.Dataset.from_list(rows)


def conversations() -> Any:
    def talk(n: int) -> list[dict[str, str]]:
        turns = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": ("yes", "no")[n % 2]}]
        return turns * (1 + n % 2)

    return datasets.Dataset.from_list([{"messages": talk(n)} for n in range(RECORDS)])


def make(model: nn.Module, folder: Path, data: Any, tokenizer: Any, **settings: Any) -> Any:
    names = ("recipe", "budget", "unit", "peft_config", "options", "eval_dataset")
    ours = {name: settings.pop(name) for name in names if name in settings}
    plain = {
        "use_cpu": True, "bf16": False, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 5,
    }  # fmt: skip
    args = trl.SFTConfig(str(folder), **{**plain, **settings})
    return PrivateSFTTrainer(model, args, train_dataset=data, processing_class=tokenizer, **ours)


def whole_batch(steps: int = 1) -> Any:
    return recipes.dpsgd(batch_size=RECORDS, steps=steps, clip=CLIP, noise_multiplier=1e-9)


def test_a_step_is_that_of_a_loop_over_single_rows(tmp_path: Path, tokenizer: Any) -> None:
    model = build("gpt2")
    trainer = make(model, tmp_path, answers(), tokenizer, recipe=whole_batch())
    twin = build("gpt2")  # as TRL replaces forward on the object, a copy of which would still run the first one
    rows, collate = trainer._find_records()
    batches = [copy.deepcopy(collate([row])) for row in rows]
    assert all((batch["labels"] == -100).any() for batch in batches)  # prompts are not learnt
    trainer.train()
    total = {name: torch.zeros_like(p) for name, p in twin.named_parameters()}
    for batch in batches:
        grads = torch.autograd.grad(twin(**batch).loss, list(twin.parameters()))
        norm = torch.stack([g.norm() for g in grads]).norm()
        for name, grad in zip(total, grads, strict=True):
            total[name] += grad * (CLIP / norm).clamp(max=1.0)
    for name, p in twin.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), p - RATE * total[name] / RECORDS, rtol=1e-5, atol=1e-5)
    assert max(float(sum_.abs().max()) for sum_ in total.values()) > 1e-2


def test_conversations_adapters_and_evaluation(tmp_path: Path, tokenizer: Any) -> None:
    trainer = make(
        build("gpt2"), tmp_path, conversations(), tokenizer, budget=Budget(3, 1e-2), max_steps=2, logging_steps=1,
        eval_strategy="steps", eval_steps=1, eval_dataset=conversations().select(range(3)),
        peft_config=peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"]),
    )  # fmt: skip
    trainer.train()
    assert trainer.guarantee().epsilon == trainer.recipe.price(1e-2) <= 3
    shown = {name for log in trainer.state.log_history for name in log if not name.startswith(("eval_", "train_"))}
    assert shown == {"learning_rate", "epoch", "step"}
    assert not any("loss" in name for log in trainer.state.log_history for name in log if "train" in name)
    trainer.create_model_card()
    assert str(trainer.guarantee()) in (tmp_path / "README.md").read_text()


@pytest.mark.slow
def test_an_author_can_be_the_unit(tmp_path: Path, tokenizer: Any) -> None:
    trainer = make(
        build("gpt2"), tmp_path, answers(), tokenizer, budget=Budget(3, 1e-2), max_steps=2, unit="author",
        per_device_train_batch_size=2, options={"unit_name": "author"},
    )  # fmt: skip
    assert trainer.recipe.records == 4
    trainer.train()
    assert trainer.guarantee().unit == "author"


@pytest.mark.parametrize(
    "settings",
    [{"packing": True}, {"padding_free": True}, {"loss_type": "dft"}],
    ids=lambda settings: next(iter(settings)),
)
def test_what_makes_several_records_one_row_is_refused(settings: Any, tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(InvalidInput, match=rf"is refused.*{next(iter(settings))}|{next(iter(settings))}=.*is refused"):
        make(build("gpt2"), tmp_path, answers(), tokenizer, budget=Budget(3, 1e-2), **settings)
    assert not (tmp_path / "sordino").exists()
