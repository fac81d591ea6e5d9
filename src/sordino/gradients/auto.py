"""The default engine: the fastest one that can differentiate this model, found on its first batch."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn

from sordino.errors import InvalidInput, UnsupportedModel
from sordino.gradients.engine import Batch, Differentiated, Engine, Objective
from sordino.gradients.looped import Looped
from sordino.gradients.vmapped import Vmapped

_log = logging.getLogger("sordino")


class Auto:
    """Tries engines in order and stays with the first that works; says in one log line why another did not."""

    name = "auto"

    def __init__(self, engines: Sequence[Engine] | None = None) -> None:
        self._engines: list[Engine] = list(engines) if engines is not None else [Vmapped(), Looped()]

    def differentiate(self, objective: Objective, parameters: list[nn.Parameter], batch: Batch) -> Differentiated:
        while len(self._engines) > 1:
            engine = self._engines[0]
            try:
                return engine.differentiate(objective, parameters, batch)
            except (RuntimeError, NotImplementedError, TypeError, UnsupportedModel) as error:
                reason = str(error).strip().split("\n")[0]
                _log.info("engine %s cannot run this model (%s): using %s", engine.name, reason, self._engines[1].name)
                del self._engines[0]
        return self._engines[0].differentiate(objective, parameters, batch)

    def microbatch(self, parameters: list[nn.Parameter]) -> int:
        return self._engines[0].microbatch(parameters)


def engine_named(name: str) -> Engine:
    """The engine that a user asked for by name."""
    engines: dict[str, type[Auto] | type[Vmapped] | type[Looped]] = {"auto": Auto, "vmap": Vmapped, "loop": Looped}
    if name not in engines:
        raise InvalidInput(f"engine={name!r} must be one of {', '.join(engines)}: 'auto' finds the fastest that works")
    return engines[name]()
