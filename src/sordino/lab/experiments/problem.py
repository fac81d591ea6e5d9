"""What a case trains on: records, features, held-out records, and the network.

These kinds of features treat each record by itself, which is free; their options are those of the function:

- ``{kind = "scatter", groups = 27}``: `sordino.lab.features.scatter`;
- ``{kind = "white-scatter", ridge = 0.03}``: the same, whitened, with the options of `WhiteScattering`;
- ``{kind = "patches", filters = 100}``: `sordino.lab.features.patches`, with the options of `Patches`;
- ``{kind = "handwriting"}``: `sordino.lab.features.handwriting`, with the options of `Handwriting`;
- ``{kind = "anatomy"}``: `sordino.lab.features.anatomy`, with the options of `Anatomy`;
- ``{kind = "words", anchors = 1000}`` and ``{kind = "letters", runs = [2]}``: `sordino.lab.features.texts`;
- ``{kind = "joined", parts = [{kind = ...}, {kind = ...}]}``: several of these side by side, with equal shares or
  those of ``shares = [0.7, 0.3]``.

``{kind = "scatter", noise = 8.0, clip = ..., square_clip = ...}`` normalises by statistics over the records, which are
released and charged (the papers' data normalisation, with a public bound instead of their median). So are the counts
of ``{kind = "counted-words", noise = 20.0}``: `sordino.lab.features.counted`, with the options of `CountedWords`, on
texts of ``vocabulary = "hashed"``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dp_accounting import DpEvent, GaussianDpEvent
from torch import Tensor, nn

from sordino.errors import InvalidInput
from sordino.lab import data, networks
from sordino.lab.data.cache import allocate, cache_folder, remember_tensor
from sordino.lab.data.imdb import glove_embedding
from sordino.lab.data.infinite_mnist import InfiniteMnist
from sordino.lab.experiments.cases import Case
from sordino.lab.features import ChannelNorm, scatter
from sordino.lab.features.anatomy import Anatomy, describe_anatomy
from sordino.lab.features.counted import CountedWords, describe_counted
from sordino.lab.features.handwriting import Handwriting, describe_handwriting
from sordino.lab.features.patches import Patches, describe_patches
from sordino.lab.features.scattering import WhiteScattering, scatter_white
from sordino.lab.features.synthetic import scale_to_unit
from sordino.lab.features.texts import describe_letters, describe_words
from sordino.tables.dataset import Pairs, tensors

Split = tuple[Tensor, Tensor]
DEFORMED, COUNTED = "infinite-mnist", "counted-words"
_JOINED_VERSION, _JOINED_CHUNK = 1, 500
_SCATTER = {"groups", "dtype", "noise", "clip", "square_clip"}


@dataclass(frozen=True)
class Problem:
    """Training records, held-out records to evaluate on, public records to look at, and what preparing them read."""

    train: Split
    test: Split
    public: Split
    caveats: tuple[str, ...]


def problem_of(case: Case) -> Problem:
    """Load the records of a case and make its features; these are kept on disk."""
    options = dict(case.data)
    public = int(options.pop("public", 0))
    loaded = data.load(case.dataset, **options)
    (x, y), (test_x, test_y) = _load_training(loaded.train_set, case.records), loaded.test
    train_x, test_x = _make_features(x, case), _make_features(test_x, case)
    shown, held_out = _divide(len(test_y), public)
    return Problem(
        (train_x, y),
        (test_x[held_out], test_y[held_out]) if public else (test_x, test_y),
        (test_x[shown], test_y[shown]),
        loaded.caveats,
    )


def features_of(case: Case, inputs: Tensor) -> Tensor:
    """Make the same features of new records, for the model that the case trained."""
    return _make_features(inputs, case)


def normalise(problem: Problem, norm: ChannelNorm) -> Problem:
    """Normalise the records by released statistics, a chunk at a time."""

    def by_norm(records: Split) -> Split:
        inputs, classes = records
        return torch.cat([norm(part) for part in inputs.split(1000)]), classes

    public = by_norm(problem.public) if len(problem.public[1]) else problem.public
    return Problem(by_norm(problem.train), by_norm(problem.test), public, problem.caveats)


def released_first(case: Case) -> list[tuple[DpEvent, int]]:
    """Return the events of the case's normalisation, which come before training."""
    noise = case.features.get("noise")
    return [] if noise is None else [(GaussianDpEvent(float(noise)), 1 if is_counted(case) else 2)]


