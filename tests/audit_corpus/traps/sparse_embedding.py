"""Sparse gradients, which ZeRO skips (deepspeedai/DeepSpeed#1416)."""

from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8, sparse=True)  # trap: sparse
        self.head = nn.Linear(8, 16)

    def forward(self, ids):
        return self.head(self.embed(ids))


def build():
    return Net()


def step(engine, ids):
    loss = engine(ids).logsumexp(-1).mean()
    engine.backward(loss)
    engine.step()
