"""Invented objects as they are seen, and the features of a network that learned what they are made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sordino.errors import InvalidInput
from sordino.lab.features import anatomy
from sordino.lab.features.anatomy import Anatomy, Eye, describe_anatomy, list_traits, load_network
from sordino.lab.features.objects import GROUPS, KINDS, _cast, draw, invent
from sordino.lab.features.scenes import draw_scenes

SMALL = Anatomy(objects=4, pictures=8, scenes=4, steps=2, kept=8)


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anatomy, "_BATCH", 10)
    monkeypatch.setattr(anatomy, "_EXAMPLES", 20)


def cast(rounds: float, radius: float = 0.52, side: int = 41) -> tuple[Tensor, ...]:
    """One part of equal radii in the middle, seen by rays through [-1, 1] x [-1, 1]."""
    line = torch.linspace(-1, 1, side)
    plane = torch.stack([line.expand(side, side), line[:, None].expand(side, side)]).flatten(1)
    shape = torch.full((1, 1, 3), rounds)
    return *_cast(torch.eye(3)[None, None] / radius, torch.zeros(1, 1, 3), shape, torch.ones(1, 1) > 0, plane), plane


def test_a_round_part_is_a_ball_and_its_normals_point_outwards() -> None:
    _, place, normals, hit, plane = cast(1.0)
    assert torch.equal(hit[0], plane.norm(dim=0) < 0.52)
    x, y = plane[:, hit[0]]
    height = (0.52**2 - x**2 - y**2).sqrt()
    points = torch.stack([x, y, height], 1)
    torch.testing.assert_close(place[0, hit[0]], points / 0.52, atol=1e-4, rtol=0)
    torch.testing.assert_close(normals[0, hit[0]], points / 0.52, atol=1e-4, rtol=0)


def test_a_part_that_is_hardly_round_is_a_box() -> None:
    _, _, normals, hit, plane = cast(0.3)
    assert torch.equal(hit[0], plane.abs().amax(0) < 0.52)
    torch.testing.assert_close(normals[0, hit[0]], torch.tensor([0.0, 0.0, 1.0]).expand(int(hit.sum()), 3))


def test_what_is_nearer_hides_what_is_behind_it() -> None:
    frames = torch.stack([torch.eye(3) / 0.6, torch.eye(3) / 0.3])[None]
    centres = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.6]])
    origin = torch.stack([frames[0, k] @ centres[k] for k in range(2)])[None]
    plane, used = torch.tensor([[0.0, 0.5, 0.9], [0.0, 0.0, 0.0]]), torch.ones(1, 2) > 0
    part, _, _, hit = _cast(frames, origin, torch.ones(1, 2, 3), used, plane)
    assert part[0, :2].tolist() == [1, 0]
    assert hit[0].tolist() == [True, True, False]
    part, _, _, _ = _cast(frames, origin, torch.ones(1, 2, 3), torch.tensor([[True, False]]), plane)
    assert part[0, 0] == 0


def test_objects_and_pictures_are_functions_of_their_seeds() -> None:
    torch.testing.assert_close(invent(5, seed=1).radius, invent(5, seed=1).radius)
    assert not torch.equal(invent(5, seed=1).radius, invent(5, seed=2).radius)
    objects = invent(5, seed=1)
    (one, parts, fronts), (same, _, _), (other, _, _) = (draw(objects, random(seed), 24) for seed in (1, 1, 2))
    assert one.shape == (5, 3, 24, 24)
    assert 0 <= one.min() <= one.max() <= 1
    assert torch.equal(one, same)
    assert not torch.allclose(one, other, atol=0.2)
    assert parts.shape == (5, 24, 24)
    assert 0 <= parts.min() < parts.max() <= KINDS
    torch.testing.assert_close(fronts.norm(dim=1), torch.ones(5))


def test_objects_fill_their_pictures_but_not_all_of_them() -> None:
    _, parts, _ = draw(invent(200, seed=3), random())
    covered = (parts > 0).float().mean((1, 2))
    assert 0.15 < covered.mean() < 0.5
    assert (covered > 0.02).float().mean() > 0.97


def test_traits_are_normal_and_count_where_the_object_has_the_part() -> None:
    objects = invent(300, seed=5)
    traits, count = list_traits(objects)
    assert traits.shape == count.shape
    torch.testing.assert_close((traits * count).sum(0) / count.sum(0), torch.zeros(traits.shape[1]), atol=0.1, rtol=0)
    spread = (traits.square() * count).sum(0) / count.sum(0)
    torch.testing.assert_close(spread, torch.ones(traits.shape[1]), atol=0.15, rtol=0)
    assert torch.equal(count.bool().any(1), torch.ones(300) > 0)
    lacking = ~objects.used
    assert torch.equal(count[:, : -(GROUPS - 1)].sum(1) < count.shape[1] - GROUPS + 1, lacking.any(1))


def test_a_view_of_the_whole_is_the_picture_and_a_mirrored_one_its_mirror_image() -> None:
    pictures = draw_scenes(2, 32, 3, 1)
    whole = torch.eye(3)[None, :2].repeat(2, 1, 1)
    torch.testing.assert_close(anatomy._see(pictures, whole), pictures, atol=1e-5, rtol=0)
    whole[:, 0, 0] = -1
    torch.testing.assert_close(anatomy._see(pictures, whole), pictures.flip(3), atol=1e-5, rtol=0)
    views, mirrored = anatomy._aim(50, random(), 0.4, 0.6, 0.0)
    assert torch.equal(views[:, 0, 0].sign(), mirrored)
    corners = views @ torch.tensor([[-1.0, -1, 1], [1, 1, 1]]).T
    assert corners.abs().max() < 1.15, "views stay in the picture, but for their stretch"


def test_batches_have_objects_first_and_tell_what_is_seen() -> None:
    gallery = anatomy._Gallery(SMALL)
    gallery.generator.manual_seed(4)
    batch = gallery.take(40)
    assert batch.pictures.shape == (40, 3, 32, 32)
    assert batch.parts.shape == (24, KINDS + 1, 32, 32)
    assert batch.classes[:24].max() < SMALL.objects <= batch.classes[24:].min()
    torch.testing.assert_close(batch.parts.sum(1).amax((1, 2)), torch.ones(24))
    assert batch.traits.shape == batch.count.shape


@pytest.mark.usefixtures("quick")
def test_a_record_s_features_are_its_own_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = draw_scenes(6, 32, 3, 9)
    features = describe_anatomy(images, SMALL, folder=tmp_path, quiet=True)
    assert features.shape == (6, SMALL.width)
    torch.testing.assert_close(features.norm(dim=1), torch.ones(6))
    changed = images.clone()
    changed[0] = images[1].flip(2)
    others = describe_anatomy(changed, SMALL, folder=tmp_path, quiet=True)
    torch.testing.assert_close(others[1:], features[1:], atol=1e-3, rtol=0)
    assert others[0] @ features[1] > 0.999, "the mirror image's features are the picture's, but for roundings"
    monkeypatch.setattr(anatomy, "_learn", lambda *_: pytest.fail("the network was to be kept"))
    monkeypatch.setattr(anatomy, "_look", lambda *_: pytest.fail("the features were to be kept"))
    assert torch.equal(describe_anatomy(images, SMALL, folder=tmp_path, quiet=True), features)


@pytest.mark.usefixtures("quick")
def test_training_moves_the_network_and_leaves_the_random_state_alone(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    eye = load_network(SMALL, tmp_path, quiet=True)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not eye.training
    with torch.random.fork_rng():
        torch.manual_seed(0)
        new = Eye()
    assert not torch.equal(next(new.parameters()), next(eye.parameters()))


@pytest.mark.slow
def test_a_network_that_learned_sees_where_objects_are_better_than_an_untrained_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How much of the variance of what covers each cell the best linear map from its channels explains."""
    monkeypatch.setattr(anatomy, "_BATCH", 32)
    monkeypatch.setattr(anatomy, "_RATE", 0.05)
    pictures, parts, _ = draw(invent(300, seed=9), random(9))
    covered = torch.nn.functional.adaptive_avg_pool2d((parts > 0).float(), 8).flatten()

    def explain(eye: Eye) -> float:
        with torch.no_grad():
            cells = eye.eval()(pictures)[0].permute(0, 2, 3, 1).flatten(0, 2)
        cells = torch.cat([cells, torch.ones(len(cells), 1)], 1)
        found = torch.linalg.lstsq(cells, covered[:, None]).solution
        return 1 - float((cells @ found - covered[:, None]).var() / covered.var())

    with torch.random.fork_rng():
        torch.manual_seed(0)
        untrained = explain(Eye())
    choice = Anatomy(objects=20, pictures=2000, scenes=20, steps=300)
    learned = explain(load_network(choice, tmp_path, quiet=True))
    assert learned > untrained + 0.05, f"{learned:.2f}, untrained {untrained:.2f}"


@pytest.mark.parametrize("shape", [(2, 1, 32, 32), (2, 3, 28, 28), (0, 3, 32, 32), (32, 32)])
def test_other_pictures_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="must be"):
        describe_anatomy(torch.zeros(shape), SMALL, folder=tmp_path)


def test_choices_out_of_range_are_refused() -> None:
    for wrong in ({"objects": 1}, {"pictures": 10}, {"steps": 0}, {"scenes": 0}, {"kept": 0}, {"kept": 999}):
        with pytest.raises(InvalidInput, match=next(iter(wrong))):
            Anatomy(**wrong)
    with pytest.raises(InvalidInput, match="tilt"):
        Anatomy(tilt=1.5)
