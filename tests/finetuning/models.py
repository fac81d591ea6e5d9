"""Tiny Hugging Face models from configurations, full or with adapters, and texts for them; no weights are loaded."""

from __future__ import annotations

from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn

VOCABULARY, RECORDS = 31, 24
KINDS = ("gpt2", "llama", "bert", "t5")


def build(kind: str, dropout: float = 0.0) -> nn.Module:
    """A model of a few thousand weights, the same every time."""
    torch.manual_seed(1)
    small: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0}
    if kind != "t5":
        small["initializer_range"] = 0.3  # so that every tensor has a gradient worth comparing
    wide = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            **small, n_positions=24, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, **wide))
    if kind == "bert":
        config = transformers.BertConfig(
            **small, **wide, max_position_embeddings=24, num_labels=3,
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        )  # fmt: skip
        return transformers.BertForSequenceClassification(config)
    config = transformers.T5Config(
        **small, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2, decoder_start_token_id=0, dropout_rate=dropout
    )
    return transformers.T5ForConditionalGeneration(config)


TARGETS = {"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"], "bert": ["query", "value"], "t5": ["q", "v"]}
TASKS = {"gpt2": "CAUSAL_LM", "llama": "CAUSAL_LM", "bert": "SEQ_CLS", "t5": "SEQ_2_SEQ_LM"}


def adapt(model: nn.Module, kind: str, way: str = "lora") -> nn.Module:
    """The model with adapters of a way that PEFT has."""
    torch.manual_seed(2)
    task, targets = TASKS[kind], TARGETS[kind]
    configs = {
        "lora": lambda: peft.LoraConfig(task_type=task, r=2, target_modules=targets, lora_dropout=0.0),
        "dora": lambda: peft.LoraConfig(task_type=task, r=2, target_modules=targets, use_dora=True),
        "ia3": lambda: peft.IA3Config(task_type=task, target_modules=targets, feedforward_modules=[]),
        "prompt": lambda: peft.PromptTuningConfig(task_type=task, num_virtual_tokens=3),
        "prefix": lambda: peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=3),
    }
    return peft.get_peft_model(model, configs[way]())


class Texts(torch.utils.data.Dataset[dict[str, Any]]):
    """Texts of different lengths with the labels that a kind of model is trained on."""

    def __init__(self, kind: str, records: int = RECORDS, seed: int = 5) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.items = [self._make(kind, draw) for _ in range(records)]

    @staticmethod
    def _make(kind: str, draw: torch.Generator) -> dict[str, Any]:
        length = int(torch.randint(3, 9, (1,), generator=draw))
        ids = torch.randint(3, VOCABULARY, (length,), generator=draw)
        labels: Any = ids.clone()
        if kind == "bert":
            labels = int(ids[0] % 3)
        elif kind == "t5":
            labels = ids.flip(0)[: length - 1].clone()
        return {"input_ids": ids.tolist(), "labels": labels if isinstance(labels, int) else labels.tolist()}

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]


def collate(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Padding on the right, as the collators of transformers do it."""

    def padded(rows: list[list[int]], value: int) -> Tensor:
        longest = max(map(len, rows))
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows])

    ids = [item["input_ids"] for item in items]
    labels = [item["labels"] for item in items]
    return {
        "input_ids": padded(ids, 0),
        "attention_mask": padded([[1] * len(row) for row in ids], 0),
        "labels": torch.tensor(labels) if isinstance(labels[0], int) else padded(labels, -100),
    }
