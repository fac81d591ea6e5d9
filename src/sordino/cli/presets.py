"""`sordino train --preset best`: a configuration of the laboratory as an ordinary run, with a model that predicts.

The settings are those of `sordino/lab/configs/<dataset>/best.toml`, chosen on these public datasets. An ε that no
configuration names gets the settings of the nearest one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sordino import books
from sordino.accounting import Guarantee
from sordino.accounting.guarantee import UNPROTECTED
from sordino.cli import announcing
from sordino.cli.announcing import Outcome
from sordino.cli.config import Config, ModelChoice
from sordino.cli.lookup import MOST_PARAMETERS
from sordino.cli.options import choose_delta
from sordino.cli.progress import Evaluation, History, open_bar
from sordino.cli.session import choose_directory
from sordino.cli.terminal import messages, say
from sordino.cli.train import Flags
from sordino.errors import InvalidInput
from sordino.lab import data as benchmarks
from sordino.lab.data.cifar10 import CLASSES
from sordino.lab.data.mnist import FASHION_CLASSES
from sordino.lab.data.surnames import encode_name
from sordino.lab.data.vocabulary import cut_windows, encode_all, token_ids
from sordino.lab.experiments.cases import Case, Settings, catalogue
from sordino.lab.experiments.problem import model_of
from sordino.lab.experiments.running import describe_new, load_averaged, load_released, run_in
from sordino.lab.experiments.summaries import describe_features
from sordino.private import Private
from sordino.run import HELD_OUT
from sordino.tables.arrays import read_inputs
from sordino.tables.predicting import Trained
from sordino.tables.reading import DataChoice

EVALUATIONS = 20
MOST = 150_000
"""The largest number that a preset's features or model may have."""
_SHAPES = {"mnist": (1, 28, 28), "fashion-mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
_WORDS = {"vocabulary": "keras", "words": 20_000, "length": 80, "pad": "post", "cut": "post"}
"""The default of `load_imdb`."""


def train(flags: Flags) -> None:
    """Train with the preset's settings, keep the model, and report the outcome."""
    assert flags.preset is not None
    assert flags.epsilon is not None
    dataset = (flags.data or "").replace("_", "-")
    settings = catalogue().get((dataset, flags.preset))
    if settings is None:
        raise InvalidInput(f"preset={flags.preset} has no settings for data={dataset}: see `sordino train --help`")
    directory = flags.run or choose_directory()
    books.require_fresh(directory)
    case = choose_case(settings, flags.epsilon, flags.delta)
    config = Config(data=DataChoice(dataset), model=ModelChoice(str(case.model["name"])), preset=_to_table(case))
    if not flags.json:
        _announce(case, settings)
    _train(case, config, directory, as_json=flags.json)


def resume(directory: Path, config: Config, *, as_json: bool) -> None:
    """Continue a run that was killed; a finished run is only evaluated again."""
    assert config.preset is not None
    _train(_read_case(config.preset), config, directory, as_json=as_json)


def choose_case(settings: Settings, epsilon: float, delta: float | None = None) -> Case:
    """Choose the case at `epsilon`, with the configuration's settings for the nearest ε."""
    if not (epsilon > 0 and math.isfinite(epsilon)):
        raise InvalidInput(f"epsilon={epsilon} must be > 0 and finite")
    nearest = min(settings.epsilons, key=lambda known: abs(math.log(known / epsilon)))
    case = replace(settings.case(nearest), epsilon=float(epsilon))
    return case if delta is None else replace(case, delta=choose_delta(delta, None))


def _announce(case: Case, settings: Settings) -> None:
    say("Records", f"{case.dataset}, whose test records are held out, not protected")
    say("Features", f"{describe_features(case.features)}, of each record alone; computed once and kept")
    say("Model", str(case.model["name"]))
    say("Settings", settings.provenance)
    messages().print()


def _train(case: Case, config: Config, directory: Path, *, as_json: bool) -> None:
    began = time.monotonic()
    kept: dict[str, Any] = {}

    def begin(private: Private) -> None:
        private.declare(UNPROTECTED, HELD_OUT)
        config.write(directory)
        kept.update(private=private, history=History(directory, private.position))

    with open_bar("private training") as bar:
        task = bar.add_task("", total=None, note="")

        def tell(step: int, steps: int, reached: float) -> None:
            bar.update(task, completed=step, total=steps, note=f"{reached:.1%}")
            kept["history"].add(Evaluation(step, reached, None, None, len(kept["private"].bench.ledger)))

        row = run_in(case, directory, tell, evaluations=EVALUATIONS, begun=begin)
    private: Private = kept["private"]
    with books.reading(directory) as ledger:
        head = ledger.head()
    recipe = private.bench.recipe
    guarantee = replace(Guarantee.from_dict(row["guarantee"]), unprotected=(HELD_OUT,))
    assert recipe.noise_multiplier is not None
    outcome = Outcome(
        status="finished",
        run=str(directory),
        steps=private.position,
        total=private.total,
        noise_multiplier=recipe.noise_multiplier,
        guarantee=guarantee,
        held_out_accuracy=row["accuracy"],
        seconds=round(time.monotonic() - began),
        events=head.events,
        head=head.chain.hex(),
        next=announcing.list_next(directory, case.dataset, runs_code=False)[:2],
    )
    announcing.report(outcome, as_json=as_json)


def _to_table(case: Case) -> dict[str, Any]:
    """Return the case as a table of a configuration."""
    return {key: value for key, value in case.to_dict().items() if value is not None}


def _read_case(table: dict[str, Any]) -> Case:
    try:
        return Case.from_dict(table)
    except TypeError as error:
        raise InvalidInput(f"[preset] is not whole ({error}): start a new run") from None


# -- a model that predicts --------------------------------------------------------------------------------------------


def load_preset(run: Path, table: dict[str, Any]) -> Trained:
    """Load the model of a run and a function from new records to its features; the folder may come from anybody."""
    case = _read_case(table)
    if case.dataset not in _SHAPES and case.dataset not in ("imdb", "names"):
        raise InvalidInput(f"[preset] names the dataset {case.dataset!r}, which has no presets: start a new run")
    _require_modest({"data": case.data, "features": case.features, "model": case.model})
    with torch.device("meta"):  # a folder can ask for any size, and building the model would take that memory at once
        size = sum(parameter.numel() for parameter in model_of(case).parameters())
    if size > MOST_PARAMETERS:
        raise InvalidInput(f"[preset] names a model of {size:,} parameters, must have <= {MOST_PARAMETERS:,}")
    return Trained(load_averaged(case, run), PresetInputs(case, _name_classes(case), load_released(case, run)))


def _require_modest(value: Any, depth: int = 0) -> None:
    """Refuse numbers and depths that no preset has: features are computed as a folder's configuration says."""
    if isinstance(value, dict | list | tuple):
        if depth > 4 or len(value) > 50:
            raise InvalidInput("[preset] is nested more deeply than any of Sordino's: start a new run")
        for inner in value.values() if isinstance(value, dict) else value:
            _require_modest(inner, depth + 1)
    elif isinstance(value, int | float) and not abs(value) <= MOST:
        raise InvalidInput(f"[preset] holds the number {value}, must be <= {MOST:,}: start a new run")


def _name_classes(case: Case) -> tuple[str, ...]:
    """Name the classes, if possible without the records: a model predicts on machines that never saw them."""
    known = {
        "mnist": tuple("0123456789"),
        "fashion-mnist": FASHION_CLASSES,
        "cifar10": CLASSES,
        "imdb": ("bad", "good"),
    }
    return known.get(case.dataset) or benchmarks.load(case.dataset, **dict(case.data)).classes


@dataclass(frozen=True, eq=False)
class PresetInputs:
    """New records as features: images from a .npz or arrays, texts from a file with one on each line, or a list.

    `released` are the statistics that the run released for its features, such as how many texts have a word.
    """

    case: Case
    classes: tuple[str, ...]
    released: Mapping[str, Tensor] = field(default_factory=dict)

    def __call__(self, data: Any) -> Tensor:
        """Return the features [N, ...] of all records."""
        shape = _SHAPES.get(self.case.dataset)
        inputs = self._encode(_read_texts(data)) if shape is None else _read_images(data, shape)
        return describe_new(self.case, inputs, self.released).float()

    def _encode(self, texts: Sequence[str]) -> Tensor:
        options = self.case.data
        if self.case.dataset == "names":
            return torch.stack([encode_name(text, int(options.get("length", 24))) for text in texts])
        how: dict[str, Any] = {**_WORDS, **options}
        coded = encode_all(texts, how["vocabulary"])
        ids = token_ids(coded["codes"], how["vocabulary"], how["words"])
        return torch.from_numpy(cut_windows(ids, coded["ends"], how["length"], how["pad"], how["cut"]))


def _read_images(data: Any, shape: tuple[int, int, int]) -> Tensor:
    """Read images [N, C, H, W] in [0, 1]; bytes are divided by 255 as in training, and channels may come last."""
    if isinstance(data, Tensor):
        data = data.numpy()
    found = read_inputs(Path(data)) if isinstance(data, str | Path) else np.asarray(data)
    pixels = torch.from_numpy(np.ascontiguousarray(found)).float()
    pixels = pixels / 255 if len(pixels) and pixels.max() > 1 else pixels
    channels, height, width = shape
    if pixels.dim() == 4 and tuple(pixels.shape[1:]) == (height, width, channels):
        pixels = pixels.permute(0, 3, 1, 2)
    if pixels.dim() < 2 or pixels[0].numel() != channels * height * width:
        raise InvalidInput(
            f"the inputs have shape {tuple(pixels.shape)}, must be [N, {channels}, {height}, {width}]: one per record"
        )
    return pixels.reshape(-1, *shape)


def _read_texts(data: Any) -> list[str]:
    if not isinstance(data, str | Path):
        return [str(text) for text in data]
    try:
        lines = Path(data).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"cannot read {data}: {error}; give a .txt file with one text on each line") from None
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise InvalidInput(f"{data} has 0 texts: give one on each line")
    return texts
