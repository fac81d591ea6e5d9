"""Between transformers' objects and Sordino's: a model's batches, its forward pass, and what it must not hide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import Dataset, Subset

from sordino.errors import InvalidInput, UnsupportedModel
from sordino.finetuning import losses


@dataclass(frozen=True)
class AsDict:
    """A collator whose batches are plain dictionaries, as torch does not look into those of transformers.

    The collator does not see the column `without`, which holds the owner of a record.
    """

    collate: Callable[[list[Any]], Any]
    without: str | None = None

    def __call__(self, items: list[Any]) -> dict[str, Any]:
        if self.without is not None:
            items = [{name: value for name, value in item.items() if name != self.without} for item in items]
        batch = dict(self.collate(items))
        return {name: value for name, value in batch.items() if value is not None}


@dataclass(frozen=True, eq=False)
class MaskedRecords(Dataset[dict[str, Any]]):
    """Records whose tokens are masked at random when they are drawn, each separately, as a masking collator would.

    If a collator masks a whole batch, a record's masks depend on the records beside it, and mixing cannot be detected.
    Here a record is masked once for each draw, and the batch is only padded afterwards.
    """

    records: Any
    collate: Callable[[list[Any]], dict[str, Any]]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: value[0] for name, value in self.collate([self.records[index]]).items()}


@contextmanager
def plain_forward(model: nn.Module) -> Iterator[None]:
    """Run the model as its class defines it, without what TRL and Accelerate put in place of `forward` on the object.

    TRL's fused head is a closure over the model, which a copy for the probe would share; Accelerate's only does
    autocast, which `TaskLoss` does. Any other replacement is refused, because it would be silently left out.
    """
    parts = list(dict.fromkeys((model, losses.unwrap(model))))
    laid_by = {part: vars(part).pop("forward") for part in parts if "forward" in vars(part)}
    try:
        for part, forward in laid_by.items():
            if not (_is_of_trl(forward) or hasattr(part, "_original_forward")):
                raise UnsupportedModel(
                    f"forward of this {type(part).__name__} was replaced on the object: put it into a subclass"
                )
        yield
    finally:
        for part, forward in laid_by.items():
            part.forward = forward


def _is_of_trl(forward: Any) -> bool:
    return str(getattr(forward, "__globals__", {}).get("__name__", "")).startswith("trl.")


def require_seen_checkpoints(model: nn.Module) -> None:
    """Refuse a model whose activations are checkpointed the reentrant way, which hides parameters from autograd."""
    for module in model.modules():
        way = getattr(module, "_gradient_checkpointing_func", None)
        if getattr(module, "gradient_checkpointing", False) and getattr(way, "keywords", {}).get("use_reentrant"):
            raise InvalidInput(
                "the model has reentrant checkpoints on, which hide the parameters they use: call "
                "model.activation_checkpointing_enable({'use_reentrant': False})"
            )


def require_apart(train: Any, held_out: Any) -> None:
    """Refuse to evaluate on training records, or on some of them: the result would be published."""
    if train is None or held_out is None:
        return
    for each in held_out.values() if isinstance(held_out, dict) else (held_out,):
        same = each is train or (isinstance(each, Subset) and each.dataset is train)
        mark = getattr(train, "_fingerprint", None)
        if same or (mark is not None and mark == getattr(each, "_fingerprint", None)):
            raise InvalidInput(
                "the records to evaluate are the train_dataset: that would publish what is protected; hold some out"
            )
