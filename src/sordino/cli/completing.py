"""What the shell offers after an option: names that are public and fixed, listed here so that no torch is loaded."""

from __future__ import annotations

from collections.abc import Callable

DATA = ("cifar10", "digits", "fashion-mnist", "imdb", "infinite-mnist", "mnist", "names")
RECIPES = (
    *("automatic", "dpadam", "dpagd", "dpis", "dpsgd", "dpsur", "dynamic"),
    *("growing-mu", "jl", "noise-decay", "screening", "sensitivity-decay"),
)
MODELS = (
    *("alexnet", "cifar-cnn", "digits-cnn", "digits-mlp", "embedding-mlp", "imdb-bilstm", "imdb-mlp", "jl-bilstm"),
    *("jl-cifar", "linear", "mlp", "mnist-cnn", "names-lstm", "scatter-cnn", "scatter-linear", "small-cnn"),
    *("transformer", "vgg13"),
)
OPTIMIZERS = ("adam", "adamw", "sgd")
ACCOUNTANTS = ("gdp", "pld", "rdp", "rdp-classic", "rdp-filter", "tcdp", "zcdp", "zcdp-epoch")
ADJACENCIES = ("add-or-remove-one", "replace-one")


def among(names: tuple[str, ...]) -> Callable[[str], list[str]]:
    """A completer for typer: those of the names that begin as what was typed; the shell offers files if none does."""

    def offered(incomplete: str) -> list[str]:  # typer knows the argument by this name
        return [name for name in names if name.startswith(incomplete)]

    return offered
