"""Sparse tensors of damaged .pt files are refused, and do not affect the next file."""

import io
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.serialization import config

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


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
@pytest.mark.parametrize(
    ("compressed", "plain"),
    [
        ([0, 2, 0, 0], []),
        ([0, 5, 5, 2], [0, 1]),
        ([0, -1, 2, 2], [0, 1]),
        ([0, 2**40, 2, 2], [0, 1]),
    ],
)
def test_indices_that_torch_would_read_out_of_bounds_are_refused(layout, compressed, plain):
    """torch's own check crashes, or reads other memory."""
    values = torch.zeros(len(plain))
    damaged = torch.sparse_compressed_tensor(
        torch.tensor(compressed),
        torch.tensor(plain, dtype=torch.int64),
        values,
        (3, 3),
        layout=layout,
        check_invariants=False,
    )
    file = io.BytesIO()
    torch.save({"a": [damaged]}, file)
    with pytest.raises(HotrowError, match="it has a sparse tensor with invalid indices"):
        load_checkpoint(file, "x.pt")


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(("is_enabled", "threads"), [(False, 3), (True, 1)])
def test_loads_leave_torchs_setting_unchanged(is_enabled, threads):
    # If the setting is on, creating sparse tensors in several threads may switch it off in torch.
    file = io.BytesIO()
    torch.save([torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), list(range(100))], file)
    setting = torch.sparse.check_sparse_tensor_invariants
    with setting(is_enabled), ThreadPoolExecutor(threads) as pool:
        copies = [io.BytesIO(file.getvalue()) for _ in range(300)]
        for loaded in pool.map(load_checkpoint, copies, [f"{i}.pt" for i in range(300)]):
            assert torch.equal(loaded[0].to_dense(), torch.eye(3))
        assert setting.is_enabled() == is_enabled


def test_torchs_option_to_map_files_has_no_effect():
    file = io.BytesIO()
    torch.save(torch.eye(3), file)
    with config.patch("load.mmap", True):
        assert torch.equal(load_checkpoint(file, "x.pt"), torch.eye(3))


def test_a_sparse_tensor_with_an_index_outside_its_size_is_refused():
    damaged = torch.sparse_coo_tensor([[9]], [1.0], (4,), check_invariants=False)
    file = io.BytesIO()
    torch.save((damaged,), file)
    with pytest.raises(HotrowError, match="size is inconsistent with indices"):
        load_checkpoint(file, "x.pt")
    assert not torch._utils._sparse_tensors_to_validate


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_with_empty_blocks_is_refused():
    """torch's operations divide by the size of a block."""
    indices, values = (torch.tensor([0, 1]), torch.tensor([0])), torch.zeros(1, 2, 0)
    damaged = torch.sparse_compressed_tensor(
        *indices, values, (2, 2), layout=torch.sparse_bsr, check_invariants=False
    )
    file = io.BytesIO()
    torch.save(damaged, file)
    with pytest.raises(HotrowError, match="a sparse tensor whose blocks are empty"):
        load_checkpoint(file, "x.pt")


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_hybrid_tensor_without_values_is_read():
    sparse = torch.eye(4).unsqueeze(-1).expand(4, 4, 2)[..., :0].to_sparse_csr(dense_dim=1)
    file = io.BytesIO()
    torch.save(sparse, file)
    assert load_checkpoint(file, "x.pt").shape == (4, 4, 0)


def test_a_full_gpu_is_an_error(monkeypatch):
    def fail(storage, location):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("hotrow.inputs.checkpoint.default_restore_location", fail)
    file = io.BytesIO()
    torch.save(torch.eye(2), file)
    with pytest.raises(HotrowError, match="CUDA out of memory"):
        load_checkpoint(file, "x.pt")


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["csr", "csc", "bsr"])
def test_a_batch_of_matrices_without_values_is_read(layout):
    arguments = [(2, 2)] if layout == "bsr" else []
    sparse = getattr(torch.zeros(3, 4, 4), f"to_sparse_{layout}")(*arguments)
    file = io.BytesIO()
    torch.save(sparse, file)
    assert repr(load_checkpoint(file, "x.pt")) == repr(sparse)


@pytest.mark.parametrize("dtypes", [(torch.complex64, torch.float32), (torch.int64, torch.float64)])
def test_tensors_that_share_an_empty_storage_keep_their_dtypes(dtypes):
    first = torch.zeros(0, 2, dtype=dtypes[0])
    second = first.view(dtypes[1]).requires_grad_()
    contents = {"first": first, "second": second, "third": first}
    file = io.BytesIO()
    torch.save(contents, file)
    loaded = load_checkpoint(file, "x.pt")
    assert [each.dtype for each in loaded.values()] == [*dtypes, dtypes[0]]
    assert [each.shape for each in loaded.values()] == [each.shape for each in contents.values()]


def test_a_quantized_tensor_is_refused():
    """A damaged one may crash torch."""
    source, file = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(4, dtype=torch.int8), source)
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(file, "w") as target:
        for name in archive.namelist():
            content = archive.read(name).replace(b"CharStorage", b"QInt8Storage")
            target.writestr(name, content)
    with pytest.raises(HotrowError, match=r"contains a torch\.QInt8Storage"):
        load_checkpoint(file, "x.pt")
