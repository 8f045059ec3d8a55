"""Use the Hugging Face Trainer with a language model that has an untied head."""

from __future__ import annotations

import os
import tempfile
import warnings
from typing import Any

import torch
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"  # no downloads: the model and the data are generated
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from integrations.common import Clock, compare, library_of

VOCABULARY, LENGTH, STEPS = 50_257, 32, 12


class Tick(TrainerCallback):
    """Call `clock.tick` after each step."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Record the duration of the step."""
        self.clock.tick()


def train(model: nn.Module, way: str, clock: Clock) -> None:
    """Fine-tune on random tokens."""
    source = torch.Generator().manual_seed(2)
    tokens = (torch.rand(64, LENGTH, generator=source).pow(3) * VOCABULARY).long()
    data = [{"input_ids": line, "labels": line} for line in tokens]
    options = {"lr": 1e-3, **({"fused": True} if way == "fused" else {})}
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            weight_decay=0.01,
            save_strategy="no",
            logging_strategy="no",
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            seed=0,
        )
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=data,
            callbacks=[Tick(clock)],
            optimizer_cls_and_kwargs=(library_of(way).AdamW, options),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=1,
        n_head=2,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    compare("Hugging Face Trainer, GPT-2's vocabulary", GPT2LMHeadModel(config), train)
