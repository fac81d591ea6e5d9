"""What a case trains on: records, features, held-out records, and the network.

``features = {kind = "scatter", groups = 27}`` scatters images and normalises each record alone, which is free.
``features = {kind = "scatter", noise = 8.0, clip = ..., square_clip = ...}`` normalises by statistics over the
records, which are released and charged (the papers' data normalisation, with a public bound instead of their median).
``features = {kind = "patches", filters = 100}`` are `sordino.features.patches`, with the options of `Patches`, and
``features = {kind = "words", anchors = 1000}`` are `sordino.features.words`, and ``features = {kind = "letters", runs =
[2]}`` are `sordino.features.letters`: each record alone, which is free. So are ``{kind = "white-scatter", ridge =
0.03}``, with the options of `WhiteScattering`, ``{kind = "handwriting"}``, with those of `Handwriting`, and
``{kind = "joined", parts = [{kind = ...}, {kind = ...}]}``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from dp_accounting import DpEvent, GaussianDpEvent
from torch import Tensor, nn

from sordino import data, models
from sordino.data import imdb
from sordino.data.dataset import Pairs, tensors
from sordino.data.infinite_mnist import InfiniteMnist
from sordino.data.store import cache_folder
from sordino.errors import InvalidInput
from sordino.experiments.case import Case
from sordino.features import ChannelNorm, scatter
from sordino.features.handwriting import Handwriting, handwriting_features
from sordino.features.joined import joined_features
from sordino.features.kept import kept, room
from sordino.features.letters import letter_features
from sordino.features.patches import Patches, patch_features
from sordino.features.white_scattering import WhiteScattering, white_scattering
from sordino.features.words import word_features

Split = tuple[Tensor, Tensor]
DEFORMED = "infinite-mnist"
_SCATTER = {"groups", "dtype", "noise", "clip", "square_clip"}


@dataclass(frozen=True)
class Problem:
    """Training records, held-out records to evaluate on, public ones to look at, and what the preparation read."""

    train: Split
    test: Split
    public: Split
    caveats: tuple[str, ...]


def problem_of(case: Case) -> Problem:
    """Load the records of a case and make its features; these are kept on disk."""
    options = dict(case.data)
    public = int(options.pop("public", 0))
    loaded = data.load(case.dataset, **options)
    (x, y), (test_x, test_y) = _training(loaded.train_set, case.records), loaded.test
    train_x, test_x = _features(x, case), _features(test_x, case)
    shown, held_out = _divided(len(test_y), public)
    return Problem(
        (train_x, y),
        (test_x[held_out], test_y[held_out]) if public else (test_x, test_y),
        (test_x[shown], test_y[shown]),
        loaded.caveats,
    )


def normalised(problem: Problem, norm: ChannelNorm) -> Problem:
    """The same records by released statistics, a chunk at a time."""

    def by_norm(records: Split) -> Split:
        inputs, classes = records
        return torch.cat([norm(part) for part in inputs.split(1000)]), classes

    public = by_norm(problem.public) if len(problem.public[1]) else problem.public
    return Problem(by_norm(problem.train), by_norm(problem.test), public, problem.caveats)


def released_first(case: Case) -> list[tuple[DpEvent, int]]:
    """What the case's normalisation costs before training begins."""
    noise = case.features.get("noise")
    return [] if noise is None else [(GaussianDpEvent(float(noise)), 2)]


def model_of(case: Case, shape: tuple[int, ...] = ()) -> nn.Module:
    """The network of a case, started from its seed; the caller's random state is left alone."""
    options = dict(case.model)
    name = str(options.pop("name"))
    if options.get("embedding") == "glove":
        options["embedding"] = imdb.glove_embedding(**_words(case))
    if name.startswith("scatter") and shape:
        options.setdefault("channels", shape[0])
    if isinstance(options.get("activation"), list):
        options["activation"] = tuple(options["activation"])
    with torch.random.fork_rng():
        torch.manual_seed(case.seed)
        try:
            return models.build(name, **options)
        except TypeError as error:
            raise InvalidInput(f"model={name} of method {case.method} cannot be built: {error}") from error


