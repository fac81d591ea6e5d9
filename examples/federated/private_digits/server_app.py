"""What runs on the server: one strategy, and a guarantee at the end."""

import json
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from private_digits.task import held_out, network
from sordino import Budget, Recipe, recipes
from sordino.federated import FedAvg, PrivateStrategy, Quantile

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, then print what every user was promised."""
    config = context.run_config
    run = Path(str(config["run"])) if config["run"] else None
    with PrivateStrategy(
        network(),
        recipe_of(context),
        FedAvg(epochs=int(config["local-epochs"]), lr=float(config["local-lr"])),
        adaptive=Quantile() if config["adaptive"] else None,
        patience=float(config["patience"]),
        run=run,
        resume=True,
    ) as strategy:
        strategy.start(grid, timeout=float(config["timeout"]), evaluate_fn=evaluate)
        promised, measured = strategy.guarantee(), evaluate(0, strategy.arrays())
    print(promised, flush=True)
    if run is not None:
        (run / "result.json").write_text(json.dumps({"guarantee": promised.to_dict(), **measured}, indent=1))


def recipe_of(context: Context) -> Recipe:
    """The recipe that the run's configuration names, calibrated for its population."""
    config = context.run_config
    make = {
        "dpsgd": recipes.dpsgd,
        "growing_mu": recipes.growing_mu,
        "sensitivity_decay": recipes.sensitivity_decay,
        "dynamic": recipes.dynamic,
    }[str(config["method"])]
    recipe = make(
        batch_size=int(config["users-per-round"]),
        steps=int(config["rounds"]),
        clip=float(config["clip"]),
        lr=float(config["server-lr"]),
    )
    return recipe.calibrate(Budget(float(config["epsilon"]), float(config["delta"])), records=int(config["users"]))


def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
    """Accuracy on public records: the released model may be looked at as often as one likes."""
    model, (x, y) = network(), held_out()
    model.load_state_dict(arrays.to_torch_state_dict())
    with torch.no_grad():
        return MetricRecord({"accuracy": float((model(x).argmax(1) == y).float().mean())})
