"""Weights keep every contribution within the sensitivity, whatever the norm."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sordino import InvalidInput
from sordino.sampling import Draw
from sordino.weighing import Automatic, Flat

ALL = Draw(torch.arange(1))
positive = st.floats(1e-6, 1e6)


@given(
    norm=st.floats(0, 2.0**100, width=32),
    clip=positive,
    weighing=st.sampled_from([Flat(), Automatic(), Automatic(2.0)]),
)
def test_contribution_never_exceeds_the_bound(norm: float, clip: float, weighing: Flat) -> None:
    norms = torch.tensor([norm], dtype=torch.float32)
    contribution = weighing.weights(norms, clip, ALL).double() * norms.double()
    assert contribution.item() <= clip


@pytest.mark.parametrize("weighing", [Flat(), Automatic()])
@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_a_bad_example_weighs_nothing(weighing: Flat, norm: float) -> None:
    weights = weighing.weights(torch.tensor([norm, 1.0]), 1.0, ALL)
    assert weights[0] == 0
    assert weights[1] > 0


def test_flat_leaves_short_gradients_alone_and_automatic_lifts_them() -> None:
    norms = torch.tensor([0.0, 0.5, 2.0])
    assert torch.allclose(Flat().weights(norms, 1.0, ALL), torch.tensor([1.0, 1.0, 0.5]), rtol=1e-4)
    assert torch.allclose(Automatic(0.01).weights(norms, 1.0, ALL), 1 / (norms + 0.01), rtol=1e-4)


def test_gamma_must_be_positive() -> None:
    with pytest.raises(InvalidInput, match=r"gamma=0 must be > 0"):
        Automatic(0)
