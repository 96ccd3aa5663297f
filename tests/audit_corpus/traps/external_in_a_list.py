"""An output layer uses the embedding through a list that hides it from DeepSpeed."""

from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.body = nn.Linear(8, 8)
        self.shared = [self.embed.weight]

    def forward(self, ids):
        return F.linear(self.body(self.embed(ids)), self.shared[0])  # trap: external


def build():
    return Net()


def step(engine, ids):
    loss = engine(ids).logsumexp(-1).mean()
    engine.backward(loss)
    engine.step()
