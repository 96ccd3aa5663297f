"""One rank of test_construct: builds models plainly and sharded after the same seed, gathers and compares them.

Started by tests/train/test_construct.py with the torch.distributed variables set; writes its findings as JSON.
Must never build an engine: many models share this process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from torch import nn

from recipes.shared import construct, gather
from recipes.shared.construct import ShardedConstruction
from recipes.shared.hf_config import make_config

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
DS = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
HPZ = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}


class Hostile(nn.Module):
    """Initialises children from the parent, ties, scales, deep-copies, keeps scalars and an odd-sized embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5, padding_idx=3)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("table", torch.randn(4))
        nn.init.orthogonal_(self.blocks[0].weight)
        nn.init.xavier_uniform_(self.blocks[1].weight)
        self.blocks[2].weight.data.normal_(0, 0.02)
        with torch.no_grad():
            self.blocks[3].weight.mul_(0.3)
            self.blocks[3].bias.copy_(self.blocks[0].weight.sum(dim=0))
        self.stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2)
        self.apply(self._bias)

    @staticmethod
    def _bias(module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.uniform_(module.bias, -0.1, 0.1)


class Deep(nn.Module):
    """Twenty equal matrices, initialised again by the parent after all of them stand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(20))
        for layer in self.layers:
            nn.init.normal_(layer.weight)


def causal(kind: str, **fields: Any) -> Callable[[], nn.Module]:
    """Builder of a tiny causal language model of this family."""

    def build() -> nn.Module:
        from transformers import AutoModelForCausalLM

        config = make_config({"model_type": kind} | fields)
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return model

    return build


def t5() -> nn.Module:
    """A tiny encoder-decoder."""
    from transformers import AutoModelForSeq2SeqLM

    config = make_config(
        {"model_type": "t5", "vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    )
    model: nn.Module = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama_tied": causal("llama", **SMALL, tie_word_embeddings=True),
    "llama_untied": causal("llama", **SMALL, tie_word_embeddings=False),
    "gpt2": causal("gpt2", n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=64),
    "qwen2": causal("qwen2", **SMALL, num_key_value_heads=2),
    "mixtral": causal("mixtral", **SMALL, num_key_value_heads=2, num_local_experts=4),
    "t5": t5,
    "hostile": Hostile,
}


def compare(
    build: Callable[[], nn.Module], dtype: torch.dtype = torch.float32, ds: dict[str, Any] = DS
) -> dict[str, Any]:
    """Names that differ between a plain and a sharded construction, and how many were compared."""
    torch.manual_seed(11)
    plain = build()
    after_plain = torch.rand(1)
    torch.manual_seed(11)
    with ShardedConstruction(torch.device("cpu")) as construction:
        model = build()
    after_sharded = torch.rand(1)
    construction.partition(model, dtype, ds)
    different = [] if torch.equal(after_plain, after_sharded) else ["the order of random draws"]
    expected, found = dict(plain.named_parameters()), dict(model.named_parameters())
    if expected.keys() != found.keys():
        different.append("the names of parameters")
    not_partitioned = [
        name for name, p in found.items() if not hasattr(p, "ds_id") or p.numel() != 0 or p.dtype != dtype
    ]
    for name, parameter in found.items():
        with gather.read(parameter):
            if not torch.equal(parameter.detach(), expected[name].detach().to(dtype)):
                different.append(name)
    for name, buffer in plain.named_buffers():
        if not torch.equal(buffer, dict(model.named_buffers())[name]):
            different.append(name)
    return {"different": different, "compared": len(found), "not_partitioned": not_partitioned}


def main() -> None:
    deepspeed.init_distributed()
    findings = {name: compare(build) for name, build in MODELS.items()}
    findings["bf16"] = compare(MODELS["llama_tied"], torch.bfloat16)
    for name in ("first_with_hpz", "second_with_hpz"):
        findings[name] = compare(MODELS["llama_tied"], ds=HPZ)
    construct.RESIDENT_BYTES = 64 * 64 * 4 * 4  # four matrices
    with ShardedConstruction(torch.device("cpu")) as construction:
        model = Deep()
    whole = sum(p.numel() * 4 for p in model.parameters())
    findings["deep"] = {"peak_fraction": construction.peak_resident_bytes / whole}
    with open(sys.argv[1], "w") as file:
        json.dump(findings, file)


if __name__ == "__main__":
    main()
