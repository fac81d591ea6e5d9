"""Private supervised fine-tuning with TRL: `SFTTrainer` with private steps.

::

    trainer = PrivateSFTTrainer(
        model=model,
        args=SFTConfig("out"),
        train_dataset=conversations,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8),
        budget=Budget(epsilon=3, delta=1e-5),
    )

Chat templates, prompts with completions and loss masks work as in TRL. One row of the dataset is one record: packing is
refused, because several records would share a row, or one record several rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from trl import SFTTrainer

from sordino.integrations.arguments import OF_SFT, Meaning
from sordino.integrations.transformers import PrivateLoop


class PrivateSFTTrainer(PrivateLoop, SFTTrainer):
    """TRL's `SFTTrainer` with private steps: give it `budget=` or `recipe=`; the rest is as usual."""

    ordinary: ClassVar[type] = SFTTrainer
    more_meanings: ClassVar[Mapping[str, Meaning]] = OF_SFT

    def __init__(self, model: Any, args: Any = None, *arguments: Any, **settings: Any) -> None:
        super().__init__(model, args, *arguments, **settings)
