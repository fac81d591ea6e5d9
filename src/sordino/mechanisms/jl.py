"""DP-SGD-JL and DP-Adam-JL: clip by norms that random projections estimate."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import ClassVar, Unpack

from sordino.accounting import calibration
from sordino.accounting.budget import Budget
from sordino.accounting.events import to_json
from sordino.accounting.jl_gaussian import ProjectedGaussian
from sordino.combinations import Needs
from sordino.errors import InvalidInput
from sordino.gradients import Engine, projected
from sordino.mechanisms import Mechanism
from sordino.noise import Independent, Source
from sordino.parts import Always, Automatic, Exact, Flat, Foreign, Norms, Poisson
from sordino.recipe import Common, Optimizer, Recipe

CHOICES = (*range(4, 17, 2), *range(20, 33, 4), *range(40, 65, 8), *range(80, 129, 16), 160, 192, 256, 384, 512, 1024)
"""The numbers of projections that "auto" tries: with more, time grows in proportion while the price falls."""


MOST_NOISES = 64


def _unproven(why: str) -> str:
    return f"{{slot}}={{part!r}} has no proof with projected norms ({why}): use norms=Exact()"


@dataclass(frozen=True)
class ProjectedNorms(Norms):
    """Norms estimated by `projections` random projections of each gradient, fresh for every draw.

    Guarantees: one answer is a `ProjectedGaussian`, for flat and automatic clipping alike: either bounds a contribution
    by clip · ‖g‖/M, the random length that the event prices. Calibrating the noise replaces "auto" with the fewest
    projections whose noise is at most `factor` times what exact norms need.
    """

    projections: int | str = "auto"
    factor: float = 1.05
    needs: ClassVar[tuple[Needs, ...]] = (
        Needs("weighing", _unproven("its weights are bounded for exact norms only"), (Flat, Automatic)),
        Needs("sampler", _unproven("its price is proven for exact norms only"), (Poisson, Foreign)),
        Needs("noise", _unproven("its price is proven for exact norms only"), (Independent,)),
        Needs("selection", _unproven("tests are priced together with Gaussian proposals only"), (Always,)),
    )

    def __post_init__(self) -> None:
        if isinstance(self.projections, str) and self.projections != "auto":
            raise InvalidInput(f"projections={self.projections!r} must be a whole number >= 1 or 'auto'")
        if isinstance(self.projections, int) and self.projections < 1:
            raise InvalidInput(f"projections={self.projections} must be >= 1: 20 or more is advised, or 'auto'")
        if not self.factor > 1:
            raise InvalidInput(f"factor={self.factor} must be > 1: estimated norms always need more noise than exact")

    def event(self, noise_multiplier: float) -> ProjectedGaussian:
        return ProjectedGaussian(noise_multiplier, self._number)

    def engine(self, name: str, source: Source) -> Engine:
        return projected.ProjectedEngine(self._number, source, name)

    def prepare(self, engine: Engine) -> None:
        assert isinstance(engine, projected.ProjectedEngine)
        engine.renew()

    def calibrate(self, recipe: Recipe, budget: Budget) -> Recipe:
        """Return `recipe` with the least noise that the budget allows, and a number of projections for "auto"."""
        _require_few_events(recipe)
        if self.projections == "auto":
            return self._fewest(recipe, budget)
        try:
            return _with_noise(recipe, self, budget)
        except InvalidInput as error:
            advised = self._fewest(recipe, budget)
            assert isinstance(advised.norms, ProjectedNorms)
            raise InvalidInput(
                f"projections={self.projections} cannot meet epsilon={budget.epsilon:g} with any noise ({error}): "
                f"projections={advised.norms.projections} do with noise_multiplier={advised.noise_multiplier:.4g}"
            ) from error

    def _fewest(self, recipe: Recipe, budget: Budget) -> Recipe:
        exact = _with_noise(recipe, Exact(), budget).noise_multiplier
        assert exact is not None

        def affordable(number: int) -> bool:
            tried = replace(recipe, norms=replace(self, projections=number), noise_multiplier=self.factor * exact)
            return tried.price(budget.delta, budget.accountant, budget.adjacency) <= budget.epsilon

        place = bisect_left(CHOICES, True, key=affordable)
        if place == len(CHOICES):
            raise InvalidInput(
                f"factor={self.factor:g} is out of reach of {CHOICES[-1]} projections at epsilon={budget.epsilon:g}: "
                "allow a larger factor, or use exact norms"
            )
        return _with_noise(recipe, replace(self, projections=CHOICES[place]), budget, start=self.factor * exact)

    @property
    def _number(self) -> int:
        if isinstance(self.projections, str):
            raise InvalidInput(
                "projections='auto' is settled while the noise is calibrated: call recipe.calibrate with "
                "noise_multiplier left open, or give a number such as 24"
            )
        return self.projections


def _with_noise(recipe: Recipe, norms: Norms, budget: Budget, start: float = 1.0) -> Recipe:
    recipe = replace(recipe, norms=norms)
    found = calibration.noise_for(budget, lambda sigma: replace(recipe, noise_multiplier=sigma).plan(), start=start)
    return replace(recipe, noise_multiplier=found.noise_multiplier)


def _require_few_events(recipe: Recipe) -> None:
    """Require few different noises: each needs its own distribution, which takes about half a second."""
    plan = replace(recipe, norms=Exact(), noise_multiplier=1.0).plan()
    different = len({to_json(event) for event, _ in plan})
    if different > MOST_NOISES:
        raise InvalidInput(
            f"noise_schedule has {different} different noises, must have <= {MOST_NOISES} with projected norms, whose "
            "prices are slow: run it as a staircase, noise_schedule=Levels(schedule, 16)"
        )


def jl(
    *,
    optimizer: str = "sgd",
    projections: int | str = "auto",
    clip: float = 1.0,
    lr: float | None = None,
    momentum: float = 0.0,
    **common: Unpack[Common],
) -> Recipe:
    """Clip every gradient by its norm as estimated from `projections` random projections (DP-SGD-JL, Algs. 1 and 3).

    `projections="auto"` uses the fewest that need at most 5 % more noise than exact norms. `lr` is 0.25 for SGD and
    0.001 for Adam by default, as in the paper. Unlike in the paper, draws are Poisson, and few projections cost what
    they reveal.

    >>> from sordino.mechanisms.jl import jl
    >>> jl(optimizer="adam", projections=24, batch_size=256, epochs=5).norms
    ProjectedNorms(projections=24, factor=1.05)
    """
    rate = lr if lr is not None else {"sgd": 0.25}.get(optimizer, 1e-3)
    proposer = Optimizer(optimizer, lr=rate, momentum=momentum)
    norms = ProjectedNorms(projections)
    return Recipe(name="jl", clip=clip, norms=norms, weighing=Flat(), optimizer=proposer, **common)


MECHANISMS = (
    Mechanism(
        "jl",
        title="DP-SGD-JL",
        summary="gradient norms are estimated by random projections",
        paper="Fast Differentially Private-SGD via JL Projections, under review at ICLR 2021",
        recipe=jl,
        parts={"Norms": {"jl": ProjectedNorms}},
        example={"projections": 24},
    ),
)
