"""Learning curves of a small transformer on IMDb: every weight or low-rank changes, privately, at proven ε.

    python -m benchmarks.finetuning run --out /tmp/finetuning.jsonl     (an hour of one core; goes on where it stopped)
    python -m benchmarks.finetuning show benchmarks/results/finetuning.jsonl

The model is a small DistilBERT on the last 128 words of a review, built from a configuration.
Its word vectors are GloVe's (public text), reduced to its width and frozen; which 20,000 words have one was counted
on the reviews, as for the linear recipe in docs/results.md, and no ε here pays for that. The base, from which the runs
called `full` and `lora` start, was trained on synthetic reviews: words drawn at random, more often those that GloVe
puts near ten words of praise, or near ten of blame. No review is read for it. `scratch` starts from random weights.

Learning rates are chosen on a fifth of the training records, held out, in short runs. The test reviews are not looked
at before all is chosen.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.utils.data import Dataset

from sordino import Budget, Private, recipes
from sordino.finetuning.losses import loss
from sordino.lab.data.imdb import glove_embedding, load_imdb
from sordino.lab.data.vocabulary import keras_words
from sordino.tables.defaults import count_parameters

WORDS, LENGTH, CLIP, DELTA = 20_000, 128, 0.1, 1e-5
EPSILONS = (3.0, 8.0)
METHODS = ("lora", "full", "scratch")
TESTED = 10_000
"""Test reviews, of 25,000 in an order that was mixed without looking."""
RATES = (1e-3, 3e-3, 1e-2)
PRAISE = ["good", "great", "excellent", "wonderful", "amazing", "superb", "brilliant", "perfect", "enjoyable", "loved"]
BLAME = ["bad", "awful", "terrible", "worst", "boring", "horrible", "poor", "dull", "waste", "stupid"]
LEANING = 0.35
"""How much more often a synthetic review has a word one deviation nearer to its own pole."""
MICROBATCH = 128
app = typer.Typer(pretty_exceptions_show_locals=False)


@dataclass(frozen=True)
class Size:
    """How much there is to compute; `trial` are the steps of a run that only chooses a learning rate."""

    width: int
    layers: int
    batch_size: int
    steps: int

    @property
    def trial(self) -> int:
        return self.steps // 3


@dataclass(frozen=True)
class Reviews(Dataset[dict[str, Tensor]]):
    """Token ids and classes as a model's inputs."""

    ids: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.batch(torch.tensor([index]), squeeze=True)

    def batch(self, indices: Tensor, *, squeeze: bool = False) -> dict[str, Tensor]:
        found = {"input_ids": self.ids[indices], "labels": self.labels[indices]}
        found["attention_mask"] = (found["input_ids"] != 0).long()
        return {name: value[0] for name, value in found.items()} if squeeze else found

    def part(self, start: int, stop: int) -> Reviews:
        return Reviews(self.ids[start:stop], self.labels[start:stop])


@dataclass(frozen=True)
class Row:
    """One run: what was trained how, its curve (step, accuracy on 1,000 test reviews), and where it ended.

    `accuracy` and `base_accuracy`, that of the model before the first step, are on all `TESTED` reviews.
    """

    method: str
    epsilon: float
    delta: float
    basis: str
    lr: float
    size: Size
    clip: float
    noise_multiplier: float
    trained: int
    accuracy: float
    base_accuracy: float | None
    curve: list[tuple[int, float]]
    cpu_seconds: int
    purpose: str


def read_reviews() -> tuple[Reviews, Reviews]:
    """Training and test reviews: the start token, then their last words. The order was mixed without looking."""
    data = load_imdb(words=WORDS, length=LENGTH, cut="pre")
    found = []
    for ids, labels in (data.train, data.test):
        ids = ids.clone()
        ids[:, 0] = 1
        found.append(Reviews(ids, labels))
    return found[0], found[1]


def read_vectors(width: int) -> Tensor:
    """GloVe's vectors along their main directions, one row per token."""
    vectors = glove_embedding(words=WORDS)
    _, _, directions = torch.linalg.svd(vectors - vectors.mean(0), full_matrices=False)
    reduced: Tensor = vectors @ directions[:width].T
    return reduced


