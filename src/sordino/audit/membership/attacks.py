"""Attacks that ask a model about records: by loss, and by the attack models of DPSUR, Sec. 6.4.

These are built as DPSUR's public code builds them, and trained without its mistakes: gradients that accumulate over all
batches and all earlier examples, a second softmax before the loss, and sizes that fit only one dataset. The gradient of
the last linear layer is written down in closed form, (p − e_y) ⊗ (embedding, 1): nothing can add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.audit.membership.scoring import Membership, score
from sordino.errors import InvalidInput

AT_ONCE = 1024
Examples = tuple[Tensor, Tensor]
Features = list[Tensor]
SHARES = (2, 1, 2, 1)


@dataclass(frozen=True)
class Partition:
    """Indices, at random and disjoint, in the proportions 2:1:2:1 (DPSUR, Sec. 6.4.2)."""

    target_members: Tensor
    target_others: Tensor
    shadow_members: Tensor
    shadow_others: Tensor

    @staticmethod
    def of(records: int, seed: int = 0) -> Partition:
        """Divide `records` records; consecutive blocks, as in the public implementation, would follow their order."""
        if records < sum(SHARES) * 4:
            raise InvalidInput(f"records={records} must be >= {sum(SHARES) * 4}: each of four parts needs some")
        order = torch.randperm(records, generator=torch.Generator().manual_seed(seed))
        unit = records // sum(SHARES)
        parts = order[: unit * sum(SHARES)].split([share * unit for share in SHARES])
        return Partition(*parts)


def black_box(
    target: nn.Module, shadow: nn.Module, examples: Examples, partition: Partition, attacker: Attacker | None = None
) -> Membership:
    """Learn from the shadow model how members look, then judge the target's (Salem et al. 2019).

    The caller trains the shadow model on ``partition.shadow_members``, in the same way as the target.
    """
    learner = attacker or Attacker()
    theirs = _query_each(shadow, examples, partition.shadow_members, partition.shadow_others)
    learner.fit(*(_list_black_box_features(part) for part in theirs))
    ours = _query_each(target, examples, partition.target_members, partition.target_others)
    members, others = (learner.score(_list_black_box_features(part)).numpy() for part in ours)
    return score("black-box, shadow model", members, others)


def white_box(
    target: nn.Module,
    examples: Examples,
    partition: Partition,
    *,
    known: float = 0.5,
    attacker: Attacker | None = None,
    seed: int = 0,
) -> Membership:
    """Learn from a share `known` of the target's members and others, model in hand (Nasr et al. 2019)."""
    learner = attacker or Attacker()
    seen = _query_each(target, examples, partition.target_members, partition.target_others)
    halves = [_divide(part, known, seed) for part in seen]
    learner.fit(*(_list_white_box_features(first) for first, _ in halves))
    members, others = (learner.score(_list_white_box_features(second)).numpy() for _, second in halves)
    return score("white-box, partial knowledge", members, others)


def loss_threshold(target: nn.Module, examples: Examples, partition: Partition) -> Membership:
    """Members have small losses: no learning at all (Yeom et al. 2018)."""
    seen = _query_each(target, examples, partition.target_members, partition.target_others)
    members, others = (-part.losses.double().numpy() for part in seen)
    return score("loss threshold", members, others)


def _query_each(model: nn.Module, examples: Examples, *parts: Tensor) -> list[Signals]:
    """Return what `model` shows of each of these parts of the examples."""
    return [query(model, (examples[0][part], examples[1][part])) for part in parts]


def _divide(seen: Signals, share: float, seed: int) -> tuple[Signals, Signals]:
    order = torch.randperm(len(seen), generator=torch.Generator().manual_seed(seed))
    first = round(share * len(seen))
    return seen.rows(order[:first]), seen.rows(order[first:])


# -- what a model shows of every example ------------------------------------------------------------------------------


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
def query(model: nn.Module, examples: Examples) -> Signals:
    """Query `model`, in eval mode, about every example."""
    inputs, labels = examples
    seen: list[Tensor] = []
    handle = _find_last_linear(model).register_forward_pre_hook(
        lambda _, arguments: seen.append(arguments[0].detach().cpu())
    )
    training = model.training
    model.eval()
    try:
        logits = torch.cat([model(part).detach().cpu() for part in inputs.split(AT_ONCE)])
    finally:
        model.train(training)
        handle.remove()
    return Signals(logits.float(), labels.cpu(), torch.cat(seen).flatten(1).float())


