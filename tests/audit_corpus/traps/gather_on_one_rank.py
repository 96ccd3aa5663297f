"""A gather under `if rank == 0`."""

import torch
import torch.distributed as dist
from torch import nn

from recipes.shared import gather


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, ids):
        return self.head(torch.relu(self.body(self.embed(ids))))


def build():
    return Net()


def step(engine, ids):
    if dist.get_rank() == 0:
        with gather.read(engine.module.body.weight):  # trap: order
            print(engine.module.body.weight.norm())
    engine.backward(engine(ids).logsumexp(-1).mean())
    engine.step()
