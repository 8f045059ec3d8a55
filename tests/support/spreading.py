"""Models of many processes, their batches, and the one process that they are held against."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hotrow
from hotrow import HotrowError
from hotrow.distributed import replicate, shard
from tests.support.ranks import line

WORLDS = 1, 2, 3, 4
STEPS, BATCH = 7, 11
LATE = {"lr": 0.05, "weight_decay": 0.1}  # decay moves idle rows; Adam's momentum as well
OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "AdamW": LATE,
    "Adam": {"lr": 0.05, "amsgrad": True},
    "Adagrad": {"lr": 0.1},
    "RMSprop": {"lr": 0.01, "weight_decay": 0.1},  # for which a table takes torch's dense step
}


class Fields(nn.Module):
    """Tables of uneven sizes, one smaller than most worlds, and bags with weights; then a layer."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.user = nn.Embedding(101, 6, dtype=dtype)
        self.day = nn.Embedding(2, 3, dtype=dtype)
        self.word = hotrow.Embedding(17, 5, padding_idx=3, dtype=dtype)
        self.bag = hotrow.EmbeddingBag(29, 4, mode="sum", padding_idx=1, dtype=dtype)
        self.layer = nn.Linear(18, 2, dtype=dtype)

    def forward(self, user, day, word, bag, weights):
        x = [self.user(user), self.day(day), self.word(word), self.bag(bag, None, weights)]
        return self.layer(torch.cat(x, -1))


def fields(dtype=torch.float32, dense=False):
    """The same on every rank; `dense`, whether its layer learns as well."""
    torch.manual_seed(3)
    model = hotrow.convert(Fields(dtype))
    model.layer.requires_grad_(dense)
    return model


def batch(t, dtype=torch.float32):
    """The ids of step t, and the gradient of the output; few enough for a rank to have none."""
    torch.manual_seed(100 + t)
    size = BATCH if t % 3 else 2
    ids = [torch.randint(n, (size,)) for n in (101, 2, 17)]
    ids.append(torch.randint(29, (size, 3)))
    return [*ids, torch.rand(size, 3, dtype=dtype)], torch.randn(size, 2, dtype=dtype)


def share(values, count, rank):
    """A rank's part of a batch; the first ranks may have one more."""
    inputs, gradient = values
    return [each.tensor_split(count)[rank] for each in inputs], gradient.tensor_split(count)[rank]


def backward(model, values, count):
    """A loss whose mean over the ranks is the sum of what they have."""
    inputs, gradient = values
    (model(*inputs) * (gradient * count)).sum().backward()


def learning(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def make(name, model):
    return getattr(hotrow.optim, name)(learning(model), **OPTIMIZERS[name])


def train_together(model, optimizer, count, rank, steps, dtype=torch.float32):
    """The steps of one rank."""
    for t in steps:
        optimizer.zero_grad()
        backward(model, share(batch(t, dtype), count, rank), count)
        optimizer.step()


def train_alone(model, optimizer, count, steps, dtype=torch.float32):
    """One process that makes the batch of each rank in turn, and adds up their gradients."""
    for t in steps:
        total = None
        for rank in range(count):
            optimizer.zero_grad()
            backward(model, share(batch(t, dtype), count, rank), count)
            found = [each.grad.div_(count) for each in learning(model)]
            total = (
                found if total is None else [a.add_(b) for a, b in zip(total, found, strict=True)]
            )
        for parameter, gradient in zip(learning(model), total, strict=True):
            parameter.grad = gradient
        optimizer.step()


def spread(model, way, count):
    """The model, sharded or replicated over all ranks."""
    return {"shard": shard, "replicate": replicate}[way](model, line(count))


def plain(dense=True):
    """The same model with dense gradients."""
    model = fields(dense=dense)
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.weight = nn.Parameter(module.weight.detach().clone())
    return model


def whole_batches(dtype):
    """Every batch at once, in one process, by torch and its dense gradients."""
    model = plain().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZERS["AdamW"])
    for t in range(STEPS):
        optimizer.zero_grad()
        backward(model, batch(t, dtype), 1)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def together_with_ddp(way, count):
    """Tables by hotrow, the layer by torch; with clipping."""
    rank = dist.get_rank()
    model = spread(fields(dense=True), way, count)
    trained = DistributedDataParallel(model)
    optimizer = make("AdamW", model)
    for t in range(STEPS):
        optimizer.zero_grad()
        backward(trained, share(batch(t), count, rank), count)
        nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
    return values_of(model, optimizer)


def error_of(function, *arguments):
    """The text of the error that it raises."""
    try:
        function(*arguments)
    except HotrowError as error:
        return str(error)
    return None


def values_of(model, optimizer):
    """Every parameter and all its state, whole; on every rank."""
    from torch.distributed.tensor import DTensor

    def whole(value):
        if isinstance(value, DTensor):
            value = value.full_tensor()
        return torch.as_tensor(value).detach().clone()

    found = {name: whole(value) for name, value in model.state_dict().items()}
    for i, state in optimizer.state_dict()["state"].items():
        found |= {f"{i}.{name}": whole(value) for name, value in state.items()}
    return copy.deepcopy(found)
