"""`sordino demo`: the digits of scikit-learn at epsilon 3, next to a twin without privacy."""

from __future__ import annotations

from sordino.cli import options


def demo(run: options.RunDirectory = None, json: options.Json = False) -> None:
    """Train on scikit-learn's bundled digits at epsilon 3 and compare with training without privacy."""
    import torch

    from sordino.cli.launch import train_and_report
    from sordino.cli.train import Flags

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is tiny: on a busy machine a second thread costs far more than it saves
    try:
        train_and_report(Flags(data="digits", epsilon=3.0, delta=1e-5, run=run, non_private_twin=True, json=json))
    finally:
        torch.set_num_threads(threads)
