"""Invented characters, upright pictures, and the features of a network that learned from them alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sordino.errors import InvalidInput
from sordino.lab.features import handwriting
from sordino.lab.features.handwriting import Handwriting, describe_handwriting, load_network, make_upright
from sordino.lab.features.pen import POINTS, Characters, _trace, draw, invent

SMALL = Handwriting(characters=4, steps=3)


def hand(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handwriting, "_BATCH", 16)
    monkeypatch.setattr(handwriting, "_EXAMPLES", 20)


def moments(pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Centre of mass (x, y), and the covariance of x and y, of every picture by plain sums over pixels."""
    line = torch.arange(pictures.shape[-1]) + 0.5
    ink = pictures[:, 0] / pictures[:, 0].sum((1, 2), keepdim=True)
    x, y = (ink.sum(1) * line).sum(1), (ink.sum(2) * line).sum(1)
    off = (line - x[:, None])[:, None, :] * (line - y[:, None])[:, :, None]
    return x, y, (ink * off).sum((1, 2))


def test_a_straight_stroke_is_a_line_and_a_full_turn_a_circle() -> None:
    def stroke(turn: float) -> Characters:
        one = torch.ones(1, 1)
        return Characters(
            one, torch.zeros(1, 1, 2), 0 * one, torch.ones(1, 1, 1), torch.full((1, 1, 1), turn), one[None] * 0
        )

    points, weights = _trace(stroke(0.0))
    torch.testing.assert_close(points[0, :, 0], torch.arange(1, POINTS + 1) / POINTS)
    torch.testing.assert_close(points[0, :, 1], torch.zeros(POINTS))
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
    circle, _ = _trace(stroke(2 * torch.pi))
    radii = (circle[0] - circle[0].mean(0)).norm(dim=1)
    torch.testing.assert_close(radii, torch.full((POINTS,), 1 / (2 * torch.pi)), atol=1e-3, rtol=0)


def test_drawings_are_pictures_centred_by_mass_and_of_mnist_s_size() -> None:
    pictures = draw(invent(200, seed=3), hand())
    assert pictures.shape == (200, 1, 28, 28)
    assert pictures.min() >= 0
    assert pictures.max() <= 1
    x, y, _ = moments(pictures)
    assert (x - 14).abs().mean() < 0.6
    assert (y - 14).abs().mean() < 0.6
    seen = pictures[:, 0] > 0.5
    tallest = torch.stack([seen.any(1).sum(1), seen.any(2).sum(1)]).amax(0)
    assert 15 < tallest.float().mean() <= 20


def test_a_character_is_the_same_for_a_seed_and_its_drawings_differ_by_hand() -> None:
    torch.testing.assert_close(invent(5, seed=1).turn, invent(5, seed=1).turn)
    assert not torch.equal(invent(5, seed=1).turn, invent(5, seed=2).turn)
    characters = invent(5, seed=1)
    assert torch.equal(draw(characters, hand(1)), draw(characters, hand(1)))
    assert not torch.allclose(draw(characters, hand(1)), draw(characters, hand(2)), atol=0.2)


def test_two_drawings_of_a_character_are_nearer_than_those_of_two_characters() -> None:
    characters = invent(60, seed=5)
    one, other = draw(characters, hand(1)).flatten(1), draw(characters, hand(2)).flatten(1)
    distances = torch.cdist(one, other)
    assert distances.diagonal().mean() < 0.85 * distances.mean()


def test_upright_pictures_do_not_lean_and_stand_in_the_middle() -> None:
    pictures = draw(invent(100, seed=7), hand(7))
    _, _, before = moments(pictures)
    x, y, after = moments(make_upright(pictures))
    assert after.abs().mean() < 0.5 * before.abs().mean()
    torch.testing.assert_close(x, torch.full((100,), 14.0), atol=0.3, rtol=0)
    torch.testing.assert_close(y, torch.full((100,), 14.0), atol=0.3, rtol=0)


