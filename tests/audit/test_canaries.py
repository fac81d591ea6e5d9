"""One run with canaries: silent where training is private, loud where it is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sordino import Budget, Private, recipes
from sordino.accounting.ledger import Receipt
from sordino.audit.canaries import Canaries, diracs, random_labels
from sordino.noise import Seeded
from tests.audit.membership.test_attacks import CLASSES, FEATURES, examples

COUNT = 160


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def known() -> tuple[Tensor, Tensor]:
    return examples()[0][:300], examples()[1][:300]


def privately(canaries: Canaries, trained: nn.Module, epsilon: float, **options: object) -> float:
    records = len(canaries.examples[1])
    recipe = recipes.dpsgd(batch_size=records, steps=5).calibrate(Budget(epsilon=epsilon, delta=1e-5), records=records)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    run = Private(trained, optimizer, canaries.examples, canaries.loss, recipe, engine="vmap", **options)  # type: ignore[arg-type]
    list(run.steps())
    return run.guarantee().epsilon


def test_random_labels_show_in_a_model_that_learnt_them_by_heart() -> None:
    canaries = random_labels(known(), examples()[0][300 : 300 + COUNT], CLASSES, consent=True, seed=4)
    trained = model()
    optimizer = torch.optim.Adam(trained.parameters(), lr=0.01)
    for _ in range(80):
        optimizer.zero_grad()
        canaries.loss(trained, canaries.examples).mean().backward()
        optimizer.step()
    found = canaries.audit(trained, epsilon=1.0, delta=1e-5, guesses=COUNT)
    assert found.epsilon_lower > 1.0
    assert not found.passed
    with pytest.raises(Exception, match="the claim is BROKEN"):
        found.require_passed()
    blank = canaries.audit(model(), epsilon=1.0, delta=1e-5)
    assert blank.passed
    assert blank.epsilon_lower == 0.0


class Tenth(Seeded):
    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        return super().gaussian(receipt, size, std / 10)


def test_dirac_canaries_see_much_of_a_large_epsilon_and_too_little_noise_breaks_a_small_one() -> None:
    for claim, source, honest in ((6.0, Seeded(1), True), (2.0, Tenth(1), False)):
        trained = model()
        canaries = diracs(known(), trained, 1000, consent=True, seed=2)
        claimed = privately(canaries, trained, claim, source=source)
        found = canaries.audit(trained, epsilon=claimed, delta=1e-5)
        assert found.epsilon_lower > 1.0
        assert found.passed == honest


def test_canaries_need_consent_and_room() -> None:
    with pytest.raises(ValueError, match="consent=False"):
        diracs(known(), model(), 4, consent=False)
    with pytest.raises(ValueError, match="count=10000"):
        diracs(known(), model(), 10_000, consent=True)


def test_canaries_are_marked_and_half_of_them_join() -> None:
    canaries = diracs(known(), model(), COUNT, consent=True, seed=3)
    numbers = canaries.examples[2]
    assert (numbers[:300] == -1).all()
    assert numbers[300:].tolist() == canaries.included.nonzero().squeeze(1).tolist()
    assert 50 < int(canaries.included.sum()) < 110