def is_counted(case: Case) -> bool:
    """Whether the features of a case are words that are counted privately."""
    return case.features.get("kind") == COUNTED


def counted_words(case: Case) -> CountedWords:
    """Return how the words of a case are counted."""
    if case.data.get("vocabulary") != "hashed":
        raise InvalidInput(f'features kind={COUNTED} need [data] vocabulary = "hashed": other lists of words are known')
    try:
        return CountedWords(**{key: value for key, value in case.features.items() if key != "kind"})
    except TypeError as error:
        raise InvalidInput(f"features kind={COUNTED} have other options: {error}") from error


def describe_by(problem: Problem, shares: Tensor, choice: CountedWords) -> Problem:
    """Describe the texts by the released shares of their words."""
    train, test, public = (
        (describe_counted(tokens, shares, choice), classes)
        for tokens, classes in (problem.train, problem.test, problem.public)
    )
    return Problem(train, test, public, problem.caveats)


def model_of(case: Case, shape: tuple[int, ...] = ()) -> nn.Module:
    """Build the network of a case from its seed; the caller's random state does not change."""
    options = dict(case.model)
    name = str(options.pop("name"))
    if options.get("embedding") == "glove":
        options["embedding"] = glove_embedding(**_vocabulary_of(case))
    if name.startswith("scatter") and shape:
        options.setdefault("channels", shape[0])
    if isinstance(options.get("activation"), list):
        options["activation"] = tuple(options["activation"])
    with torch.random.fork_rng():
        torch.manual_seed(case.seed)
        try:
            return networks.build(name, **options)
        except TypeError as error:
            raise InvalidInput(f"model={name} of method {case.method} cannot be built: {error}") from error


def _load_training(records: Pairs, count: int | None) -> Split:
    """Load only as many training records as requested: a short trial must not wait for the features of all.

    Deformed digits are made once and kept on disk.
    """
    if not isinstance(records, InfiniteMnist):
        inputs, classes = tensors(records)
        return inputs[:count], classes[:count]
    wanted = range(len(records))[:count]
    classes = records.classes[torch.tensor(wanted) % len(records.classes)]

    def make(path: Path) -> None:
        output = allocate(path, (len(wanted), *records.images.shape[1:]))
        for begin in wanted[::1000]:
            output[begin : begin + 1000] = records.batch(wanted[begin : begin + 1000])[0].numpy()
        output.flush()

    what = (DEFORMED, records.deformation, records.seed, len(wanted))
    title = f"{len(wanted):,} digits by deformation"
    return remember_tensor(cache_folder() / DEFORMED, what, (records.images,), make, title=title), classes


def _make_features(inputs: Tensor, case: Case) -> Tensor:
    return _make_kind(inputs, dict(case.features), case) if case.features else inputs


def _make_kind(inputs: Tensor, options: dict[str, Any], case: Case) -> Tensor:
    """Make the features that one table of options describes."""
    kind = options.pop("kind", None)
    makers: dict[Any, Callable[..., Tensor]] = {
        "scatter": lambda x, **chosen: _scatter(x, case, **chosen),
        "patches": lambda x, **chosen: describe_patches(x, Patches(**chosen)),
        "white-scatter": lambda x, **chosen: scatter_white(x, WhiteScattering(**chosen)),
        "handwriting": lambda x, **chosen: describe_handwriting(x, Handwriting(**chosen), quiet=True),
        "anatomy": lambda x, **chosen: describe_anatomy(x, Anatomy(**chosen), quiet=True),
        "joined": lambda x, parts, shares=None: _join(x, parts, shares, case),
        "words": lambda x, **chosen: describe_words(x, glove_embedding(**_vocabulary_of(case)), **chosen),
        "letters": describe_letters,
        COUNTED: lambda x, **_: x,  # they are computed once the counts are released
    }
    if kind not in makers:
        raise InvalidInput(f"features kind={kind!r} must be one of {', '.join(makers)}, or leave the table out")
    try:
        return makers[kind](inputs, **options)
    except TypeError as error:
        raise InvalidInput(f"features kind={kind} have other options: {error}") from error


