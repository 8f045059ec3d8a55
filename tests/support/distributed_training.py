"""Train in several processes, and run the same training in one process."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hotrow
from hotrow import HotrowError
from hotrow.distributed import replicate, shard
from tests.support.ranks import mesh_of_all

WORLD_SIZES = 1, 2, 3, 4
STEPS, BATCH_SIZE = 7, 11
OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "AdamW": {"lr": 0.05, "weight_decay": 0.1},  # like momentum, weight decay updates idle rows
    "Adam": {"lr": 0.05, "amsgrad": True},
    "Adagrad": {"lr": 0.1},
    "RMSprop": {"lr": 0.01, "weight_decay": 0.1},  # torch's dense step trains these tables
}


class Fields(nn.Module):
    """A model with tables of uneven sizes (one smaller than most world sizes) and weighted bags."""

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


def converted_model(dtype=torch.float32, dense=False):
    """Return a model that is the same on every rank; `dense` makes its linear layer trainable."""
    torch.manual_seed(3)
    model = hotrow.convert(Fields(dtype))
    model.layer.requires_grad_(dense)
    return model


def make_batch(t, dtype=torch.float32):
    """Return the inputs and output gradient of step t. Some ranks get no ids in some batches."""
    torch.manual_seed(100 + t)
    size = BATCH_SIZE if t % 3 else 2
    ids = [torch.randint(n, (size,)) for n in (101, 2, 17)]
    ids.append(torch.randint(29, (size, 3)))
    return [*ids, torch.rand(size, 3, dtype=dtype)], torch.randn(size, 2, dtype=dtype)


def rank_batch(batch, count, rank):
    """Return a rank's part of a batch; the first ranks may get one extra example."""
    inputs, gradient = batch
    return [each.tensor_split(count)[rank] for each in inputs], gradient.tensor_split(count)[rank]


def backward(model, batch, count):
    """Run the backward pass of a loss whose mean over all ranks is the loss of the whole batch."""
    inputs, gradient = batch
    (model(*inputs) * (gradient * count)).sum().backward()


def trainable_parameters(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def make_optimizer(name, model):
    return getattr(hotrow.optim, name)(trainable_parameters(model), **OPTIMIZERS[name])


def train_rank(model, optimizer, count, rank, steps, dtype=torch.float32):
    """Run the training steps of one rank."""
    for t in steps:
        optimizer.zero_grad()
        backward(model, rank_batch(make_batch(t, dtype), count, rank), count)
        optimizer.step()


def train_single_process(model, optimizer, count, steps, dtype=torch.float32):
    """Train in one process: run each rank's batch in turn, and add up the gradients."""
    for t in steps:
        totals = None
        for rank in range(count):
            optimizer.zero_grad()
            backward(model, rank_batch(make_batch(t, dtype), count, rank), count)
            gradients = [each.grad.div_(count) for each in trainable_parameters(model)]
            if totals is None:
                totals = gradients
            else:
                totals = [a.add_(b) for a, b in zip(totals, gradients, strict=True)]
        for parameter, gradient in zip(trainable_parameters(model), totals, strict=True):
            parameter.grad = gradient
        optimizer.step()


def distribute(model, method, count):
    """Shard or replicate the model over all ranks."""
    return {"shard": shard, "replicate": replicate}[method](model, mesh_of_all(count))


def dense_model(dense=True):
    """Return the model from `converted_model`, but with dense gradients for its embeddings."""
    model = converted_model(dense=dense)
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.weight = nn.Parameter(module.weight.detach().clone())
    return model


def train_whole_batches(dtype):
    """Train with torch on whole batches and dense gradients in one process."""
    model = dense_model().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZERS["AdamW"])
    for t in range(STEPS):
        optimizer.zero_grad()
        backward(model, make_batch(t, dtype), 1)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def train_with_ddp(method, count):
    """Train the tables with hotrow and the linear layer with DDP, and clip gradients."""
    rank = dist.get_rank()
    model = distribute(converted_model(dense=True), method, count)
    ddp_model = DistributedDataParallel(model)
    optimizer = make_optimizer("AdamW", model)
    for t in range(STEPS):
        optimizer.zero_grad()
        backward(ddp_model, rank_batch(make_batch(t), count, rank), count)
        nn.utils.clip_grad_norm_(ddp_model.parameters(), 1.0)
        optimizer.step()
    return state_values(model, optimizer)


def error_text(function, *arguments, error_type=HotrowError):
    """Return the message of the error that `function(*arguments)` raises."""
    try:
        function(*arguments)
    except error_type as error:
        return str(error)
    return None


def state_values(model, optimizer):
    """Return every parameter and its optimizer state, with all rows, on every rank."""
    from torch.distributed.tensor import DTensor

    def full_tensor(value):
        if isinstance(value, DTensor):
            value = value.full_tensor()
        return torch.as_tensor(value).detach().clone()

    values = {name: full_tensor(value) for name, value in model.state_dict().items()}
    for i, state in optimizer.state_dict()["state"].items():
        values |= {f"{i}.{name}": full_tensor(value) for name, value in state.items()}
    return copy.deepcopy(values)