def build_model(vectors: Tensor, layers: int, seed: int) -> Any:
    """A DistilBERT from a configuration, on frozen word vectors."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    none = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
    width = vectors.shape[1]
    shape = {"dim": width, "n_heads": width // 16, "hidden_dim": 2 * width, "n_layers": layers}
    config = DistilBertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, num_labels=2, **shape, **none)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = DistilBertForSequenceClassification(config)
    words = model.distilbert.embeddings.word_embeddings.weight
    with torch.no_grad():
        words[: len(vectors)] = vectors
    words.requires_grad_(False)
    return model


def find_chances(vectors: Tensor) -> Tensor:
    """[2, words]: how often a word is drawn for a synthetic review of each class, by its rank and its vector."""
    ranks = {word: rank + 3 for rank, word in enumerate(keras_words()[: WORDS - 4], 1)}
    poles = [vectors[[ranks[word] for word in words if word in ranks]].mean(0) for words in (BLAME, PRAISE)]
    towards = vectors @ (poles[1] - poles[0]) / vectors.norm(dim=1).clamp(min=1e-6)
    known = vectors.norm(dim=1) > 0
    leaning = torch.where(known, (towards - towards[known].mean()) / towards[known].std(), torch.zeros(()))
    places = torch.arange(len(vectors))
    frequency = torch.where(places > 3, 1 / places.clamp(min=1), torch.zeros(()))
    return torch.stack([frequency * torch.exp(sign * LEANING * leaning) for sign in (-1, 1)])


def invent_reviews(chances: Tensor, count: int, generator: torch.Generator) -> Reviews:
    """Synthetic reviews: a class by a coin, then words by their chances in that class."""
    labels = torch.randint(2, (count,), generator=generator)
    ids = torch.zeros(count, LENGTH, dtype=torch.int64)
    for label in (0, 1):
        rows = torch.nonzero(labels == label).squeeze(1)
        drawn = torch.multinomial(chances[label], len(rows) * LENGTH, replacement=True, generator=generator)
        ids[rows] = drawn.reshape(len(rows), LENGTH)
    lengths = torch.randint(LENGTH // 3, LENGTH + 1, (count, 1), generator=generator)
    ids[torch.arange(LENGTH) >= lengths] = 0
    ids[:, 0] = 1
    return Reviews(ids, labels)


def train_base(vectors: Tensor, layers: int, steps: int = 250, batch: int = 128) -> Any:
    """The base: trained without privacy, and without a review."""
    model, generator = build_model(vectors, layers, seed=0), torch.Generator().manual_seed(1)
    chances = find_chances(vectors)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    for _ in range(steps):
        reviews = invent_reviews(chances, batch, generator)
        optimizer.zero_grad()
        loss(model, reviews.batch(torch.arange(batch))).mean().backward()
        optimizer.step()
    return model


def start_model(method: str, base: Any, vectors: Tensor, layers: int) -> nn.Module:
    """What a run trains; the base itself is left as it is."""
    if method == "scratch":
        fresh: nn.Module = build_model(vectors, layers, seed=2)
        return fresh
    own = copy.deepcopy(base)
    if method == "full":
        full: nn.Module = own
        return full
    from peft import LoraConfig, TaskType, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(3)
        shape = LoraConfig(task_type=TaskType.SEQ_CLS, r=8, lora_alpha=16, target_modules=["q_lin", "v_lin", "out_lin"])
        adapted: nn.Module = get_peft_model(own, shape)
        return adapted


@torch.no_grad()
def measure(model: nn.Module, reviews: Reviews) -> float:
    """The share that is classified rightly."""
    model.eval()
    right = 0
    for part in torch.arange(len(reviews)).split(512):
        batch = reviews.batch(part)
        labels = batch.pop("labels")
        right += int((model(**batch).logits.argmax(1) == labels).sum())
    return right / len(reviews)


def train(
    method: str,
    epsilon: float,
    lr: float,
    start: nn.Module,
    train_set: Reviews,
    test: Reviews,
    size: Size,
    *,
    trial: bool = False,
) -> Row:
    """One private run. A trial takes the first steps of the plan alone; its price is that of the whole plan."""
    recipe = recipes.dpadam(batch_size=size.batch_size, steps=size.steps, clip=CLIP, lr=lr)
    recipe = recipe.calibrate(Budget(epsilon, DELTA), records=len(train_set))
    optimizer = torch.optim.Adam([p for p in start.parameters() if p.requires_grad], lr=lr)
    few, began = test.part(0, 1000), time.process_time()
    base_accuracy, last = measure(start, test), size.trial if trial else size.steps
    curve = [(0, measure(start, few))]
    with Private(start, optimizer, train_set, loss, recipe, microbatch=MICROBATCH) as private:
        for step in private.steps():
            if not trial and step.number % max(1, size.steps // 10) == 0:
                curve.append((step.number, measure(start, few)))
            if step.number == last:
                break
        guarantee = private.guarantee()
    whole = measure(start, test)
    assert recipe.noise_multiplier is not None
    return Row(
        method=method,
        epsilon=guarantee.epsilon,
        delta=guarantee.delta,
        basis=guarantee.basis,
        lr=lr,
        size=size,
        clip=CLIP,
        noise_multiplier=recipe.noise_multiplier,
        trained=count_parameters(start),
        accuracy=whole,
        base_accuracy=base_accuracy,
        curve=curve,
        cpu_seconds=round(time.process_time() - began),
        purpose="choice" if trial else "result",
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The runs that are stored."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def plan_choices(rows: list[dict[str, Any]], methods: Sequence[str]) -> Iterator[tuple[str, float]]:
    """The short runs that are still to be made."""
    made = {(row["method"], row["lr"]) for row in rows if row["purpose"] == "choice"}
    yield from ((method, lr) for method in methods for lr in RATES if (method, lr) not in made)


def choose_rate(rows: list[dict[str, Any]], method: str) -> float:
    """The best on held-out training records."""
    tried = [row for row in rows if row["purpose"] == "choice" and row["method"] == method]
    return float(max(tried, key=lambda row: row["accuracy"])["lr"])


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="JSON lines; runs that are there are not made again.")],
    width: int = 64,
    layers: int = 1,
    batch_size: int = 1024,
    steps: int = 100,
) -> None:
    """Choose learning rates, then train; one line per run."""
    torch.set_num_threads(1)
    size = Size(width, layers, batch_size, steps)
    train_set, test = read_reviews()
    vectors = read_vectors(width)
    base = train_base(vectors, layers)
    cut = len(train_set) // 5
    held, rest = train_set.part(0, cut), train_set.part(cut, len(train_set))
    typer.echo(f"base: {measure(base, held.part(0, 2000)):.3f} of held-out training reviews, no review read")

    def keep(row: Row) -> None:
        with out.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        typer.echo(f"{row.purpose} {row.method} ε {row.epsilon:.2f} lr {row.lr:g}: {row.accuracy:.4f}")

    def begin(method: str) -> nn.Module:
        return start_model(method, base, vectors, layers)

    for methods in (METHODS[:2], METHODS[2:]):  # what is compared comes first
        for method, lr in plan_choices(read_rows(out), methods):
            keep(train(method, EPSILONS[0], lr, begin(method), rest, held.part(0, 2000), size, trial=True))
        for epsilon, method in product(EPSILONS, methods):
            rows = read_rows(out)
            made = {(row["method"], round(row["epsilon"])) for row in rows if row["purpose"] == "result"}
            if (method, round(epsilon)) not in made:
                best = choose_rate(rows, method)
                keep(train(method, epsilon, best, begin(method), train_set, test.part(0, TESTED), size))


@app.command()
def show(path: Path) -> None:
    """The table of docs/finetuning-cli.md."""
    rows = [row for row in read_rows(path) if row["purpose"] == "result"]
    typer.echo("| trained | weights | ε | test accuracy | before | lr | minutes of one core |")
    typer.echo("|---|---:|---:|---:|---:|---:|---:|")
    for row in sorted(rows, key=lambda row: (row["method"], row["epsilon"])):
        shown = [f"`{row['method']}`", f"{row['trained']:,}", f"{row['epsilon']:.2f}", f"{row['accuracy']:.1%}"]
        before = "" if row["base_accuracy"] is None else f"{row['base_accuracy']:.1%}"
        more = [before, f"{row['lr']:g}", f"{row['cpu_seconds'] / 60:.1f}"]
        typer.echo(f"| {' | '.join([*shown, *more])} |")


if __name__ == "__main__":
    app()
