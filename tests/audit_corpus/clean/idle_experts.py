"""Ranks use other experts of a mixture that DeepSpeed knows as one (deepspeedai/DeepSpeed#7998)."""

from deepspeed.utils import set_z3_leaf_modules
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, kind):
        return self.experts[kind](x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.mixture = Experts()

    def forward(self, ids):
        return self.mixture(self.embed(ids), int(ids.sum()) % 4)


def build():
    return Net()


def prepared(model):
    set_z3_leaf_modules(model, [Experts])


def step(engine, ids):
    loss = engine(ids).logsumexp(-1).mean()
    engine.backward(loss)
    engine.step()
