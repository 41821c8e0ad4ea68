"""Loops inside the Trainers of libraries, each a function of a model and steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, Dataset

Watch: TypeAlias = Callable[[nn.Module, Any], object]
TOKENS = torch.randint(256, (256, 64), generator=torch.Generator().manual_seed(0))


class Texts(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return len(TOKENS)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = TOKENS[index]
        return {"input_ids": row.clone(), "labels": row.clone()}


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 64}
    ends = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**sizes, **ends, loss_type="ForCausalLMLoss")
    return transformers.GPT2LMHeadModel(config).train()


def with_lora() -> nn.Module:
    import peft

    how = {"target_modules": ["c_attn"], "lora_dropout": 0.1, "fan_in_fan_out": True}
    return peft.get_peft_model(gpt2(), peft.LoraConfig(r=4, **how))


def by_transformers(
    model: nn.Module, steps: int, folder: Path, watch: Watch | None
) -> None:
    class Begin(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> Any:
            if watch is not None:
                watch(kw["model"], kw["optimizer"])

    args = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=steps,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    callbacks = [Begin()]
    transformers.Trainer(
        model, args, train_dataset=Texts(), callbacks=callbacks
    ).train()


def by_accelerate(
    model: nn.Module, steps: int, folder: Path, watch: Watch | None
) -> None:
    import accelerate

    del folder
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), 1e-3), DataLoader(Texts(), 8)
    )
    torch.manual_seed(0)
    if watch is not None:
        watch(model, optimizer)
    for _, batch in zip(range(steps), loader, strict=False):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def by_lightning(
    model: nn.Module, steps: int, folder: Path, watch: Watch | None
) -> None:
    import lightning.pytorch as lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            del index
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    class Begin(lightning.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if watch is not None:
                watch(pl_module.model, trainer.optimizers)

    torch.manual_seed(0)
    lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        callbacks=[Begin()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    ).fit(Module(), DataLoader(Texts(), 8))


TRAINERS = {
    "transformers": (gpt2, by_transformers),
    "lora": (with_lora, by_transformers),
    "accelerate": (gpt2, by_accelerate),
    "lightning": (gpt2, by_lightning),
}
