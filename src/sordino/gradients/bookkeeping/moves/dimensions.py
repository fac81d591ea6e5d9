"""Along some dimensions: reductions, softmax, sorting, normalisation, convolution, pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sordino.gradients.bookkeeping.following import Rule, Sight
from sordino.gradients.bookkeeping.moves.entries import elementwise
from sordino.gradients.bookkeeping.moves.tools import Answer, insist, keep, positive, spread
from sordino.gradients.bookkeeping.operations import find_tensors
from sordino.gradients.bookkeeping.places import Move, Place


def along(at: Sight, result: Any, input: Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> Answer:
    """Something along `dim`, or several, whose number of dimensions stays: softmax, cumsum, sort."""
    insist(dim is not None and next(find_tensors((result,), {})).dim() == input.dim())
    dims = {positive(each, input) for each in spread(dim, ())}
    return at.join([(input, keep(lambda place: place.dim not in dims))])


def flip(at: Sight, result: Tensor, input: Tensor, first: Any = None, *rest: Any, dims: Any = None) -> Answer:
    """Entries in reverse order along dimensions."""
    return along(at, result, input, tuple(spread(first if dims is None else dims, rest)))


def fourier(at: Sight, result: Tensor, input: Tensor, n: Any = None, dim: Any = -1, norm: Any = None) -> Answer:
    """Fourier transforms along a dimension."""
    return along(at, result, input, dim)


def fourier_twice(
    at: Sight, result: Tensor, input: Tensor, s: Any = None, dim: Any = (-2, -1), norm: Any = None
) -> Answer:
    """Fourier transforms along two dimensions."""
    return along(at, result, input, dim)


def fourier_named(at: Sight, result: Tensor, input: Tensor, s: Any = None, dim: Any = None, norm: Any = None) -> Answer:
    """Fourier transforms along dimensions that are named, or along all."""
    return along(at, result, input, dim)


def gumbel(at: Sight, result: Tensor, logits: Tensor, *args: Any, dim: int = -1, **kwargs: Any) -> Answer:
    """gumbel_softmax, its dimension by name."""
    insist(len(args) < 4)
    return along(at, result, logits, dim)


def fill_along(at: Sight, result: Tensor, input: Tensor, dim: int, *args: Any, **kwargs: Any) -> Answer:
    """index_fill: the same entries along a dimension are overwritten for all."""
    return along(at, result, input, dim)


def ordered(at: Sight, result: Any, input: Tensor, *args: Any, dim: int = -1, **kwargs: Any) -> Answer:
    """sort and argsort: along the last dimension unless another is named."""
    given = [each for each in args if not isinstance(each, bool)]  # numbers of numpy, too, which lose the examples
    return along(at, result, input, given[0] if given else dim)


def topk(at: Sight, result: Any, input: Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Answer:
    """The largest entries along a dimension, which stays."""
    return along(at, result, input, dim)


def roll(at: Sight, result: Tensor, input: Tensor, shifts: Any, dims: Any = None) -> Answer:
    """Entries moved around along dimensions."""
    return along(at, result, input, dims)


def reduction(at: Sight, result: Any, input: Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> Answer:
    """Something of all the entries along `dim`, or several; those dimensions go, or have length 1."""
    dim = kwargs.get("axis", dim)
    insist(dim is not None and dim not in ((), []))
    dims = {positive(each, input) for each in spread(dim, ())}
    first = next(find_tensors((result,), {}))
    kept = first.dim() == input.dim()
    insist(kept or first.dim() == input.dim() - len(dims))

    def move(place: Place) -> Place:
        insist(place.dim not in dims)
        return place if kept else place.at(place.dim - sum(each < place.dim for each in dims))

    return at.join([(input, move)])


def reduction_after(
    at: Sight, result: Any, input: Tensor, order: Any = 2, dim: Any = None, *args: Any, **kwargs: Any
) -> Answer:
    """The same with another argument before the dimension: norms, kthvalue."""
    return reduction(at, result, input, dim, *args, **kwargs)


def pairwise_or_along(at: Sight, result: Any, input: Tensor, *args: Any, **kwargs: Any) -> Answer:
    """max and min: of two tensors, or along a dimension."""
    if any(True for _ in find_tensors(args, kwargs)):
        return elementwise(at, result, input, *args, **kwargs)
    return reduction(at, result, input, *args, **kwargs)


def cosine(at: Sight, result: Tensor, x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Answer:
    """cosine_similarity: a reduction of two tensors that broadcast."""
    insist(x1.dim() == x2.dim())
    gone = positive(dim, x1)

    def move(tensor: Tensor) -> Move:
        def moved(place: Place) -> Place:
            insist(place.dim != gone)
            dim = place.dim - (gone < place.dim)
            insist(result.shape[dim] == tensor.shape[place.dim])
            return place.at(dim)

        return moved

    return at.join((tensor, move(tensor)) for tensor in (x1, x2))


def pairwise_distance(at: Sight, result: Tensor, x1: Tensor, x2: Tensor, *args: Any, **kwargs: Any) -> Answer:
    """A reduction of the last dimension."""
    return cosine(at, result, x1, x2, x1.dim() - 1)


def normalize(
    at: Sight, result: Tensor, input: Tensor, p: float = 2.0, dim: int = 1, *args: Any, **kwargs: Any
) -> Answer:
    """F.normalize."""
    return along(at, result, input, dim)


def layer_norm(
    at: Sight, result: Tensor, input: Tensor, normalized_shape: Sequence[int], *args: Any, **kwargs: Any
) -> Answer:
    """layer_norm and rms_norm: over the last dimensions."""
    return at.join([(input, keep(lambda place: place.dim < input.dim() - len(normalized_shape)))])


def rows_alone(at: Sight, result: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Answer:
    """[N, ...]: each entry of dimension 0 alone, by functions that need a batch; others are shared."""
    insist(len(result) == len(input))
    return at.join([(input, keep(lambda place: place.dim == 0))])


def batch_norm(
    at: Sight, result: Tensor, input: Tensor, mean: Any = None, var: Any = None, weight: Any = None, bias: Any = None,
    training: bool = False, *args: Any, **kwargs: Any
) -> Answer:  # fmt: skip
    """With fixed statistics: every entry alone."""
    insist(not training and mean is not None)
    return at.join([(input, keep(lambda place: True))])


def channels_last(dims: int) -> Rule:
    """Convolutions on [N, C, ...] with so many dimensions of space; without N there are no examples to follow."""

    def rule(at: Sight, result: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Answer:
        insist(input.dim() == dims + 2)
        return at.join([(input, keep(lambda place: place.dim == 0))])

    return rule


def pooling(dims: int) -> Rule:
    """Pooling treats each channel of each item alone."""

    def rule(at: Sight, result: Any, input: Tensor, *args: Any, **kwargs: Any) -> Answer:
        return at.join([(input, keep(lambda place: place.dim < input.dim() - dims))])

    return rule


def resample(at: Sight, result: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Answer:
    """interpolate, grid_sample, pixel_shuffle, fold: items alone, in dimension 0 of every argument."""
    tensors = find_tensors((input, *args), kwargs)
    insist(input.dim() >= 3 and len(result) == len(input))
    return at.join((tensor, keep(lambda place: place.dim == 0)) for tensor in tensors)


def pixels(at: Sight, result: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Answer:
    """pixel_shuffle: channels into space, of [N, C, H, W]."""
    insist(input.dim() >= 4)
    return rows_alone(at, result, input)


def pad(at: Sight, result: Tensor, input: Tensor, pad: Sequence[int], *args: Any, **kwargs: Any) -> Answer:
    """F.pad: from the last dimension backwards."""
    grown = {input.dim() - 1 - i // 2 for i, by in enumerate(pad) if by != 0}
    return at.join([(input, keep(lambda place: place.dim not in grown))])
