"""Attacks find the members of a model that has learnt its records by heart, and none where there is nothing to find."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.audit.membership import (
    Attacker,
    Partition,
    References,
    black_box,
    lira,
    loss_threshold,
    query,
    rmia,
    train_references,
    white_box,
)
from sordino.audit.membership.shadows import draw_halves

RECORDS, FEATURES, CLASSES = 600, 20, 4
Examples = tuple[Tensor, Tensor]


@functools.cache
def examples() -> Examples:
    """Labels that nothing predicts: whoever predicts them has them by heart."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(RECORDS, FEATURES, generator=generator)
    return x, torch.randint(CLASSES, (RECORDS,), generator=generator)


def train(data: Examples, seed: int, epochs: int = 60) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(epochs):
            optimizer.zero_grad()
            F.cross_entropy(model(data[0]), data[1]).backward()
            optimizer.step()
    return model


def rows(part: Tensor) -> Examples:
    return examples()[0][part], examples()[1][part]


PARTITION = Partition.of(RECORDS, seed=1)


def test_the_partition_is_random_disjoint_and_two_to_one_to_two_to_one() -> None:
    parts = [PARTITION.target_members, PARTITION.target_others, PARTITION.shadow_members, PARTITION.shadow_others]
    assert [len(part) for part in parts] == [200, 100, 200, 100]
    assert len(torch.cat(parts).unique()) == RECORDS
    assert all(part.float().mean() == pytest.approx(RECORDS / 2, abs=60) for part in parts), "blocks would not mix"


def test_gradients_are_each_examples_own() -> None:
    model = train(rows(PARTITION.target_members), 0, epochs=5)
    seen = query(model, examples())
    for i in (0, 1, 57):
        loss = F.cross_entropy(model(examples()[0][i : i + 1]), examples()[1][i : i + 1])
        (expected,) = torch.autograd.grad(loss, [model[2].weight])  # type: ignore[index]
        assert torch.allclose(seen.gradients[i], expected, atol=1e-6)
        assert seen.losses[i].item() == pytest.approx(loss.item(), rel=1e-5)
        own = seen.posteriors[i, examples()[1][i]].double()
        assert seen.confidences[i].item() == pytest.approx(torch.log(own / (1 - own)).item(), rel=1e-3)
    assert model.training, "the model is left in the mode it had"


def test_every_attack_finds_members_of_an_overfitted_model_and_none_of_an_untrained_one() -> None:
    target, shadow = (
        train(rows(part), n) for n, part in enumerate((PARTITION.target_members, PARTITION.shadow_members))
    )
    blank = train(rows(PARTITION.target_members), 5, epochs=0)
    attacker = functools.partial(Attacker, epochs=15)
    for attacked, leaks in ((target, True), (blank, False)):
        found = [
            black_box(attacked, shadow, examples(), PARTITION, attacker()),
            white_box(attacked, examples(), PARTITION, attacker=attacker()),
            loss_threshold(attacked, examples(), PARTITION),
        ]
        for result in found:
            assert (result.auc.low > 0.6) == leaks, str(result)
            assert result.auc.low < 0.5 or leaks, str(result)


@functools.cache
def reference_scores() -> tuple[np.ndarray, np.ndarray, References, tuple[np.ndarray, np.ndarray]]:
    """A target, reference models on random halves, and a population that nobody trained on."""
    known, population = rows(torch.arange(300)), rows(torch.arange(300, 600))
    found, models = train_references(train, known, 16, seed=3)
    members = draw_halves(300, 2, seed=9)[0]
    target = train((known[0][members], known[1][members]), 77)
    apart = np.stack([query(model, population).confidences.numpy() for model in models])
    return (
        query(target, known).confidences.numpy(),
        members.numpy(),
        found,
        (query(target, population).confidences.numpy(), apart),
    )


@pytest.mark.parametrize("online", [True, False])
def test_lira_and_rmia_find_members_and_random_membership_is_not_found(online: bool) -> None:
    target, members, found, population = reference_scores()
    strangers = np.random.default_rng(0).permutation(members)
    for attack in (
        lambda truth: lira(target, truth, found, online=online),
        lambda truth: rmia(target, truth, found, population, online=online),
    ):
        assert attack(members).auc.low > 0.8
        wrong = attack(strangers).auc
        assert wrong.low < 0.5 < wrong.high + 0.05


def test_lira_is_optimal_for_normal_confidences_of_different_difficulty() -> None:
    """Examples differ in difficulty far more than membership moves them: only per-example comparison sees it."""
    generator = np.random.default_rng(2)
    difficulty = generator.normal(0, 10, 500)
    inside = draw_halves(500, 64, seed=1).numpy()
    found = References(difficulty + generator.normal(0, 1, inside.shape) + 3.0 * inside, inside)
    members = generator.random(500) < 0.5
    target = difficulty + generator.normal(0, 1, 500) + 3.0 * members
    assert lira(target, members, found).auc.value > 0.96
    easy = References(np.sort(found.confidences, axis=1), inside)
    assert lira(target, members, easy).auc.value < 0.8, "references that belong to other examples do not help"


def test_references_need_every_example_inside_and_outside() -> None:
    with pytest.raises(ValueError, match="inside some reference model and outside some"):
        References(np.zeros((2, 3)), np.ones((2, 3), dtype=bool))
