"""The one private round, the audited core of federated training: every release about users passes through here.

::

    connected users -> sample -> (clients work) -> clip again -> sum + noise -> server optimizer -> model
                          \\_________ one event, recorded before any user is asked ________/

The parts are those of the private step (`sordino.step`), with a user in place of a record: the same recipes, schedules,
draws, weighings, noise and runs. `Quantile` adapts the clipping bound. Nothing in here depends on Flower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sordino.accounting.ledger import Receipt
from sordino.errors import BudgetExhausted, InvalidInput, SordinoError
from sordino.federated.work import find_trainable, measure
from sordino.noise import add_noise
from sordino.parts import Constant, Draw, Terms
from sordino.proposals import tell_noise
from sordino.recipe import LEAST_CLIP, Recipe
from sordino.run import FIXED_IN_ADVANCE, FLOATING_POINT, Run

ASSUMPTIONS = (
    FIXED_IN_ADVANCE,
    FLOATING_POINT,
    "the server is trusted: it sees every update before noise is added",
    "one user is one node, and the SuperLink lets a node answer for itself alone",
    "who is connected, who is asked and how long a round takes stay with the server",
)
"""What every guarantee to users rests on."""
LASTING = "a user keeps its node number for the whole run, also when it connects anew"
"""Also assumed if users are dealt into groups: under another number, a user would be dealt a second time."""
SENSITIVITY = 0.5
"""A client votes −1/2 or +1/2, and 0 when it is missing: half the sensitivity of 0 or 1 (Andrew et al. 2021)."""


@dataclass
class Round:
    """One round in progress. Everything in it except the terms is private, including the number of its users."""

    terms: Terms
    count_noise: float
    receipt: Receipt
    drawn: tuple[int, ...]
    waiting: set[int]
    total: dict[str, Tensor]
    votes: float = 0.0
    released: bool = False


class Rounds:
    """Takes private rounds with the parts of `recipe` on `model`; `run` pays for them.

    Guarantees: what moves the model is a Gaussian release of sensitivity ``terms.clip`` about a Poisson draw of users,
    divided by the public ``terms.divisor`` = rate × population; its event is in the ledger before any user is asked.
    Each drawn user contributes once, with length at most ``terms.clip``, whatever it sends; no one else contributes.
    Edge cases: an empty draw, or one in which no user answers, releases noise alone. An update that is not finite
    counts as zero. A user that drops out contributes zero, and the divisor does not change.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        optimizer: torch.optim.Optimizer,
        run: Run,
        adaptive: Quantile | None = None,
    ) -> None:
        check_recipe(recipe)
        if adaptive is not None:
            adaptive.check(recipe)
        self.model, self.recipe, self.optimizer, self.run = model, recipe, optimizer, run
        self.adaptive = adaptive
        self.clip = recipe.clip
        self.states = recipe.start()

    def terms(self) -> Terms:
        """Return the public terms of the next round."""
        whole = self.recipe.terms(self.run.position, self.states)
        return whole if self.adaptive is None else self.adaptive.share(whole, self.clip)

    def _count_noise(self) -> float:
        whole = self.recipe.terms(self.run.position, self.states)
        return 0.0 if self.adaptive is None else self.adaptive.deviation(whole)

    def begin(self, users: Sequence[int]) -> Round:
        """Sample among the connected `users`. The event is recorded first: from here on the round is paid for."""
        if self.run.position >= (self.recipe.steps or 0):
            raise BudgetExhausted(
                f"all {self.recipe.steps} rounds of the recipe are taken: calibrate a longer one for more"
            )
        sampler = self.recipe.sampler
        assert sampler is not None
        sampler.prepare(self, self.run.position)  # type: ignore[arg-type]  # those for users ask for the states alone
        terms, count_noise = self.terms(), self._count_noise()
        receipt = self.run.charge(terms.event)
        drawn = tuple(sampler.draw_among(sorted(set(users)), self.run.source, self.states.sampler))
        total = {
            n: torch.zeros(p.shape, dtype=torch.float64, device=p.device) for n, p in find_trainable(self.model).items()
        }
        return Round(terms, count_noise, receipt, drawn, set(drawn), total)

    def add(self, current: Round, user: int, update: Mapping[str, Tensor], within: bool) -> None:
        """Weigh and add one user's update; ignore users who were not drawn or have already answered.

        The user's own clipping is not trusted. `within` is its vote on the bound.
        """
        if user not in current.waiting:
            return
        current.waiting.remove(user)
        if {name: u.shape for name, u in update.items()} != {name: t.shape for name, t in current.total.items()}:
            return
        weight = self.weight(update, current.terms.clip)
        if weight == 0:  # not finite: 0 times infinity is not zero
            return
        for name, total in current.total.items():
            total.add_(update[name].to(total), alpha=weight)
        current.votes += SENSITIVITY if within else -SENSITIVITY

    def weight(self, update: Mapping[str, Tensor], clip: float) -> float:
        """Return the recipe's weight for an update: weight × norm ≤ clip, and 0 where the norm is not finite."""
        norms = measure(update).reshape(1)
        return float(self.recipe.weighing.weights(norms, clip, Draw(torch.zeros(1, dtype=torch.int64))))

    def release(self, current: Round) -> None:
        """Noise, once: ``(total + noise) / divisor`` is the server optimizer's gradient; votes move the bound."""
        if current.released:
            raise SordinoError("this round was released already: a second noise on it would halve the protection")
        current.released = True
        terms, parameters = current.terms, find_trainable(self.model)
        totals = [current.total[name] for name in parameters]
        self.recipe.noise.add(self.run.source, current.receipt, totals, terms.noise_std, self.states.noise)
        self.optimizer.zero_grad(set_to_none=True)
        for parameter, noisy in zip(parameters.values(), totals, strict=True):
            parameter.grad = (noisy / terms.divisor).to(parameter.dtype)
        tell_noise(self.optimizer, terms.noise_std / terms.divisor)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.adaptive is not None:
            exact = torch.tensor(current.votes, dtype=torch.float64)
            votes = add_noise(self.run.source, current.receipt, exact, current.count_noise).item()
            self.clip = self.adaptive.follow(self.clip, self.adaptive.fraction(votes, terms.divisor))
        self.run.position += 1


