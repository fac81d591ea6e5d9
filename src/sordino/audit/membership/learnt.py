"""The two attacks of DPSUR, Sec. 6.4: an attack model learnt from a shadow model, or from members already known."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sordino.audit.membership.networks import Attacker, black_box_features, white_box_features
from sordino.audit.membership.partition import Partition
from sordino.audit.membership.scoring import Membership, score
from sordino.audit.membership.signals import Examples, Signals, signals


def black_box(
    target: nn.Module, shadow: nn.Module, examples: Examples, partition: Partition, attacker: Attacker | None = None
) -> Membership:
    """Learn from the shadow model how members look, then judge the target's (Salem et al. 2019).

    The shadow model is trained on ``partition.shadow_members`` by whoever calls, in the way of the target.
    """
    learner = attacker or Attacker()
    theirs = [signals(shadow, _rows(examples, part)) for part in (partition.shadow_members, partition.shadow_others)]
    learner.fit(*(black_box_features(part) for part in theirs))
    ours = [signals(target, _rows(examples, part)) for part in (partition.target_members, partition.target_others)]
    members, others = (learner.score(black_box_features(part)).numpy() for part in ours)
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
    seen = [signals(target, _rows(examples, part)) for part in (partition.target_members, partition.target_others)]
    halves = [_divided(part, known, seed) for part in seen]
    learner.fit(*(white_box_features(first) for first, _ in halves))
    members, others = (learner.score(white_box_features(second)).numpy() for _, second in halves)
    return score("white-box, partial knowledge", members, others)


def loss_threshold(target: nn.Module, examples: Examples, partition: Partition) -> Membership:
    """Members have small losses: no learning at all (Yeom et al. 2018)."""
    members, others = (
        -signals(target, _rows(examples, part)).losses.double().numpy()
        for part in (partition.target_members, partition.target_others)
    )
    return score("loss threshold", members, others)


def _rows(examples: Examples, some: Tensor) -> Examples:
    return examples[0][some], examples[1][some]


def _divided(seen: Signals, share: float, seed: int) -> tuple[Signals, Signals]:
    order = torch.randperm(len(seen), generator=torch.Generator().manual_seed(seed))
    first = round(share * len(seen))
    return seen.rows(order[:first]), seen.rows(order[first:])
