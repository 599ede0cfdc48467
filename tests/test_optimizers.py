"""Schedules equal those of Transformers; weight decay spares vectors."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler
from transformers import optimization as transformers

from cluster_sft.adafactor import Adafactor
from cluster_sft.errors import UserError
from cluster_sft.optimizers import learning_rate, make_optimizer, warmup_length


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("scheduler", ["linear", "cosine", "constant"])
def test_learning_rate_equals_transformers_schedule(scheduler, warmup):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.2)
    name = "constant_with_warmup" if scheduler == "constant" else scheduler
    reference = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=10)
    for step in range(10):
        ours = learning_rate(step, peak=0.2, steps=10, warmup=warmup, scheduler=scheduler)
        assert ours == pytest.approx(reference.get_last_lr()[0], abs=1e-15)
        optimizer.step()
        reference.step()


def test_warmup_ratio_is_read_as_a_decimal():
    assert warmup_length(100, warmup_steps=None, warmup_ratio=0.07) == 7
    assert warmup_length(30, warmup_steps=None, warmup_ratio=0.05) == 2
    assert warmup_length(30, warmup_steps=15, warmup_ratio=None) == 15
    assert warmup_length(30, warmup_steps=None, warmup_ratio=None) == 0


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_optimizer_decays_matrices_alone(name):
    layer = torch.nn.Linear(2, 2)
    optimizer = make_optimizer(name, layer.named_parameters(), weight_decay=0.5)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    before = {n: p.detach().clone() for n, p in layer.named_parameters()}
    (0.0 * (layer.weight.sum() + layer.bias.sum())).backward()
    optimizer.step()
    assert torch.allclose(layer.weight, 0.95 * before["weight"])
    assert torch.equal(layer.bias, before["bias"])


def test_adafactor_gives_bitwise_the_steps_of_transformers():
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 4), (5,), (2, 3, 4)]
    ours, theirs = (
        [
            torch.nn.Parameter(torch.randn(s, generator=torch.Generator().manual_seed(1)))
            for s in shapes
        ]
        for _ in range(2)
    )
    found = Adafactor(ours, lr=0.1, weight_decay=0.3)
    expected = transformers.Adafactor(
        theirs, lr=0.1, weight_decay=0.3, scale_parameter=False, relative_step=False
    )
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        found.step()
        expected.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_optimizer_unknown_name_is_refused():
    with pytest.raises(UserError, match="adamw or adafactor"):
        make_optimizer("lion", [], weight_decay=0.0)
