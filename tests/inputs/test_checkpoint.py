"""Errors while a .pt file is read do not affect the next file."""

import zipfile

import torch

from hotrow import HotrowError
from hotrow.inputs.checkpoint import load_checkpoint


def test_sparse_tensors_of_a_damaged_file_are_not_checked_again(tmp_path):
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 3]]), torch.tensor([1.0, 2.0]), (4,))
    good, damaged = tmp_path / "good.pt", tmp_path / "damaged.pt"
    torch.save([sparse, torch.arange(3, dtype=torch.int32)], good)
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(damaged, "w") as target:
        for name in source.namelist():  # the last tensor comes after the sparse tensor
            target.writestr(name, source.read(name).replace(b"IntStorage", b"XntStorage"))
    for path, is_good in ((damaged, False), (good, True)):
        try:
            with path.open("rb") as file:
                loaded = load_checkpoint(file, path)
        except HotrowError:
            assert not is_good
        else:
            assert is_good
            assert torch.equal(loaded[0].to_dense(), sparse.to_dense())
        assert not torch._utils._sparse_tensors_to_validate
