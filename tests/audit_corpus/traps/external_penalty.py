"""A penalty inside the forward over parameters kept in a list."""

from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)
        self.weights = [self.head.weight]

    def forward(self, ids):
        logits = self.head(self.embed(ids))
        return logits + self.weights[0].pow(2).sum()  # trap: external


def build():
    return Net()


def step(engine, ids):
    loss = engine(ids).logsumexp(-1).mean()
    engine.backward(loss)
    engine.step()
