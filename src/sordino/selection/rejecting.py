"""What all selectors that reject have in common: rollback, and what is charged for a rejection."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent, NoOpDpEvent, PoissonSampledDpEvent

from sordino.errors import InvalidInput
from sordino.sampling import Foreign, Poisson
from sordino.selection.rollback import Rollback
from sordino.selection.selector import Selector, Snapshot
from sordino.terms import Terms

if TYPE_CHECKING:
    from sordino.recipe import Recipe
    from sordino.step import Attempt

_PAID = "selection.paid_step"


@dataclass(frozen=True, kw_only=True)
class Rejecting(Selector):
    """A selector that may roll a proposal back.

    With accounting="proven" every attempt is a step of the recipe and is charged. "published" charges a step once,
    however many attempts it takes until one is accepted, as papers 001 and 003 do: that is no guarantee.
    """

    accounting: str = "proven"

    def __post_init__(self) -> None:
        if self.accounting not in ("proven", "published"):
            raise InvalidInput(f"accounting={self.accounting!r} must be 'proven' or 'published'")

    @property
    def published(self) -> bool:
        return self.accounting == "published"

    @property
    def counts_attempts(self) -> bool:
        return not self.published

    @property
    def assumptions(self) -> tuple[str, ...]:
        if self.published:
            return ("accepted updates alone are charged, as in the paper; rejected ones reveal as much and are not",)
        return ("every attempt is charged, accepted or not",)

    def event(self, proposal: DpEvent) -> DpEvent:
        """Ask `terms`: the price of a test depends on the step and on the number of records."""
        raise self._unproven(proposal)

    def _unproven(self, proposal: DpEvent) -> InvalidInput:
        return InvalidInput(
            f"selection={type(self).__name__} is priced together with Gaussian proposals, not with {proposal!r}: "
            "use exact norms, or keep every proposal"
        )

    @abstractmethod
    def price(self, proposal: PoissonSampledDpEvent, step: int, recipe: Recipe) -> DpEvent:
        """What an attempt costs that is charged by proof."""
        ...

    @abstractmethod
    def published_price(self, proposal: PoissonSampledDpEvent, step: int, recipe: Recipe) -> DpEvent:
        """What the paper charges for an accepted update."""
        ...

    def terms(self, terms: Terms, recipe: Recipe, memory: dict[str, Any]) -> Terms:
        proposal = self._proposal(terms.event, recipe)
        if self.published != (recipe.basis == "published"):
            raise InvalidInput(
                f"accounting={self.accounting!r} of the selection and basis={recipe.basis!r} of the recipe must agree: "
                "use the constructors in sordino.recipes"
            )
        if not self.published:
            return replace(terms, event=self.price(proposal, terms.step, recipe))
        if memory.get(_PAID) == terms.step:
            return replace(terms, event=NoOpDpEvent())
        return replace(terms, event=self.published_price(proposal, terms.step, recipe))

    def _proposal(self, event: DpEvent, recipe: Recipe) -> PoissonSampledDpEvent:
        """The proposal as a Gaussian on a draw; anything else has no proof."""
        if type(recipe.sampler) not in (Poisson, Foreign):
            raise InvalidInput(
                f"sampler={recipe.sampler!r} with selection={type(self).__name__} has no proven price: each attempt is "
                "priced by itself, on a draw that no other attempt decides; use Poisson"
            )
        if isinstance(event, GaussianDpEvent):
            return PoissonSampledDpEvent(1.0, event)
        if isinstance(event, PoissonSampledDpEvent) and isinstance(event.event, GaussianDpEvent):
            return event
        raise self._unproven(event)

    def snapshot(self, attempt: Attempt) -> Snapshot | None:
        attempt.bench.memory[_PAID] = attempt.terms.step
        return Rollback(attempt.bench)


def together(*events: DpEvent) -> ComposedDpEvent:
    """All of `events`, as one that can be counted: dp_accounting asks for a list, which has no hash."""
    return ComposedDpEvent(cast(list[DpEvent], events))


def proposal_noise(proposal: PoissonSampledDpEvent) -> float:
    """The noise multiplier of a Gaussian proposal."""
    assert isinstance(proposal.event, GaussianDpEvent)
    return float(proposal.event.noise_multiplier)


def validation_rate(size: int, recipe: Recipe) -> float:
    """The rate of a validation draw of `size` expected records, from the public number of records."""
    if recipe.records is None or size > recipe.records:
        raise InvalidInput(
            f"validation_size={size} must be <= records={recipe.records}: it is the expected size of a draw"
        )
    return size / recipe.records
