"""What a model shows of every example: posteriors, loss, embedding, gradient of its last layer. One example at a time.

The public implementation adds up the gradients of all examples before; here the gradient of the last linear layer is
written down in closed form, (p − e_y) ⊗ (embedding, 1), so that nothing can add up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.errors import InvalidInput

AT_ONCE = 1024
Examples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Signals:
    """One row per example. `embeddings` are what enters the last linear layer."""

    logits: Tensor
    labels: Tensor
    embeddings: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def posteriors(self) -> Tensor:
        return self.logits.softmax(1)

    @property
    def losses(self) -> Tensor:
        return F.cross_entropy(self.logits, self.labels, reduction="none")

    @property
    def correct(self) -> Tensor:
        return self.logits.argmax(1) == self.labels

    @property
    def gradients(self) -> Tensor:
        """The gradient of each example's own loss by the weights of the last layer, [examples, classes, features]."""
        errors = self.posteriors - F.one_hot(self.labels, self.logits.shape[1])
        return errors.unsqueeze(2) * self.embeddings.unsqueeze(1)

    @property
    def confidences(self) -> Tensor:
        """ln(p / (1 − p)) of the true class, which is nearly normal over models (Carlini et al. 2022, Eq. 4)."""
        own = self.logits.double().gather(1, self.labels.unsqueeze(1)).squeeze(1)
        hidden = F.one_hot(self.labels, self.logits.shape[1]).bool()
        return own - self.logits.double().masked_fill(hidden, -torch.inf).logsumexp(1)

    def rows(self, some: Tensor) -> Signals:
        return Signals(self.logits[some], self.labels[some], self.embeddings[some])


@torch.no_grad()
def signals(model: nn.Module, examples: Examples) -> Signals:
    """Query `model`, in eval mode meanwhile, about every example."""
    inputs, labels = examples
    seen: list[Tensor] = []
    handle = last_linear(model).register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].detach().cpu()))
    training = model.training
    model.eval()
    try:
        logits = torch.cat([model(part).detach().cpu() for part in inputs.split(AT_ONCE)])
    finally:
        model.train(training)
        handle.remove()
    return Signals(logits.float(), labels.cpu(), torch.cat(seen).flatten(1).float())


def last_linear(model: nn.Module) -> nn.Linear:
    """The layer whose gradient and whose inputs a white-box attacker looks at."""
    found = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not found:
        raise InvalidInput(f"model {type(model).__name__} has no linear layer, which the white-box attack looks at")
    return found[-1]
