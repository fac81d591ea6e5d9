"""The attack models of DPSUR, Sec. 6.4, as their public code builds them, trained without its mistakes.

Not copied from there: gradients that add up over all batches, a second softmax before the loss, and sizes that fit one
data set only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.audit.membership.signals import Signals

Features = list[Tensor]


class AttackNet(nn.Module):
    """One branch per feature (> 128 > 64, or a small convolution for gradients), joined to a member-or-not score."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dropout: float) -> None:
        super().__init__()
        self.branches = nn.ModuleList(_branch(shape, dropout) for shape in shapes)
        wide = 64 * len(shapes)
        self.joined = nn.Sequential(
            nn.Linear(wide, 256), nn.ReLU(), nn.Dropout(dropout), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)
        )

    def forward(self, features: Features) -> Tensor:
        parts = [branch(feature) for branch, feature in zip(self.branches, features, strict=True)]
        scores: Tensor = self.joined(torch.cat(parts, dim=1))
        return scores.squeeze(1)


def _branch(shape: tuple[int, ...], dropout: float) -> nn.Module:
    if len(shape) == 2:  # a gradient, as an image of one channel
        height, width = ((side + 1) // 2 for side in shape)
        body: list[nn.Module] = [nn.Unflatten(1, (1, shape[0])), nn.Conv2d(1, 4, 5, padding=2), nn.ReLU()]
        body += [nn.MaxPool2d(2, ceil_mode=True), nn.Flatten(), nn.Linear(4 * height * width, 128)]
    else:
        body = [nn.Linear(shape[0], 128)]
    return nn.Sequential(*body, nn.ReLU(), nn.Dropout(dropout), nn.Linear(128, 64), nn.ReLU())


def black_box_features(seen: Signals) -> Features:
    """Sorted posteriors and whether the prediction was right."""
    return [seen.posteriors.sort(1, descending=True).values, seen.correct.float().unsqueeze(1)]


def white_box_features(seen: Signals) -> Features:
    """Sorted posteriors, loss, last-layer gradient, label and embedding."""
    return [
        seen.posteriors.sort(1, descending=True).values,
        seen.losses.unsqueeze(1),
        seen.gradients,
        F.one_hot(seen.labels, seen.logits.shape[1]).float(),
        seen.embeddings,
    ]


class Attacker:
    """Learns from features of known members and others to score those of others still."""

    def __init__(self, *, epochs: int = 50, lr: float = 1e-3, batch: int = 128, dropout: float = 0.2, seed: int = 0):
        self.epochs, self.lr, self.batch, self.dropout, self.seed = epochs, lr, batch, dropout, seed
        self._scales: list[tuple[Tensor, Tensor]] = []
        self._net: AttackNet | None = None

    def fit(self, members: Features, others: Features) -> Attacker:
        """Train on as many of the ones as of the others; features are standardised by what the attacker knows."""
        size = min(len(members[0]), len(others[0]))
        known = [torch.cat([one[:size], other[:size]]) for one, other in zip(members, others, strict=True)]
        self._scales = [(feature.mean(0), feature.std(0) + 1e-6) for feature in known]
        known = self._standardised(known)
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
        scores: Tensor = self._net(self._standardised(features))
        return scores.double()

    def _standardised(self, features: Features) -> Features:
        return [(feature - mean) / std for feature, (mean, std) in zip(features, self._scales, strict=True)]
