"""What clients compute: the gradient of the mean, or start minus end of local SGD."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sordino import InvalidInput
from sordino.federated import FedAvg, FedSGD
from sordino.federated.work import find_trainable, from_config
from sordino.records import Records
from tests.helpers import classification, cross_entropy, mlp


def order() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def gradient(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(cross_entropy(model, data).mean(), list(model.parameters())))


@pytest.mark.parametrize("microbatch", [1, 7, 256])
def test_fedsgd_is_the_gradient_of_the_mean_loss(microbatch: int) -> None:
    data, model = classification(20), mlp()
    update = FedSGD(microbatch).update(model, cross_entropy, Records(data), order())
    for ours, theirs in zip(update.values(), gradient(mlp(), data), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_fedavg_of_one_whole_step_is_fedsgd_times_the_learning_rate() -> None:
    data = classification(20)
    update = FedAvg(batch_size=20, lr=0.3).update(mlp(), cross_entropy, Records(data), order())
    for ours, theirs in zip(update.values(), gradient(mlp(), data), strict=True):
        assert torch.allclose(ours, 0.3 * theirs, atol=1e-6)


def test_fedavg_follows_local_sgd_and_stops_at_the_last_step_allowed() -> None:
    data, model, twin = classification(20), mlp(), mlp()
    update = FedAvg(epochs=3, batch_size=8, lr=0.2, momentum=0.5, max_steps=4).update(
        model, cross_entropy, Records(data), order()
    )
    optimizer, generator = torch.optim.SGD(twin.parameters(), 0.2, 0.5), order()
    batches = [part for _ in range(3) for part in torch.randperm(20, generator=generator).split(8)]
    for batch in batches[:4]:
        optimizer.zero_grad()
        cross_entropy(twin, (data[0][batch], data[1][batch])).mean().backward()
        optimizer.step()
    for name, parameter in mlp().named_parameters():
        assert torch.allclose(update[name], parameter - dict(twin.named_parameters())[name], atol=1e-6)


def test_frozen_parameters_are_no_part_of_an_update_and_unused_ones_are_zero() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    update = FedSGD().update(model, cross_entropy, Records(classification(6)), order())
    assert set(update) == set(find_trainable(model)) == {"unused", "0.bias", "2.weight", "2.bias"}
    assert not update["unused"].any()


@pytest.mark.parametrize("work", [FedAvg(epochs=2, lr=0.7, max_steps=3), FedSGD(microbatch=5)])
def test_work_travels_in_a_configuration(work: FedAvg | FedSGD) -> None:
    assert from_config({**work.to_config(), "clip": 1.0, "round": 3}) == work


def test_a_loss_that_is_no_vector_is_refused() -> None:
    with pytest.raises(InvalidInput, match="one loss per record"):
        FedSGD().update(mlp(), lambda m, b: cross_entropy(m, b).mean(), Records(classification(6)), order())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedAvg(epochs=0), "epochs=0"),
        (lambda: FedAvg(batch_size=0), "batch_size=0"),
        (lambda: FedAvg(max_steps=0), "max_steps=0"),
        (lambda: FedAvg(lr=0.0), r"lr=0\.0"),
        (lambda: FedAvg(momentum=1.0), "momentum=1"),
        (lambda: FedSGD(0), "microbatch=0"),
        (lambda: from_config({"work": "fedprox"}), "fedprox"),
    ],
)
def test_bad_settings_are_refused(make: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()  # type: ignore[operator]
