"""What two ranks do with a transformer from a configuration that FSDP2 has sharded, in full and with LoRA."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from sordino.distributed import sharding
from tests.distributed.scenarios import flat
from tests.helpers import calibrated, private

RECORDS = 32


def llama() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
        pad_token_id=0,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def adapted() -> nn.Module:
    import peft

    model: nn.Module = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    return model


def tokens(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    scores = model(batch[0]).logits.float()
    return F.cross_entropy(scores[:, :-1].transpose(1, 2), batch[0][:, 1:], reduction="none").mean(1)


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """One unit for each block, and one for the rest, as the recipe in docs/distributed.md has it."""
    from torch.distributed.fsdp import fully_shard

    for block in (module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")):
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def tune(build: Callable[[], nn.Module], **options: Any) -> Tensor:
    """Where two steps of Adam leave what is trained; sharded if there is anybody to share with."""
    model = build()
    if dist.is_initialized():
        shard(model, **options)
    text = torch.randint(1, 30, (RECORDS, 6), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    recipe = calibrated(RECORDS, batch_size=8, steps=2)
    run = private(recipe, model=model, optimizer=optimizer, dataset=(text,), loss=tokens, validate=False)
    for _ in run.steps():
        pass
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    state = sharding.gather_state(model.state_dict())
    return flat(state[name] for name in trained)


def fine_tuned(directory: Path) -> dict[str, Any]:
    """Full and LoRA; and with float32 shards of which every rank computes in bfloat16."""
    found: dict[str, Any] = {"full": tune(llama), "LoRA": tune(adapted)}
    if dist.is_initialized():
        from torch.distributed.fsdp import MixedPrecisionPolicy

        found["bfloat16"] = tune(llama, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return found


def warm() -> None:
    """Import once what every rank needs; the ranks are forked and inherit it."""
    adapted()


CREWS = {"1": (1, [fine_tuned]), "2": (2, [fine_tuned])}
