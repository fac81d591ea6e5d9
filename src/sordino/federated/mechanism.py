"""The one private round, the audited core of federated training: all that is released about users passes through here.

::

    connected users -> sample -> (clients work) -> clip again -> sum + noise -> server optimizer -> model
                          \\_________ one event, recorded before anybody is asked _________/

The parts are those of the private step (`sordino.step`), with a user where it has a record: the same recipes,
schedules, Poisson draws, weighings, noise sources and ledger. Nothing in here knows of Flower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sordino.accounting.ledger import Receipt
from sordino.errors import BudgetExhausted, SordinoError
from sordino.federated.account import Account
from sordino.federated.quantile import SENSITIVITY, Quantile
from sordino.federated.work import trainable
from sordino.noise import add_noise
from sordino.parts import Draw, Terms
from sordino.recipe import Recipe


@dataclass
class Round:
    """One round under way. Everything in it but the terms is private, the number of its users too."""

    terms: Terms
    count_noise: float
    receipt: Receipt
    drawn: tuple[int, ...]
    waiting: set[int]
    total: dict[str, Tensor]
    votes: float = 0.0
    released: bool = False


class Mechanism:
    """Takes private rounds with the parts of `recipe` on `model`; `account` pays for them.

    Guarantees: what moves the model is a Gaussian release of sensitivity ``terms.clip`` about a Poisson draw of users,
    divided by the public ``terms.divisor`` = rate × population; its event is in the ledger before anybody is asked.
    Each drawn user contributes once, at most ``terms.clip`` long, whatever it sends; nobody else contributes.
    Edge cases: an empty draw, or one in which nobody answers, releases noise alone. An update that is not finite is
    a zero. A user that drops out contributes zero, and the divisor does not know.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        optimizer: torch.optim.Optimizer,
        account: Account,
        adaptive: Quantile | None,
    ) -> None:
        check_recipe(recipe)
        if adaptive is not None:
            adaptive.check(recipe)
        self.model, self.recipe, self.optimizer, self.account = model, recipe, optimizer, account
        self.adaptive = adaptive
        self.clip = recipe.clip
        self.states = recipe.start()

    def terms(self) -> Terms:
        """The public terms of the next round."""
        whole = self.recipe.terms(self.account.position)
        return whole if self.adaptive is None else self.adaptive.share(whole, self.clip)

    def _count_noise(self) -> float:
        whole = self.recipe.terms(self.account.position)
        return 0.0 if self.adaptive is None else self.adaptive.deviation(whole)

    def begin(self, users: Sequence[int]) -> Round:
        """Sample among the connected `users`. The event is recorded first: from here on the round is paid for."""
        if self.account.position >= (self.recipe.steps or 0):
            raise BudgetExhausted(
                f"all {self.recipe.steps} rounds of the recipe are taken: calibrate a longer one for more"
            )
        terms, count_noise = self.terms(), self._count_noise()
        receipt = self.account.charge(terms.event)
        population = sorted(set(users))
        assert self.recipe.sampler is not None
        draw = self.recipe.sampler.draw(len(population), self.account.source, self.states.sampler)
        drawn = tuple(population[i] for i in draw.indices.tolist())
        total = {
            n: torch.zeros(p.shape, dtype=torch.float64, device=p.device) for n, p in trainable(self.model).items()
        }
        return Round(terms, count_noise, receipt, drawn, set(drawn), total)

    def add(self, current: Round, user: int, update: Mapping[str, Tensor], within: bool) -> None:
        """Weigh and add one user's update; whoever was not drawn, or answered already, is passed over.

        The user's own clipping is not trusted. `within` is its vote on the bound.
        """
        if user not in current.waiting:
            return
        current.waiting.remove(user)
        if {name: u.shape for name, u in update.items()} != {name: t.shape for name, t in current.total.items()}:
            return
        weight = self.weight(update, current.terms.clip)
        if weight == 0:  # not finite: 0 times infinity is no zero
            return
        for name, total in current.total.items():
            total.add_(update[name].to(total), alpha=weight)
        current.votes += SENSITIVITY if within else -SENSITIVITY

    def weight(self, update: Mapping[str, Tensor], clip: float) -> float:
        """The recipe's weight for an update: weight × norm ≤ clip, and 0 where the norm is not finite."""
        norms = norm_of(update).reshape(1)
        return float(self.recipe.weighing.weights(norms, clip, Draw(torch.zeros(1, dtype=torch.int64))))

    def release(self, current: Round) -> None:
        """Noise, once: ``(total + noise) / divisor`` is the server optimizer's gradient; votes move the bound."""
        if current.released:
            raise SordinoError("this round was released already: a second noise on it would halve the protection")
        current.released = True
        terms, parameters = current.terms, trainable(self.model)
        totals = [current.total[name] for name in parameters]
        self.recipe.noise.add(self.account.source, current.receipt, totals, terms.noise_std, self.states.noise)
        self.optimizer.zero_grad(set_to_none=True)
        for name, parameter in parameters.items():
            parameter.grad = (current.total[name] / terms.divisor).to(parameter.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.adaptive is not None:
            exact = torch.tensor(current.votes, dtype=torch.float64)
            votes = add_noise(self.account.source, current.receipt, exact, current.count_noise).item()
            self.clip = self.adaptive.following(self.clip, self.adaptive.fraction(votes, terms.divisor))
        self.account.position += 1


def norm_of(update: Mapping[str, Tensor]) -> Tensor:
    """The length of a whole update, in double precision."""
    norms = [torch.linalg.vector_norm(u, dtype=torch.float64) for u in update.values()]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return whole


def check_recipe(recipe: Recipe) -> None:
    """Refuse what has no meaning or no proof when the records stay with their users."""
    recipe.terms(0)  # refuses a recipe that is not calibrated
    recipe.require("federated")