def test_an_upright_stroke_that_was_sheared_comes_back() -> None:
    straight = torch.zeros(1, 1, 28, 28)
    straight[..., 4:24, 13:15] = 1
    leaning = torch.zeros_like(straight)
    for row in range(4, 24):
        shift = round(0.4 * (row - 13.5))
        leaning[0, 0, row, 13 + shift : 15 + shift] = 1
    assert (make_upright(leaning) - straight).abs().mean() < 0.4 * (leaning - straight).abs().mean()
    torch.testing.assert_close(make_upright(straight), straight, atol=1e-4, rtol=0)


def test_blank_pictures_stay_blank_and_pictures_need_not_be_square() -> None:
    assert torch.equal(make_upright(torch.zeros(2, 1, 28, 28)), torch.zeros(2, 1, 28, 28))
    assert make_upright(torch.rand(2, 1, 20, 28)).shape == (2, 1, 20, 28)


def test_views_turn_and_zoom_about_the_centre() -> None:
    cross = torch.zeros(1, 1, 28, 28)
    cross[..., 4:24, 13:15] = 1
    torch.testing.assert_close(handwriting.turn_and_zoom(cross, 0.0, 1.0), cross)
    torch.testing.assert_close(
        handwriting.turn_and_zoom(cross, torch.pi / 2, 1.0), cross.transpose(2, 3), atol=1e-4, rtol=0
    )
    assert handwriting.turn_and_zoom(cross, 0.0, 0.9).sum() > 1.1 * cross.sum(), (
        "what is seen of a smaller part is larger"
    )
    assert handwriting.turn_and_zoom(cross, 0.0, 1.1).sum() < 0.9 * cross.sum()


@pytest.mark.usefixtures("quick")
def test_a_record_s_features_are_its_own_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = draw(invent(6, seed=9), hand(9))
    features = describe_handwriting(images, SMALL, folder=tmp_path, quiet=True)
    assert features.shape == (6, handwriting.WIDTH)
    torch.testing.assert_close(features.norm(dim=1), torch.ones(6))
    changed = images.clone()
    changed[0] = images[1]
    others = describe_handwriting(changed, SMALL, folder=tmp_path, quiet=True)
    torch.testing.assert_close(others[1:], features[1:])
    torch.testing.assert_close(others[0], features[1])
    monkeypatch.setattr(handwriting, "_learn", lambda *_: pytest.fail("the network was to be kept"))
    monkeypatch.setattr(handwriting, "_describe", lambda *_: pytest.fail("the features were to be kept"))
    assert torch.equal(describe_handwriting(images, SMALL, folder=tmp_path, quiet=True), features)


@pytest.mark.usefixtures("quick")
def test_training_moves_the_network_and_leaves_the_random_state_alone(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    network = load_network(SMALL, tmp_path, quiet=True)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not network.training
    longer = load_network(Handwriting(characters=4, steps=6), tmp_path, quiet=True)
    assert not torch.equal(longer[0].weight, network[0].weight)


@pytest.mark.slow
def test_drawings_that_were_learned_are_told_apart_better_than_by_an_untrained_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share of drawings whose nearest other drawing is of the same character."""
    monkeypatch.setattr(handwriting, "_BATCH", 32)
    choice = Handwriting(characters=40, steps=100)
    characters = invent(40, seed=0)
    twice = torch.cat([draw(characters, hand(1)), draw(characters, hand(2))])

    def share(network: torch.nn.Module) -> float:
        seen = handwriting._describe(twice, network)
        seen = torch.nn.functional.normalize(seen - seen.mean(0))
        alike = (seen @ seen.T).fill_diagonal_(-1)
        return float((alike.argmax(1) % 40 == torch.arange(80) % 40).float().mean())

    with torch.random.fork_rng():
        torch.manual_seed(0)
        untrained = share(handwriting.build_network().eval())
    assert share(load_network(choice, tmp_path, quiet=True)) > untrained + 0.1


@pytest.mark.parametrize("shape", [(2, 3, 28, 28), (2, 1, 32, 32), (0, 1, 28, 28), (28, 28)])
def test_other_pictures_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="must be"):
        describe_handwriting(torch.zeros(shape), SMALL, folder=tmp_path)


def test_choices_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidInput, match="characters=1"):
        Handwriting(characters=1)
    with pytest.raises(InvalidInput, match="steps=0"):
        Handwriting(steps=0)