def _find_last_linear(model: nn.Module) -> nn.Linear:
    """Return the layer whose gradient and whose inputs a white-box attacker looks at."""
    found = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not found:
        raise InvalidInput(f"model {type(model).__name__} has no linear layer, which the white-box attack looks at")
    return found[-1]


# -- attack models ----------------------------------------------------------------------------------------------------


class AttackNet(nn.Module):
    """One branch per feature (> 128 > 64, or a small convolution for gradients), joined to a member-or-not score."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dropout: float) -> None:
        super().__init__()
        self.branches = nn.ModuleList(_build_branch(shape, dropout) for shape in shapes)
        wide = 64 * len(shapes)
        self.joined = nn.Sequential(
            nn.Linear(wide, 256), nn.ReLU(), nn.Dropout(dropout), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)
        )

    def forward(self, features: Features) -> Tensor:
        parts = [branch(feature) for branch, feature in zip(self.branches, features, strict=True)]
        scores: Tensor = self.joined(torch.cat(parts, dim=1))
        return scores.squeeze(1)


def _build_branch(shape: tuple[int, ...], dropout: float) -> nn.Module:
    if len(shape) == 2:  # a gradient, as an image of one channel
        height, width = ((side + 1) // 2 for side in shape)
        body: list[nn.Module] = [nn.Unflatten(1, (1, shape[0])), nn.Conv2d(1, 4, 5, padding=2), nn.ReLU()]
        body += [nn.MaxPool2d(2, ceil_mode=True), nn.Flatten(), nn.Linear(4 * height * width, 128)]
    else:
        body = [nn.Linear(shape[0], 128)]
    return nn.Sequential(*body, nn.ReLU(), nn.Dropout(dropout), nn.Linear(128, 64), nn.ReLU())


def _list_black_box_features(seen: Signals) -> Features:
    """Sorted posteriors and whether the prediction was right."""
    return [seen.posteriors.sort(1, descending=True).values, seen.correct.float().unsqueeze(1)]


def _list_white_box_features(seen: Signals) -> Features:
    """Sorted posteriors, loss, last-layer gradient, label and embedding."""
    return [
        seen.posteriors.sort(1, descending=True).values,
        seen.losses.unsqueeze(1),
        seen.gradients,
        F.one_hot(seen.labels, seen.logits.shape[1]).float(),
        seen.embeddings,
    ]


class Attacker:
    """Learns from features of known members and non-members to score further records."""

    def __init__(self, *, epochs: int = 50, lr: float = 1e-3, batch: int = 128, dropout: float = 0.2, seed: int = 0):
        self.epochs, self.lr, self.batch, self.dropout, self.seed = epochs, lr, batch, dropout, seed
        self._scales: list[tuple[Tensor, Tensor]] = []
        self._net: AttackNet | None = None

    def fit(self, members: Features, others: Features) -> Attacker:
        """Train on equally many of both; features are standardised by what the attacker knows."""
        size = min(len(members[0]), len(others[0]))
        known = [torch.cat([one[:size], other[:size]]) for one, other in zip(members, others, strict=True)]
        self._scales = [(feature.mean(0), feature.std(0) + 1e-6) for feature in known]
        known = self._standardise(known)
        labels = torch.cat([torch.ones(size), torch.zeros(size)])
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            self._net = AttackNet([tuple(feature.shape[1:]) for feature in known], self.dropout)
            self._train(known, labels)
        return self

    def _train(self, known: Features, labels: Tensor) -> None:
        assert self._net is not None
        optimizer = torch.optim.Adam(self._net.parameters(), lr=self.lr, weight_decay=1e-4)
        self._net.train()
        for _ in range(self.epochs):
            for part in torch.randperm(len(labels)).split(self.batch):
                optimizer.zero_grad()
                scores = self._net([feature[part] for feature in known])
                F.binary_cross_entropy_with_logits(scores, labels[part]).backward()
                optimizer.step()

    @torch.no_grad()
    def score(self, features: Features) -> Tensor:
        """Higher for those that look like members."""
        assert self._net is not None
        self._net.eval()
        scores: Tensor = self._net(self._standardise(features))
        return scores.double()

    def _standardise(self, features: Features) -> Features:
        return [(feature - mean) / std for feature, (mean, std) in zip(features, self._scales, strict=True)]
