"""A function that keeps the weight of another layer."""

from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)
        weight = self.embed.weight
        self.rows = lambda ids: weight[ids]  # trap: external

    def forward(self, ids):
        return self.head(self.embed(ids) + self.rows(ids))


def build():
    return Net()


def step(engine, ids):
    loss = engine(ids).logsumexp(-1).mean()
    engine.backward(loss)
    engine.step()
