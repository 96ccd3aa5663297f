"""Checkpoints that no run of ours wrote: DeepSpeed's own save of an odd module, and the one of Hugging Face's Trainer.

Run in ranks that the engine server forks; each leaves the checkpoint and, in expected.pt, what must be read from it.
Must never use a part of the product.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

from recipes.shared import gather

Z = "zero_optimization"


class Odd(nn.Module):
    """Sizes that no world divides, a scalar parameter, frozen weights, tied weights, buffers of four types."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.body = nn.Linear(7, 5)
        self.frozen = nn.Linear(5, 7, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor([1.25]))
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(2**40 + 1))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("mean", torch.tensor([0.1, 1e-8]))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(torch.tanh(self.body(self.embed(tokens)))) * self.scale
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def odd(case: dict[str, Any]) -> dict[str, Any]:
    """Three steps of Odd in two parameter groups, saved by DeepSpeed. `case`: stage, precision, folder."""
    torch.manual_seed(0)
    stage, folder = case["stage"], Path(case["folder"])
    config = {
        "train_micro_batch_size_per_gpu": 2,
        Z: {"stage": stage, "sub_group_size": 60} if stage == 3 else {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "bf16": {"enabled": case["precision"] == "bf16"},
    }
    if stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = Odd()
        model.register_external = deepspeed.zero.register_external_parameter(model.head, model.embed.weight)
    else:
        model = Odd()
    matrices = [p for p in model.parameters() if p.requires_grad and len(getattr(p, "ds_shape", p.shape)) > 1]
    vectors = [p for p in model.parameters() if p.requires_grad and len(getattr(p, "ds_shape", p.shape)) < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config, dist_init_required=False)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        engine.backward(engine(torch.randint(0, 13, (2, 6), generator=generator)))
        engine.step()
    engine.save_checkpoint(str(folder))
    _expect(engine, folder)
    return {}


def _expect(engine: Any, folder: Path) -> None:
    """expected.pt: masters of trained parameters, frozen ones and persistent buffers, as the engine has them."""
    expected = {}
    for name, parameter in engine.module.named_parameters():
        master = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        with gather.read(parameter):
            expected[name] = (parameter.detach() if master is None else master).clone()
    persistent = {name for name in engine.module.state_dict() if name not in expected}
    expected |= {name: value.clone() for name, value in engine.module.named_buffers() if name in persistent}
    if dist.get_rank() == 0:
        torch.save(expected, folder / "expected.pt")


def trainer(case: dict[str, Any]) -> dict[str, Any]:
    """Two steps of Hugging Face's Trainer with its DeepSpeed integration. `case`: stage, folder."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        Z: {"stage": case["stage"]},
    }
    arguments = TrainingArguments(
        output_dir=case["folder"],
        max_steps=2,
        save_steps=2,
        per_device_train_batch_size=1,
        deepspeed=config,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=True, **sizes))
    rows = [{"input_ids": torch.arange(8) + row, "labels": torch.arange(8) + row} for row in range(8)]
    run = Trainer(model=model, args=arguments, train_dataset=rows)
    run.train()
    _expect(run.deepspeed, Path(case["folder"]))
    return {}