def check_recipe(recipe: Recipe) -> None:
    """Refuse what has no meaning or no proof when the records stay with their users."""
    recipe.terms(0)  # refuses a recipe that is not calibrated
    recipe.require("federated")


# -- a clipping bound that finds itself -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantile:
    """After every round C ← C · exp(−rate · (fraction − target)), fraction = noised share of updates within C.

    Each drawn client votes whether its update was within the bound; the sum of votes is released with Gaussian noise of
    deviation `count_noise`, unless given a twentieth of the expected number of clients (Andrew et al. 2021, Alg. 1), or
    twice the noise multiplier where that is more, which keeps the updates' noise within 4 per cent of the recipe's.

    Guarantees: costs nothing beyond the recipe's price. Votes and updates answer about the same draw, so both are one
    Gaussian of the recipe's noise multiplier z (law 3), which leaves z_Δ = (z⁻² − (2σ_b)⁻²)^(−1/2) for the updates
    (their Thm. 1): the votes are paid for with slightly more noise on the model.
    Edge cases: the fraction is relative to the public expected number of clients, so missing clients pull it towards
    1/2; it is cut to [0, 1] before it is used.
    """

    target: float = 0.5
    rate: float = 0.2
    count_noise: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise InvalidInput(f"target={self.target} must lie in (0, 1): it is the share of updates left unclipped")
        if not (self.rate > 0 and math.isfinite(self.rate)):
            raise InvalidInput(f"rate={self.rate} must be > 0 and finite: 0.2 is the usual value")
        if self.count_noise is not None and not (self.count_noise > 0 and math.isfinite(self.count_noise)):
            raise InvalidInput(f"count_noise={self.count_noise} must be > 0 and finite: without noise the votes leak")

    def deviation(self, terms: Terms) -> float:
        """Return σ_b, the deviation of the noise on the sum of votes; `terms` are the recipe's own."""
        if self.count_noise is not None:
            return self.count_noise
        return max(terms.divisor / 20, 2 * terms.noise_multiplier)

    def share(self, terms: Terms, clip: float) -> Terms:
        """Return `terms` at the bound `clip`, with the noise that the votes leave to the updates; same event.

        >>> from dp_accounting import GaussianDpEvent
        >>> terms = Terms(step=0, clip=1.0, noise_multiplier=1.0, divisor=100, event=GaussianDpEvent(1.0))
        >>> round(Quantile(count_noise=5).share(terms, clip=0.3).noise_multiplier, 4)
        1.005
        """
        precision = terms.noise_multiplier**-2 - (self.deviation(terms) / SENSITIVITY) ** -2
        if not precision > 0:
            raise InvalidInput(
                f"count_noise={self.count_noise} must be > noise_multiplier/2 = "
                f"{terms.noise_multiplier / 2:g}: the votes alone would spend the budget; give count_noise="
                f"{2 * terms.noise_multiplier:g}"
            )
        return replace(terms, clip=clip, noise_multiplier=precision**-0.5)

    def fraction(self, votes: float, divisor: float) -> float:
        """Return the share of updates within the bound, from the noised sum of votes."""
        return min(1.0, max(0.0, 0.5 + votes / divisor))

    def follow(self, clip: float, fraction: float) -> float:
        """Return the bound of the next round: geometric steps find its scale quickly (Andrew et al. 2021, Alg. 1).

        It stays where numbers have all their digits, however many rounds go one way.
        """
        return min(max(clip * math.exp(-self.rate * (fraction - self.target)), LEAST_CLIP), 1 / LEAST_CLIP)

    def check(self, recipe: Recipe) -> None:
        """Refuse a recipe whose bound moves by itself, or whose noise is too much for the votes in any round."""
        if not isinstance(recipe.clip_schedule, Constant):
            raise InvalidInput(
                f"adaptive=Quantile() with clip_schedule={recipe.clip_schedule!r}: both would move the bound; drop one"
            )
        for step in range(recipe.steps or 0):
            self.share(recipe.terms(step), recipe.clip)