def _join(inputs: Tensor, parts: Sequence[dict[str, Any]], shares: Sequence[float] | None, case: Case) -> Tensor:
    if any("noise" in part for part in parts):
        raise InvalidInput("features kind=joined have a part with noise: only whole features have released statistics")
    makers = [partial(_make_kind, options=dict(part), case=case) for part in parts]
    named = ([sorted(part.items()) for part in parts], sorted(_vocabulary_of(case).items()))
    return join_features(inputs, makers, shares, named=named, folder=cache_folder() / "joined")


def join_features(
    inputs: Tensor,
    parts: Sequence[Callable[[Tensor], Tensor]],
    shares: Sequence[float] | None = None,
    *,
    named: object,
    folder: Path,
) -> Tensor:
    """Rows [N, sum of the parts' widths] of norm 1: every part flattened, of norm 1, times the root of its share.

    A linear classifier on them weighs the kernels of the parts by their shares, which are equal if they are not given.
    `named` says what the parts are: with the inputs and the shares it names the file in `folder` that keeps them.
    Guarantees: a record's features depend on that record alone if those of every part do.
    """
    if not parts:
        raise InvalidInput("features kind=joined have no parts: give two or more tables of features")
    if shares is not None and (len(shares) != len(parts) or min(shares) <= 0):
        raise InvalidInput(f"shares={list(shares)} must be {len(parts)} positive numbers, one for each part")
    weights = [(share / sum(shares)) ** 0.5 for share in shares] if shares else [len(parts) ** -0.5] * len(parts)

    def make(path: Path) -> None:
        made = [part(inputs) for part in parts]
        ends = np.cumsum([each[0].numel() for each in made])
        output = allocate(path, (len(inputs), int(ends[-1])))
        for begin in range(0, len(inputs), _JOINED_CHUNK):
            rows = output[begin : begin + _JOINED_CHUNK]
            for each, weight, end in zip(made, weights, ends, strict=True):
                some = weight * scale_to_unit(each[begin : begin + _JOINED_CHUNK].flatten(1).float())
                rows[:, end - some.shape[1] : end] = some.numpy()
        output.flush()

    key = (_JOINED_VERSION, named) if shares is None else (_JOINED_VERSION, named, tuple(shares))
    return remember_tensor(folder, key, (inputs,), make, title="joined features")


def _scatter(inputs: Tensor, case: Case, **options: Any) -> Tensor:
    if unknown := sorted(set(options) - _SCATTER):
        raise InvalidInput(f"features have no option {unknown[0]!r}: they have {', '.join(sorted(_SCATTER))}")
    small: dict[str, Any] = {"dtype": torch.float16} if options.get("dtype") == "float16" else {}
    convolved = case.model.get("name", "").endswith("cnn")
    return scatter(inputs, groups=options.get("groups"), channels_last=convolved, quiet=True, **small)


def _vocabulary_of(case: Case) -> dict[str, Any]:
    """Return the options of the vocabulary, which decide the word vectors too."""
    return {key: case.data[key] for key in ("vocabulary", "words") if key in case.data}


def _divide(count: int, public: int) -> tuple[Tensor, Tensor]:
    """Indices of about `public` evenly spaced held-out records, and of the others."""
    if not 0 <= public <= count // 2:
        raise InvalidInput(f"public={public} must be in 0..{count // 2}: the other held-out records measure accuracy")
    chosen = torch.zeros(count, dtype=torch.bool)
    if public:
        chosen[:: count // public] = True
    return chosen.nonzero()[:, 0], (~chosen).nonzero()[:, 0]
