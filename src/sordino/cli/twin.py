"""The non-private twin: the same model, optimizer and number of steps, without clipping and without noise."""

from __future__ import annotations

import torch

from sordino.cli import architectures
from sordino.cli.progress import bar
from sordino.cli.session import Session, accuracy, per_example_loss
from sordino.records import Records


def train_twin(session: Session) -> float | None:
    """The twin's held-out accuracy, for comparison. It protects nobody: neither the twin nor its steps are kept."""
    if not session.has_held_out:
        return None
    recipe, seed = session.private.bench.recipe, session.config.run.seed
    model = architectures.build(session.config.model, seed)
    optimizer = recipe.optimizer.build(model.parameters())
    records = Records(session.data.train_set)
    generator = torch.Generator()
    generator.manual_seed(seed) if seed is not None else generator.seed()
    steps = session.private.total
    with bar("non-private twin") as progress:
        task = progress.add_task("", total=steps, note="")
        for _ in range(steps):
            drawn = torch.randint(records.count, (recipe.batch_size,), generator=generator)
            batch = records.fetch(drawn, torch.device("cpu"))
            optimizer.zero_grad()
            per_example_loss(model, batch.data).mean().backward()
            optimizer.step()
            progress.advance(task)
    return accuracy(model, session.data.test)
