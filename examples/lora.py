"""Fine-tune a frozen backbone privately, through low-rank adapters: nothing is downloaded.

A small network learns the digits 0 to 4, which play the public data. Its weights are then frozen; adapters of rank 4
(LoRA, Hu et al. 2021) and a new last layer learn the digits 5 to 9 privately.

It shows how a frozen backbone is used, not that adapters win: on 700 records of 64 pixels the same network trained in
full is as good. The learning rate was chosen on these digits.

    python examples/lora.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sordino import Budget, Private, recipes

Records = tuple[Tensor, Tensor]


class Adapted(nn.Module):
    """A frozen linear layer and a trained low-rank change of it: W x + (1/r) B A x. B starts at zero."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        self.rank = rank
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x)) / self.rank


def loss(model: nn.Module, batch: Records) -> Tensor:
    """One loss per example."""
    images, labels = batch
    return cross_entropy(model(images), labels, reduction="none")


def digits() -> tuple[Records, Records, Records]:
    """Public records (0 to 4), private training records and held-out records (5 to 9, relabelled 0 to 4)."""
    pixels, targets = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16).float(), torch.tensor(targets)
    public, private = y < 5, torch.nonzero(y >= 5).squeeze(1)
    train, test = private[:700], private[700:]
    return (x[public], y[public]), (x[train], y[train] - 5), (x[test], y[test] - 5)


def pretrained(public: Records, steps: int = 300) -> nn.Sequential:
    """The backbone, trained without privacy on public records."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, public).mean().backward()
        optimizer.step()
    return model


def adapted(backbone: nn.Sequential, rank: int = 4) -> nn.Sequential:
    """The same network with frozen layers, adapters beside them, and a new last layer."""
    first, second = backbone[0], backbone[2]
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    return nn.Sequential(Adapted(first, rank), nn.ReLU(), Adapted(second, rank), nn.ReLU(), nn.Linear(128, 5))


def fine_tune(model: nn.Sequential, train: Records, epsilon: float, epochs: int) -> Private:
    """Train what is not frozen; the optimizer may hold all parameters, frozen ones are left alone."""
    records = len(train[1])
    recipe = recipes.dpsgd(batch_size=128, epochs=epochs).calibrate(Budget(epsilon, 1e-5), records=records)
    private = Private(model, torch.optim.SGD(model.parameters(), lr=2.0), train, loss, recipe)
    for _ in private.steps():
        pass
    return private


def accuracy(model: nn.Module, records: Records) -> float:
    """The share of `records` that `model` classifies rightly."""
    return (model(records[0]).argmax(1) == records[1]).float().mean().item()


def main(epsilon: float = 2.0, epochs: int = 20) -> None:
    """Pre-train in public, fine-tune in private, print what it cost."""
    torch.manual_seed(0)
    public, train, test = digits()
    model = adapted(pretrained(public))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{trained:,} of {sum(p.numel() for p in model.parameters()):,} parameters are trained")
    private = fine_tune(model, train, epsilon, epochs)
    print(f"held-out accuracy {accuracy(model, test):.1%} at")
    print(private.guarantee())


if __name__ == "__main__":
    main()
