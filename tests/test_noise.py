"""The noise has the deviation that is claimed, is fresh in every incarnation, and needs a receipt."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from scipy import stats

from sordino import InvalidInput, Recipe
from sordino.accounting.ledger import Ledger, Receipt
from sordino.audit.conformance.tape import Tape
from sordino.noise import PIECE, Independent, Secure, Seeded, Source, add_noise, perturb
from sordino.parts import State
from tests.helpers import calibrated, private


@pytest.fixture
def receipt() -> Receipt:
    return Ledger.in_memory(run_id="test", header={}).charge(GaussianDpEvent(1.0))


def fits(noise: np.ndarray, std: float) -> bool:
    return bool(stats.kstest(noise / std, "norm").pvalue > 0.001)


def test_gaussian_noise_has_the_claimed_deviation_and_no_other(receipt: Receipt) -> None:
    noise = Seeded(5).gaussian(receipt, 100_000, 2.5).numpy()
    assert fits(noise, 2.5)
    assert not fits(noise, 2.5 * 0.95)
    assert not fits(noise, 2.5 * 1.05)


def test_secure_noise_is_normal_and_never_the_same_twice(receipt: Receipt) -> None:
    first, second = (Secure().gaussian(receipt, 5_000, 1.0).numpy() for _ in range(2))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.1
    assert stats.kstest(first, "norm").pvalue > 1e-9


def test_a_seed_repeats_itself_within_an_incarnation_only(receipt: Receipt) -> None:
    def stream(seed: int, incarnation: int) -> np.ndarray:
        return Seeded(seed, incarnation).gaussian(receipt, 1000, 1.0).numpy()

    assert np.array_equal(stream(1, 1), stream(1, 1))
    assert not np.isclose(stream(1, 1), stream(1, 2)).any()
    assert not np.isclose(stream(1, 1), stream(2, 1)).any()


def test_an_older_receipt_buys_nothing() -> None:
    ledger = Ledger.in_memory(run_id="test", header={})
    old, new = ledger.charge(GaussianDpEvent(1.0)), ledger.charge(GaussianDpEvent(1.0))
    source = Seeded(1)
    source.gaussian(new, 3, 1.0)
    with pytest.raises(InvalidInput, match="older than receipt"):
        source.gaussian(old, 3, 1.0)


def test_a_seeded_source_says_so_and_a_secure_one_does_not() -> None:
    assert "SEEDED" in Seeded(7).assumption
    assert "SEEDED" not in Secure().assumption


def test_torch_global_generator_is_left_alone(receipt: Receipt) -> None:
    import torch

    torch.manual_seed(0)
    before = torch.get_rng_state()
    Secure().gaussian(receipt, 10, 1.0)
    Secure().uniform(10)
    assert torch.equal(torch.get_rng_state(), before)


class _Ones(Seeded):
    def gaussian(self, receipt: Receipt, size: int, std: float) -> torch.Tensor:
        assert size <= PIECE
        return torch.full((size,), std, dtype=torch.float64)


@pytest.mark.parametrize("shapes", [[(3, 2), (0,), (5,)], [(PIECE,), (1,), (PIECE + 7,)], [(2 * PIECE - 1, 2), (9,)]])
def test_every_entry_gets_exactly_one_noise(receipt: Receipt, shapes: list[tuple[int, ...]]) -> None:
    tensors = [torch.zeros(shape) for shape in shapes]
    perturb(_Ones(0), receipt, tensors, 2.0)
    assert all(bool((tensor == 2.0).all()) for tensor in tensors)


def test_pieces_of_a_large_tensor_are_independent(receipt: Receipt) -> None:
    tensor = torch.zeros(3 * PIECE)
    perturb(Seeded(5), receipt, [tensor], 2.5)
    assert stats.kstest(tensor.numpy(), "norm", args=(0, 2.5)).pvalue > 0.01
    correlations = np.corrcoef(tensor.view(3, -1).numpy())[np.triu_indices(3, 1)]
    assert abs(correlations).max() < 4 / PIECE**0.5


def test_a_method_that_is_called_settle_by_chance_decides_nothing(receipt: Receipt) -> None:
    class Mine(Seeded):
        def settle(self, receipt: Receipt, value: torch.Tensor, released: torch.Tensor) -> torch.Tensor:
            return value

    value, true = torch.zeros(5), add_noise(Seeded(3), receipt, torch.zeros(5), 2.0)
    hooked = Secure()
    hooked.settle = lambda receipt, value, released: value  # type: ignore[attr-defined]
    assert torch.equal(add_noise(Mine(3), receipt, value, 2.0), true)
    assert not (add_noise(hooked, receipt, value, 2.0) == 0).any()
    perturb(Mine(3), receipt, [total := torch.zeros(5, dtype=torch.float64)], 2.0)
    assert torch.equal(total, true)


def test_a_guarantee_over_a_recording_tape_says_that_there_is_no_protection(receipt: Receipt) -> None:
    assert "no protection" in Tape(Secure(), 4).assumption


# -- the shape of noise ---------------------------------------------------------------------------------------------


@dataclass
class Count(State):
    steps: int = 0


@dataclass(frozen=True)
class Tripled(Independent):
    """Three times the noise, priced as such; counts how often it was asked."""

    def start(self) -> Count:
        return Count()

    def event(self, answer: DpEvent) -> DpEvent:
        assert isinstance(answer, GaussianDpEvent)
        return GaussianDpEvent(3 * answer.noise_multiplier)

    def add(self, source: Source, receipt: Receipt, sums: list[torch.Tensor], std: float, state: Count) -> None:
        state.steps += 1
        super().add(source, receipt, sums, 3 * std, state)


def test_the_plain_noise_is_not_written_so_that_documents_and_fingerprints_stay() -> None:
    recipe = calibrated()
    assert recipe.noise == Independent()
    assert "[noise]" not in recipe.to_toml()
    assert Recipe.from_toml(recipe.to_toml() + '\n[noise]\npart = "independent"\n') == recipe


def test_a_step_adds_the_noise_of_its_recipe_and_charges_its_event() -> None:
    """Two runs that draw the same records; `_Ones` makes the noise of an entry its deviation, divided by 16."""
    models, runs = [], []
    for recipe in (calibrated(), replace(calibrated(), noise=Tripled())):
        models.append(model := torch.nn.Linear(6, 3))
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        runs.append(private(recipe, model=model, lr=1.0, source=_Ones(0)))
        runs[-1].step()
    assert runs[1].bench.states.noise.steps == 1
    assert runs[1].bench.ledger.events() == [(PoissonSampledDpEvent(0.25, GaussianDpEvent(3.0)), 1)]
    for plain, tripled in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(plain - tripled, torch.full_like(plain, 2 / 16), atol=1e-5)
