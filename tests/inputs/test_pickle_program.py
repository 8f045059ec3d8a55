"""A small .pt file can't make torch.load run forever or fill the memory."""

import _codecs
import collections
import io
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hotrow import HotrowError
from hotrow.inputs import checkpoint
from hotrow.inputs.checkpoint import load_checkpoint


class Call:
    """An object whose pickle program calls a function, and then sets a state if there is one."""

    def __init__(self, function: Callable[..., Any], *arguments: object, state: object = None):
        self.function, self.arguments, self.state = function, arguments, state

    def __reduce__(self) -> tuple[object, ...]:
        return self.function, self.arguments, self.state


def loaded(contents: object) -> Any:
    file = io.BytesIO()
    torch.save(contents, file)
    return load_checkpoint(file, "x.pt")


def repeated(*shape: int) -> torch.Tensor:
    """Return a tensor whose elements are all in the same four bytes."""
    return torch.zeros(1).expand(shape)


TEXT, NUMBERS, SIZE, STATE = "a" * 50_000, list(range(10_000)), (1, 2), {"a": 1}
INDICES = torch.nn.Parameter(torch.zeros(1, 10_000)), torch.zeros(10_000), torch.Size([1]), False
REBUILD = torch._utils._rebuild_tensor_v2, torch.ones(1).untyped_storage(), 0
MANY = 1_000_001  # one more than a file may have
PROGRAMS: dict[str, tuple[Callable[[], object], str]] = {
    "set of a tensor": (lambda: Call(set, repeated(2)), "calls builtins.set with arguments"),
    "set of a text": (lambda: Call(set, "ab"), "calls builtins.set with arguments"),
    "Counter of a tensor": (
        lambda: Call(collections.Counter, repeated(2)),
        "calls collections.Counter with arguments",
    ),
    "OrderedDict of a tensor": (
        lambda: Call(collections.OrderedDict, repeated(2, 2)),
        "calls collections.OrderedDict with arguments",
    ),
    "OrderedDict of a list": (
        lambda: Call(collections.OrderedDict, [repeated(2)]),
        "calls collections.OrderedDict with arguments",
    ),
    "Size of a tensor": (lambda: Call(torch.Size, repeated(2)), "calls torch.Size with arguments"),
    "encoding": (
        lambda: Call(_codecs.encode, "a", "punycode"),
        "calls _codecs.encode with arguments",
    ),
    "text encoded often": (
        lambda: [Call(_codecs.encode, TEXT, "latin1") for _ in range(3)],
        "encodes the same text several times",
    ),
    "set made often": (
        lambda: [Call(set, NUMBERS) for _ in range(2)],
        "copies an object several times",
    ),
    "Size made often": (
        lambda: [Call(torch.Size, SIZE) for _ in range(2)],
        "copies an object several times",
    ),
    "Counter made often": (
        lambda: [Call(collections.Counter, STATE) for _ in range(2)],
        "copies an object several times",
    ),
    "Counter of a Counter": (
        lambda: Call(collections.Counter, collections.Counter("a")),
        "calls collections.Counter with arguments",
    ),
    "state set often": (
        lambda: [Call(collections.OrderedDict, state=STATE) for _ in range(2)],
        "copies an object several times",
    ),
    "indices checked often": (
        lambda: [
            Call(torch._utils._rebuild_sparse_tensor, torch.sparse_coo, INDICES)
            for _ in range(1000)
        ],
        "its tensors share their elements too often",
    ),
    "indices in lists": (
        lambda: Call(torch._utils._rebuild_sparse_tensor, torch.sparse_coo, ([[0]], *INDICES[1:])),
        "a sparse tensor that is not made of tensors",
    ),
    "a negative size": (
        lambda: Call(
            torch._utils._rebuild_tensor_v2,
            torch.ones(1).untyped_storage(),
            0,
            (-1,),
            (1,),
            False,
            collections.OrderedDict(),
        ),
        "size is not a tuple of integers",
    ),
    "a size of many numbers": (
        lambda: Call(*REBUILD, (1,) * 100, (1,) * 100, False, collections.OrderedDict()),
        "creates a tensor with large arguments",
    ),
    "a long name in the metadata": (
        lambda: Call(*REBUILD, (1,), (1,), False, collections.OrderedDict(), {"a" * 5000: True}),
        "creates a tensor with large arguments",
    ),
    "a sparse tensor of many dimensions": (
        lambda: Call(
            torch._utils._rebuild_sparse_tensor,
            torch.sparse_coo,
            (torch.nn.Parameter(torch.zeros(100, 0)), torch.zeros(0), (1,) * 100, False),
        ),
        "creates a tensor with large arguments",
    ),
    "many views": (
        lambda: [repeated(MANY - 1 - k) for k in range(17)],
        "its tensors share their elements too often",
    ),
    "storage": (lambda: Call(torch.FloatStorage, 10), "calls torch.FloatStorage"),
    "state of a tensor": (
        lambda: Call(
            torch._utils._rebuild_parameter,
            torch.ones(1),
            False,
            collections.OrderedDict(),
            state={},
        ),
        "sets the state of an object",
    ),
    "repeated elements": (lambda: repeated(MANY), f"has a tensor of {MANY:,} elements"),
    "size that is not a tuple": (
        lambda: Call(
            torch._utils._rebuild_tensor_v2,
            torch.ones(1),
            0,
            [1],
            (1,),
            False,
            collections.OrderedDict(),
        ),
        "calls torch._utils._rebuild_tensor_v2 with arguments",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_torch_save_would_not_write_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, why = PROGRAMS[name]
    contents = make()
    monkeypatch.setattr(checkpoint, "_run_program", lambda *_: pytest.fail("the program runs"))
    with pytest.raises(HotrowError, match=why):
        loaded(contents)


# b"]q\0" creates a list and stores it as object 0, b"h\0" takes object 0, and b"a" appends.
@pytest.mark.parametrize(
    ("program", "why"),
    [
        (b"]q\0\x85h\0K\1a0.", "changes an object that another object contains"),
        (b"]q\0h\0a.", "changes an object that another object contains"),
        (b"]q\0]q\1h\0ah\0h\1a0.", "changes an object that another object contains"),
        (b"})" + b"\x85" * 151 + b"K\1s.", "nested more than 150 levels deep"),
        (b"]" * 152 + b"a" * 151 + b".", "nested more than 150 levels deep"),
        (
            b")q\0" + b"".join(b"h%ch%c\x86q%c" % (k, k, k + 1) for k in range(40)) + b".",
            "has more than [0-9,]+ objects",
        ),
    ],
)
def test_a_program_that_would_nest_objects_without_limit_is_refused(
    program: bytes, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("the program runs"))
    with pytest.raises(HotrowError, match=why):
        load_checkpoint(file_with(b"\x80\2" + program), "x.pt")


def file_with(program: bytes) -> io.BytesIO:
    """Return a file with this program, and with a storage of 12 bytes."""
    file = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(file)
    for name, record in {"data.pkl": program, "byteorder": b"little", "data/0": bytes(12)}.items():
        writer.write_record(name, record, len(record))
    writer.write_end_of_file()
    return file


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


@pytest.mark.parametrize(
    ("kind", "key", "count", "why"),
    [
        (b"torch\nFloatStorage", text("0"), 3, None),
        (b"torch.storage\nUntypedStorage", text("0"), 12, None),
        (b"torch\nFloatStorage", text("0"), 4, "no storage of 16 bytes with the key '0'"),
        (b"torch\nDoubleStorage", text("0"), 3, "no storage of 24 bytes with the key '0'"),
        (b"torch\nFloatStorage", text("0\0"), 3, r"no storage of 12 bytes with the key '0\\x00'"),
        (b"torch\nFloatStorage", text("1"), 3, "no storage of 12 bytes with the key '1'"),
        (b"torch\nFloatStorage", b"K\0", 3, "a storage that torch.save does not write"),
        (b"torch\nfloat32", text("0"), 3, "is not recognized"),
    ],
)
def test_a_storage_must_have_a_record_of_its_size(
    kind: bytes, key: bytes, count: int, why: str | None
) -> None:
    id = b"(" + text("storage") + b"c" + kind + b"\n" + key + text("cpu") + b"K%ct" % count
    file = file_with(b"\x80\2" + id + b"Q.")
    if why is None:
        load_checkpoint(file, "x.pt")
    else:
        with pytest.raises(HotrowError, match=why):
            load_checkpoint(file, "x.pt")


@pytest.mark.filterwarnings("ignore:Sparse")
def test_compressed_sparse_tensors_are_read() -> None:
    blocks, columns = torch.eye(4).to_sparse_bsr((2, 2)), torch.zeros(4, 4).to_sparse_csc()
    assert repr(loaded([blocks, columns])) == repr([blocks, columns])


@pytest.mark.parametrize("device", ["meta", "a" * 1000, "cpu\0", "cuda:x"])
def test_a_storage_on_an_unusual_device_is_refused(device: str) -> None:
    id = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text(device) + b"K\3t"
    with pytest.raises(HotrowError, match="a storage on the device"):
        load_checkpoint(file_with(b"\x80\2" + id + b"Q."), "x.pt")


def test_repeated_indices_of_a_sparse_tensor_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads all indices of a sparse tensor to check them."""
    indices = torch.zeros(1, 1, dtype=torch.int64).expand(1, MANY)
    sparse = torch.sparse_coo_tensor(indices, torch.ones(1).expand(MANY), (1,))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("the program runs"))
    with pytest.raises(HotrowError, match=rf"has a tensor of {MANY:,} elements"):
        loaded(sparse)


@pytest.mark.parametrize(
    "contents",
    [
        [{1, 2, "a"}, set(), collections.Counter("abca"), collections.OrderedDict(a=1), {}],
        [torch.Size([2, 3]), torch.float32, torch.device("cpu"), torch.device("cuda", 1)],
        [3 + 4j, b"\x00\xff" * 1000, 2**127, -(2**200), 1.5, None, True, (), ((1,), [2])],
        [torch.eye(3).to_sparse(), torch.nn.Parameter(torch.ones(2))],
        [torch.zeros(3, dtype=torch.uint16), torch.ones(3, dtype=torch.complex64).conj()],
        {(k, k + 1): k / 2 for k in range(50_000)},
        torch.nn.Parameter(torch.eye(3).to_sparse()),
        {k / 2: 2**70 + k for k in range(40_000)} | {2**61 + k: k for k in range(40_000)},
        {str(k).encode(): -k for k in range(1, 40_000)},
        torch.nn.BatchNorm1d(3).state_dict(),
        torch.sparse_coo_tensor([[5], [7]], [1.0], (2000, 1000), check_invariants=True),
        [bytes([97]), bytes([97, 98]), bytes([97])],
    ],
    ids=lambda contents: type(contents[0] if isinstance(contents, list) else contents).__name__,
)
def test_a_file_of_torch_save_is_read(contents: object) -> None:
    assert repr(loaded(contents)) == repr(contents)
