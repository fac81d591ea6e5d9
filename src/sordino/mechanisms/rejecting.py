"""What selectors that reject have in common: the charge for an attempt, rollback, and the use of rejected gradients."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent, NoOpDpEvent, PoissonSampledDpEvent
from torch import Tensor, nn

from sordino.combinations import Needs
from sordino.errors import InvalidInput
from sordino.noise import Independent
from sordino.parts import Flat, Foreign, Poisson, Selector, Snapshot, State, Terms
from sordino.recipe import Common, Optimizer, Recipe

if TYPE_CHECKING:
    from sordino.step import Attempt, Bench


@dataclass
class Attempts(State):
    """Which step was paid for last, and the sum and number of the gradients that were rejected at this model."""

    paid_step: int | None = None
    rejected: list[Tensor] | None = None
    averaged: int = 0


@dataclass(frozen=True, kw_only=True)
class Rejecting(Selector):
    """A selector that may roll a proposal back.

    With accounting="proven" every attempt is a step of the recipe and is charged. "published" charges a step once,
    however many attempts it takes until one is accepted, as DPSUR and noise screening do: that gives no guarantee.
    """

    accounting: str = "proven"
    needs: ClassVar[tuple[Needs, ...]] = (
        Needs(
            "sampler",
            "sampler={part!r} with selection={owner} has no proven price: each attempt is "
            "priced by itself, on a draw that no other attempt decides; use Poisson",
            (Poisson, Foreign),
        ),
        Needs(
            "noise",
            "noise={part!r} with selection={owner} has no proven price: each attempt is priced by itself; "
            "use Independent()",
            (Independent,),
        ),
    )

    def start(self) -> Attempts:
        return Attempts()

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
        """Return the proven cost of an attempt."""
        ...

    @abstractmethod
    def published_price(self, proposal: PoissonSampledDpEvent, step: int, recipe: Recipe) -> DpEvent:
        """Return what the paper charges for an accepted update."""
        ...

    def terms(self, terms: Terms, recipe: Recipe, state: Attempts) -> Terms:
        proposal = self._proposal(terms.event)
        if self.published != (recipe.basis == "published"):
            raise InvalidInput(
                f"accounting={self.accounting!r} of the selection and basis={recipe.basis!r} of the recipe must agree: "
                "use the constructors in sordino.recipes"
            )
        if not self.published:
            return replace(terms, event=self.price(proposal, terms.step, recipe))
        if state.paid_step == terms.step:
            return replace(terms, event=NoOpDpEvent())
        return replace(terms, event=self.published_price(proposal, terms.step, recipe))

    def _proposal(self, event: DpEvent) -> PoissonSampledDpEvent:
        """Return the proposal as a Gaussian on a draw; anything else has no proof."""
        if isinstance(event, GaussianDpEvent):
            return PoissonSampledDpEvent(1.0, event)
        if isinstance(event, PoissonSampledDpEvent) and isinstance(event.event, GaussianDpEvent):
            return event
        raise self._unproven(event)

    def snapshot(self, attempt: Attempt) -> Snapshot | None:
        attempt.bench.states.selection.paid_step = attempt.terms.step
        return Rollback(attempt.bench)


def recipe_with(name: str, selection: Rejecting, clip: float, optimizer: Optimizer, common: Common) -> Recipe:
    """Make a recipe of plain parts, except for its selection."""
    return Recipe(
        name=name,
        clip=clip,
        weighing=Flat(),
        selection=selection,
        optimizer=optimizer,
        basis="published" if selection.published else "proven",
        **common,
    )


def together(*events: DpEvent) -> ComposedDpEvent:
    """Join `events` into one that can be counted: dp_accounting wants a list, which has no hash."""
    return ComposedDpEvent(cast(list[DpEvent], events))


def proposal_noise(proposal: PoissonSampledDpEvent) -> float:
    """Return the noise multiplier of a Gaussian proposal."""
    assert isinstance(proposal.event, GaussianDpEvent)
    return float(proposal.event.noise_multiplier)


def validation_rate(size: int, recipe: Recipe) -> float:
    """Return the rate of a validation draw of `size` expected records, from the public number of records."""
    if recipe.records is None or size > recipe.records:
        raise InvalidInput(
            f"validation_size={size} must be <= records={recipe.records}: it is the expected size of a draw"
        )
    return size / recipe.records


# -- rollback ---------------------------------------------------------------------------------------------------------


class Rollback:
    """Parameters, buffers, optimizer state, learning rates and schedulers as they were.

    Guarantees: `restore` is exact, bit for bit, and keeps every tensor of the model where it is, so that references to
    it stay valid. State that the optimizer created with the proposal is gone afterwards.
    Edge cases: a learning-rate scheduler that was given to ``private.attach`` steps with the proposal; one that the
    user steps in their own loop is the user's responsibility.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._model = _tensors(bench.objective.model)
        self._values = [tensor.detach().clone() for _, _, tensor in self._model]
        self._state = {p: _clone(state) for p, state in bench.optimizer.state.items()}
        self._groups = [_clone(_hyperparameters(group)) for group in bench.optimizer.param_groups]
        self._schedules = [copy.deepcopy(scheduler.state_dict()) for scheduler in bench.schedulers]

    def restore(self) -> None:
        """Put everything back; may be called more than once."""
        self._write(self._values)
        optimizer = self._bench.optimizer
        optimizer.state.clear()
        for parameter, state in self._state.items():
            optimizer.state[parameter] = _clone(state)
        for group, before in zip(optimizer.param_groups, self._groups, strict=True):
            for key in _hyperparameters(group).keys() - before.keys():
                del group[key]
            for key, value in _clone(before).items():
                if isinstance(value, Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value
        for scheduler, schedule in zip(self._bench.schedulers, self._schedules, strict=True):
            scheduler.load_state_dict(copy.deepcopy(schedule))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Work on the model as it was before the proposal, which is put back afterwards."""
        proposed = [getattr(module, name).detach().clone() for module, name, _ in self._model]
        self._write(self._values)
        try:
            yield
        finally:
            self._write(proposed)

    def movement(self, parameters: list[nn.Parameter]) -> tuple[list[Tensor], list[Tensor]]:
        """Return where `parameters` were, and how far the proposal moved them."""
        values = {id(tensor): value for (_, _, tensor), value in zip(self._model, self._values, strict=True)}
        start = [values[id(p)] for p in parameters]
        return start, [p.detach() - before for p, before in zip(parameters, start, strict=True)]

    @torch.no_grad()
    def _write(self, values: list[Tensor]) -> None:
        for (module, name, _), value in zip(self._model, values, strict=True):
            current = getattr(module, name)
            if current.shape == value.shape:
                current.copy_(value)
            else:  # the forward pass replaced this buffer by one of another size
                setattr(module, name, value.clone())


@torch.no_grad()
def move_to(parameters: list[nn.Parameter], start: list[Tensor], movement: list[Tensor], length: float) -> None:
    """Put the model at ``start + length * movement``."""
    for parameter, origin, direction in zip(parameters, start, movement, strict=True):
        parameter.copy_(origin + length * direction)


def shorten(before: Rollback, parameters: list[nn.Parameter]) -> None:
    """Halve the step that is in the model."""
    start, movement = before.movement(parameters)
    move_to(parameters, start, movement, 0.5)


def _tensors(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """List every parameter and buffer with its place; tied ones once."""
    found: dict[int, tuple[nn.Module, str, Tensor]] = {}
    for module in model.modules():
        own: list[tuple[str, Tensor]] = [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]
        for name, tensor in own:
            found.setdefault(id(tensor), (module, name, tensor))
    return list(found.values())


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _clone(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: _clone(value) for key, value in state.items()}
    return copy.deepcopy(state)


# -- the use of rejected gradients ------------------------------------------------------------------------------------


def average_with_rejected(attempt: Attempt) -> None:
    """Replace the released gradient by its mean with all gradients that were rejected at this model.

    This is post-processing of releases in the ledger: it costs nothing, and the mean of k has 1/k of the variance.
    """
    state, parameters = attempt.bench.states.selection, attempt.parameters
    released = [parameter.grad for parameter in parameters]
    fresh: list[Tensor] = [gradient.detach().clone() for gradient in released if gradient is not None]
    sums = state.rejected
    if sums is not None and [s.shape for s in sums] == [f.shape for f in fresh]:
        fresh = [total + gradient for total, gradient in zip(sums, fresh, strict=True)]
        count = state.averaged + 1
    else:  # the first gradient at this model, or other parameters are trained now
        count = 1
    state.rejected, state.averaged = fresh, count
    for parameter, total in zip(parameters, fresh, strict=True):
        parameter.grad = total / count


def forget_rejected(attempt: Attempt) -> None:
    """Forget rejected gradients: the model moves on, and gradients at the old one are useless."""
    attempt.bench.states.selection.rejected = None
