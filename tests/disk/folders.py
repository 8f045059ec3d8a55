"""Folders with trained tables, and ways to damage them."""

import json
import os
import zlib

import torch

import hotrow
from hotrow import disk

ROWS, COLUMNS = 700, 5


def train(store, steps):
    """Train some rows of the table, and leave others stale."""
    optimizer = hotrow.optim.Adam(store.layer.parameters(), lr=0.05)
    for t in steps:
        random = torch.Generator().manual_seed(t)
        ids = torch.randint(ROWS, (9,), generator=random)
        optimizer.zero_grad()
        (store.layer(ids) * torch.randn(9, COLUMNS, generator=random)).sum().backward()
        optimizer.step()
    return optimizer


def make_folder(path, steps=4, rest=None):
    """Create a folder with a trained table and its optimizer state."""
    generator = torch.Generator().manual_seed(7)

    def fill(block):
        block.copy_(torch.randn(block.shape, generator=generator))

    with disk.create(path, ROWS, COLUMNS, fill=fill) as store:
        train(store, range(steps))
        store.save(rest)
    return path


def read_values(path, verify=True):
    """Return the rows, the optimizer state and `rest`, read through the public API."""
    with disk.open(path, verify=verify) as store:
        optimizer = hotrow.optim.Adam(store.layer.parameters(), lr=0.05)
        rows = store.layer.weight.detach().clone()
        (state,) = optimizer.state_dict()["state"].values()
        return {"weight": rows, "rest": store.rest} | {
            key: torch.as_tensor(value).clone() for key, value in state.items()
        }


def equal(values, expected):
    """Return whether two results of `read_values` have the same bits."""
    return values.keys() == expected.keys() and all(
        torch.equal(value, expected[key])
        if isinstance(value, torch.Tensor)
        else value == expected[key]
        for key, value in values.items()
    )


def change_record(path, **changes):
    """Change the record of a save, and update its checksum, as an attacker would."""
    record = json.loads((path / "run.json").read_bytes()) | changes
    record.pop("checksum", None)
    checksum = zlib.crc32(json.dumps(record, sort_keys=True).encode())
    (path / "run.json").write_text(json.dumps(record | {"checksum": checksum}))


def snapshot(path):
    """Return the contents of every file below a folder, and the targets of links."""
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            file = os.path.join(folder, name)
            if os.path.islink(file):
                found[file] = os.readlink(file)
            elif os.path.isfile(file):
                with open(file, "rb") as opened:
                    found[file] = opened.read()
    return found