def _training(records: Pairs, count: int | None) -> Split:
    """The training records, as many as are asked for: a try must not wait for the features of all of them.

    Deformed digits are made once and kept on disk.
    """
    if not isinstance(records, InfiniteMnist):
        inputs, classes = tensors(records)
        return inputs[:count], classes[:count]
    wanted = range(len(records))[:count]
    classes = records.classes[torch.tensor(wanted) % len(records.classes)]

    def make(path: Path) -> None:
        output = room(path, (len(wanted), *records.images.shape[1:]))
        for begin in wanted[::1000]:
            output[begin : begin + 1000] = records.batch(wanted[begin : begin + 1000])[0].numpy()
        output.flush()

    what = (DEFORMED, records.deformation, records.seed, len(wanted))
    title = f"{len(wanted):,} digits by deformation"
    return kept(cache_folder() / DEFORMED, what, (records.images,), make, title=title), classes


def _features(inputs: Tensor, case: Case) -> Tensor:
    return _made(inputs, dict(case.features), case) if case.features else inputs


def _made(inputs: Tensor, options: dict[str, Any], case: Case) -> Tensor:
    """The features that one table of options describes."""
    kind = options.pop("kind", None)
    makers: dict[Any, Callable[..., Tensor]] = {
        "scatter": lambda x, **chosen: _scattered(x, case, **chosen),
        "patches": lambda x, **chosen: patch_features(x, Patches(**chosen)),
        "white-scatter": lambda x, **chosen: white_scattering(x, WhiteScattering(**chosen)),
        "handwriting": lambda x, **chosen: handwriting_features(x, Handwriting(**chosen), quiet=True),
        "joined": lambda x, parts: _joined(x, parts, case),
        "words": lambda x, **chosen: word_features(x, imdb.glove_embedding(**_words(case)), **chosen),
        "letters": letter_features,
    }
    if kind not in makers:
        raise InvalidInput(f"features kind={kind!r} must be one of {', '.join(makers)}, or leave the table out")
    try:
        return makers[kind](inputs, **options)
    except TypeError as error:
        raise InvalidInput(f"features kind={kind} have other options: {error}") from error


def _joined(inputs: Tensor, parts: Sequence[dict[str, Any]], case: Case) -> Tensor:
    if any("noise" in part for part in parts):
        raise InvalidInput("features kind=joined have a part with noise: only whole features have released statistics")
    makers = [partial(_made, options=dict(part), case=case) for part in parts]
    named = ([sorted(part.items()) for part in parts], sorted(_words(case).items()))
    return joined_features(inputs, makers, named=named, folder=cache_folder() / "joined")


def _scattered(inputs: Tensor, case: Case, **options: Any) -> Tensor:
    if unknown := sorted(set(options) - _SCATTER):
        raise InvalidInput(f"features have no option {unknown[0]!r}: they have {', '.join(sorted(_SCATTER))}")
    small: dict[str, Any] = {"dtype": torch.float16} if options.get("dtype") == "float16" else {}
    convolved = case.model.get("name", "").endswith("cnn")
    return scatter(inputs, groups=options.get("groups"), channels_last=convolved, quiet=True, **small)


def _words(case: Case) -> dict[str, Any]:
    """The options of the vocabulary, which decide the word vectors too."""
    return {key: case.data[key] for key in ("vocabulary", "words") if key in case.data}


def _divided(count: int, public: int) -> tuple[Tensor, Tensor]:
    """Indices of about `public` evenly spaced held-out records, and of the others."""
    if not 0 <= public <= count // 2:
        raise InvalidInput(f"public={public} must be in 0..{count // 2}: the other held-out records measure accuracy")
    chosen = torch.zeros(count, dtype=torch.bool)
    if public:
        chosen[:: count // public] = True
    return chosen.nonzero()[:, 0], (~chosen).nonzero()[:, 0]
