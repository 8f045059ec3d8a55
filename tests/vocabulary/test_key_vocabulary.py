"""Test vocabularies of keys: equality with dense training, unknown keys, eviction, and files."""

import copy
import io
import json
import pickle
import random
import re
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from torch import nn

import hotrow
from hotrow import HotrowError, vocabulary
from hotrow.table.parameter import Table
from hotrow.vocabulary import Vocabulary
from tests.support.tolerance import assert_same_bits
from tests.support.vocabularies import COLUMNS, DenseRun, TableRun, assert_no_worse

# Rows that no batch has touched must not change, so these optimizers have no weight decay. ASGD is
# missing because it always decays rows.
STILL = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": 0.1},
    "AdamW": {"lr": 0.1, "weight_decay": 0.0},
    "Adamax": {"lr": 0.1},
    "NAdam": {"lr": 0.1},
    "RAdam": {"lr": 0.1},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.1},
    "Adadelta": {"lr": 0.1},
    "RMSprop": {"lr": 0.01, "centered": True, "momentum": 0.5},
}
KEYS = {
    str: lambda numbers: [f"key {number}" for number in numbers],
    int: lambda numbers: [number * 7_919 - 10**12 for number in numbers],
}


def table_layer(rows, columns=2):
    return hotrow.convert(nn.Embedding(rows, columns), min_entries=0)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
@pytest.mark.parametrize("key_type", [str, int])
def test_a_copy_of_a_vocabulary_grows_without_the_original(key_type, copy_of):
    words = Vocabulary(table_layer(1), key_type=key_type, unknown="row")
    keys = KEYS[key_type](range(3))
    words.admit(keys[:2])
    copied = copy_of(words)
    assert copied.admit(keys).tolist() == [1, 2, 3]
    assert copied.keys() == keys
    assert words.keys() == keys[:2]
    assert words.look_up(keys).tolist() == [1, 2, 0]


@pytest.mark.parametrize("key_type", [str, int])
@pytest.mark.parametrize("name", STILL)
def test_a_growing_vocabulary_trains_like_all_rows_from_the_start(name, key_type):
    generator = torch.Generator().manual_seed(0)
    stream = [torch.randint(3 * t + 4, (6,), generator=generator).tolist() for t in range(12)]
    final = list(dict.fromkeys(key for batch in stream for key in batch))
    weights = torch.randn(len(final), COLUMNS, generator=generator)
    growing = TableRun(name, STILL[name], weights[:0])
    rows_left = iter(weights)
    words = Vocabulary(
        growing.layer,
        growing.optimizer,
        key_type=key_type,
        init=lambda rows: rows.copy_(torch.stack([next(rows_left) for _ in rows])),
    )
    dense = [DenseRun(name, STILL[name], weights, each) for each in (torch.float32, torch.float64)]
    rows_at = []
    for batch in stream:
        ids, factors = words.admit(KEYS[key_type](batch)), torch.randn(6, 3, generator=generator)
        assert ids.tolist() == [final.index(key) for key in batch]
        for run in (growing, *dense):
            run.step(ids, factors)
        rows_at.append(len(words))
    assert rows_at[0] < rows_at[5] < rows_at[-1] == len(final)
    assert words.keys() == KEYS[key_type](final)
    assert growing.lag.ledger.length == len(stream)  # growing never restarted the ledger
    assert_no_worse(growing.weights, *(run.weights for run in dense))


@pytest.mark.parametrize("key_type", [str, int])
def test_unknown_keys(key_type):
    a, b, c, d = KEYS[key_type](range(4))
    strict = Vocabulary(table_layer(2), keys=[a, b], key_type=key_type)
    assert strict.look_up([b, a, b]).tolist() == [1, 0, 1]
    with pytest.raises(HotrowError, match=re.escape(f"keys[1] is {c!r}, which has no row")):
        strict.look_up([a, c])
    first = Vocabulary(table_layer(3), keys=[a, b], key_type=key_type, unknown="row")
    assert first.look_up([c, b, d]).tolist() == [0, 2, 0]
    layer = table_layer(34)
    hashed = Vocabulary(layer, keys=[a, b], key_type=key_type, unknown="hash", unknown_rows=32)
    ids = hashed.look_up([a, *KEYS[key_type](range(2, 300))])
    assert ids[0] == 32
    assert ids[1:].max() < 32
    assert len(ids[1:].unique()) == 32
    assert layer.num_embeddings == 34
    assert a in hashed
    assert c not in hashed


def test_hashes_are_the_same_on_every_machine():
    words = Vocabulary(table_layer(1000), unknown="hash", unknown_rows=1000)
    assert words.look_up(["cat", "猫", ""]).tolist() == [832, 304, 0]
    numbers = Vocabulary(table_layer(1000), key_type=int, unknown="hash", unknown_rows=1000)
    assert numbers.look_up([1, -1, 2**62]).tolist() == [884, 763, 912]


@pytest.mark.parametrize("key_type", [str, int])
def test_a_key_gets_a_row_after_enough_occurrences(key_type):
    layer = table_layer(1)
    words = Vocabulary(layer, key_type=key_type, unknown="row", admit_after=3)
    a, b, c = KEYS[key_type](range(3))
    assert words.admit([a, b, a]).tolist() == [0, 0, 0]
    assert words.look_up([a]).tolist() == [0]  # a lookup doesn't count as an occurrence
    assert words.admit([c, a, b]).tolist() == [0, 1, 0]
    assert layer.num_embeddings == 2
    assert words.admit([b, b, c]).tolist() == [2, 2, 0]
    assert words.keys() == [a, b]
    never = Vocabulary(table_layer(1), key_type=key_type, unknown="row", admit_after=0)
    assert never.admit([a, a, a]).tolist() == [0, 0, 0]
    with pytest.raises(HotrowError, match=r"admit_after is \d+, but .*: to give no new key a "):
        Vocabulary(layer, key_type=key_type, unknown="row", admit_after=2**62)


@pytest.mark.parametrize("method", [lambda words: words.admit(["b"]), lambda words: words.evict(1)])
def test_init_cannot_change_the_vocabulary(method):
    layer = table_layer(1)
    words = Vocabulary(layer, unknown="row", init=lambda rows: method(words))
    with pytest.raises(HotrowError, match="already changing, so init can't change it too"):
        words.admit(["a"])
    assert layer.num_embeddings == len(words) == 1
    assert words.keys() == []


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads it
def test_compiled_code_of_a_converted_model_may_look_up_keys():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Embedding(3, 4)
            self.words = None

        def forward(self, keys):
            return self.layer(self.words.look_up(keys)).sum() + ("a" in self.words)

    model = hotrow.convert(Model(), min_entries=0)
    model.words = Vocabulary(model.layer, keys=["a", "b"], unknown="row")
    compiled = torch.compile(model, backend="eager")
    for batch in (["a", "b"], ["a", "c"], ["b", "b"]):
        assert torch.equal(compiled(batch), model(batch))


def test_compiled_code_may_admit_keys():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = table_layer(1)
            self.optimizer = hotrow.optim.Adam(self.layer.parameters(), lr=0.1)
            self.words = Vocabulary(self.layer, self.optimizer, unknown="row")
            self.words.admit(["a"])

        def forward(self, keys):
            return self.layer(self.words.admit(keys))

    models = Model(), Model()
    models[1].load_state_dict(models[0].state_dict())
    calls = torch.compile(models[0], backend="eager"), models[1]
    for i in range(8):
        batch = [f"{(i * 3 + j) % 11}" for j in range(4)]
        results = []
        for model, call in zip(models, calls, strict=True):
            torch.manual_seed(i)
            results.append(call(batch))
            results[-1].sum().backward()
            model.optimizer.step()
            model.optimizer.zero_grad()
        assert_same_bits(*results)
    assert models[0].words.keys() == models[1].words.keys()


@pytest.mark.parametrize("by", ["idle", "count"])
def test_eviction(by):
    layer, bias = table_layer(1), table_layer(1, 1)
    optimizer = hotrow.optim.AdamW([layer.weight, bias.weight])
    words = Vocabulary([layer, bias], optimizer, unknown="row")
    for batch in (["a", "b", "a", "a"], ["c", "b"], ["d"], ["e", "c"], ["d"]):
        ids = words.admit(batch)
        optimizer.zero_grad()
        (layer(ids).sum() + bias(ids).sum()).backward()
        optimizer.step()
    assert words.counts.tolist() == [0, 3, 2, 2, 2, 1]
    assert words.idle_batches.tolist() == [5, 4, 3, 1, 0, 1]
    vocabulary.freeze(layer, words.look_up(["a"]))  # must stay
    before, state = layer.weight.data.clone(), optimizer.state[layer.weight]["exp_avg"].clone()
    assert words.evict(20).tolist() == list(range(6))
    remap = words.evict(4, by=by)
    kept = ["a", "c", "d"]
    if by == "idle":  # drops b, then c: e has been idle as long as c, but is newer
        kept = ["a", "d", "e"]
    assert words.keys() == kept
    old_ids = [0, *(["a", "b", "c", "d", "e"].index(key) + 1 for key in kept)]
    assert remap[old_ids].tolist() == [0, 1, 2, 3]
    assert (remap >= 0).sum() == 4
    assert words.look_up([*kept, "b"]).tolist() == [1, 2, 3, 0]
    assert layer.weight.shape == (4, 2)
    assert bias.weight.shape == (4, 1)
    assert_same_bits(layer.weight.data, before[old_ids])
    assert_same_bits(optimizer.state[layer.weight]["exp_avg"], state[old_ids])
    assert words.counts.tolist() == [[0, 3, 2, 2, 2, 1][row] for row in old_ids]
    assert words.admit(["f", "a"]).tolist() == [4, 1]
    with pytest.raises(HotrowError, match="rows is 1, but 2 rows must stay"):
        words.evict(1)
    assert len(words) == 5


@pytest.mark.parametrize("rows", [2, 6])
@pytest.mark.parametrize("is_table", [True, False])
def test_rows_that_other_code_has_added_or_dropped_are_an_error(is_table, rows):
    layer = table_layer(4) if is_table else nn.Embedding(4, 2)
    assert isinstance(layer.weight, Table) == is_table
    words = Vocabulary(layer, keys=["a", "b", "c", "d"])
    vocabulary.resize(layer, rows)
    before = layer.weight.detach().clone()
    message = re.escape(
        f"the layer has {rows} rows, but the vocabulary has 4: change the rows of the layer only "
        "with the vocabulary"
    )
    for change in (lambda: words.admit(["a", "e"]), lambda: words.evict(3)):
        with pytest.raises(HotrowError, match=message):
            change()
        assert_same_bits(layer.weight.detach(), before)
        assert words.keys() == ["a", "b", "c", "d"]
        assert words.counts.tolist() == [0] * 4
    assert words.admit(["b", "a"]).tolist() == [1, 0]  # needs no change
    vocabulary.resize(layer, 4)
    assert words.admit(["a", "e"]).tolist() == [0, 4]


def test_a_padding_row_that_the_vocabulary_does_not_know_is_an_error():
    layer = table_layer(2)
    assert isinstance(layer.weight, Table)
    words = Vocabulary(layer, keys=["a", "b"])
    vocabulary.resize(layer, 4)
    layer.padding_idx = 3
    with pytest.raises(HotrowError, match="the layer has 4 rows, but the vocabulary has 2"):
        words.evict(1)


def test_many_growths():
    layer = table_layer(1)
    words = Vocabulary(layer, key_type=int, unknown="row")
    for begin in range(0, 3000, 30):
        ids = words.admit(torch.arange(begin, begin + 60).reshape(2, 30))
        assert ids.tolist() == (torch.arange(begin, begin + 60).reshape(2, 30) + 1).tolist()
    assert words.look_up(np.arange(3030)).tolist() == list(range(1, 3031))
    assert layer.num_embeddings == len(words) == 3031
    assert words.counts.sum() == 6000


def trained(key_type):
    layer = table_layer(1)
    optimizer = hotrow.optim.AdamW(layer.parameters())
    words = Vocabulary(layer, optimizer, key_type=key_type, unknown="row", admit_after=2)
    for _ in range(3):
        ids = words.admit(KEYS[key_type]([1, 2, 1, 3, 3]))
        layer(ids).sum().backward()
        optimizer.step()
    words.admit(KEYS[key_type]([9]))
    return words, layer, optimizer


@pytest.mark.parametrize("key_type", [str, int])
def test_saving_and_loading_continues_the_run(key_type, tmp_path):
    words, layer, optimizer = trained(key_type)
    if key_type is str:
        words.admit(["猫", "猫", "", "", "\ud800", "\ud800"])
    words.save(tmp_path / "words.safetensors")
    other = table_layer(1)
    other_optimizer = hotrow.optim.AdamW(other.parameters())
    loaded = Vocabulary.load(tmp_path / "words.safetensors", other, other_optimizer)
    other.load_state_dict(layer.state_dict())
    other_optimizer.load_state_dict(optimizer.state_dict())
    assert isinstance(other.weight, Table)
    assert loaded.keys() == words.keys()
    new = KEYS[key_type]([9, 4, 4])
    assert loaded.admit(new).tolist() == words.admit(new).tolist()
    assert len(loaded) == len(words) == other.num_embeddings
    for name in ("counts", "idle_batches"):
        assert getattr(loaded, name).tolist() == getattr(words, name).tolist()


def rewrite(path, change_header=None, change_data=None):
    """Change the header or the data of a safetensors file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])
    if change_header:
        change_header(header)
    if change_data:
        change_data(header, data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def set_option(name, value):
    def change(header):
        options = json.loads(header["__metadata__"]["hotrow.vocabulary"])
        options[name] = value
        header["__metadata__"]["hotrow.vocabulary"] = json.dumps(options)

    return change


def set_number(tensor, value):
    def change(header, data):
        begin = header[tensor]["data_offsets"][0]
        data[begin : begin + 8] = struct.pack("<q", value)

    return change


DAMAGE = [
    (str, lambda path: path.write_bytes(b"hello"), "SafetensorError"),
    (str, lambda path: path.unlink(), "cannot be read (No such file"),
    (str, lambda path: path.write_bytes(path.read_bytes()[:-1]), "SafetensorError"),
    (str, lambda path: rewrite(path, lambda h: h.pop("__metadata__")), "KeyError"),
    (str, lambda path: rewrite(path, set_option("version", 2)), "its version is 2"),
    (str, lambda path: rewrite(path, set_option("unknown_rows", -1)), "unknown_rows is -1"),
    (str, lambda path: rewrite(path, set_option("unknown_rows", 2)), "seen has shape"),
    (str, lambda path: rewrite(path, set_option("unknown", "x")), "its checksum is wrong"),
    (
        str,
        lambda path: path.write_bytes(path.read_bytes().replace(b"checksum", b"cheCksum")),
        "KeyError: 'checksum'",
    ),
    (str, lambda path: rewrite(path, None, set_number("keys.ends", 99)), "string positions of"),
    (str, lambda path: rewrite(path, None, set_number("keys.ends", -3)), "string positions of"),
    (int, lambda path: rewrite(path, None, set_number("seen", -1)), "seen has values outside"),
    (int, lambda path: rewrite(path, None, set_number("seen", 2**62)), "seen has values outside"),
    (str, lambda path: rewrite(path, set_option("batch_count", 0)), "after the last batch"),
    (int, lambda path: rewrite(path, None, set_number("keys", KEYS[int]([3])[0])), "is repeated"),
    (int, lambda path: rewrite(path, lambda h: h.update(x=h.pop("keys"))), "no array 'keys'"),
    (int, lambda path: rewrite(path, lambda h: h["seen"].update(dtype="F64")), "float64"),
]


@pytest.mark.parametrize(("key_type", "damage", "message"), DAMAGE)
def test_a_damaged_file_changes_nothing(key_type, damage, message, tmp_path):
    words, _, _ = trained(key_type)
    path = tmp_path / "words.safetensors"
    words.save(path)
    damage(path)
    other = table_layer(1)
    with pytest.raises(HotrowError, match=re.escape(message)):
        Vocabulary.load(path, other)
    assert other.num_embeddings == 1


@pytest.mark.parametrize("key_type", [str, int])
def test_no_flipped_bit_changes_what_is_loaded(key_type, tmp_path):
    words, _, _ = trained(key_type)
    path = tmp_path / "words.safetensors"
    words.save(path)
    data, error_count = path.read_bytes(), 0
    for place in random.Random(0).sample(range(8 * len(data)), 200):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            loaded = Vocabulary.load(path, table_layer(1))
        except HotrowError:
            error_count += 1
        else:
            assert_same_state(loaded, words)
    assert error_count > 190


def test_options_of_numpy_are_saved(tmp_path):
    words = Vocabulary(table_layer(3), unknown=np.str_("hash"), unknown_rows=np.int64(3))
    words.save(tmp_path / "words.safetensors")
    assert_same_state(Vocabulary.load(words.state_dict(), table_layer(1)), words)


def assert_same_state(found, expected):
    assert found.keys() == expected.keys()
    assert found.state_dict().keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert np.array_equal(found.state_dict()[name], value)


def add_hole(path, name, dtype, shape):
    """Add or replace an array whose values are a hole at the end of the file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    values = {}
    for key in [key for key in header if key != "__metadata__"]:  # drop the replaced array
        begin, end = header.pop(key)["data_offsets"] if key == name else (0, 0)
        if key != name:
            begin, end = header[key]["data_offsets"]
            values[key] = data[begin:end]
    offset = 0
    for key, value in values.items():
        header[key]["data_offsets"] = [offset, offset := offset + len(value)]
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    code = {"u1": "U8", "i8": "I64"}[np.dtype(dtype).str[1:]]
    header[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, offset + size]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(values.values()))
        file.truncate(file.tell() + size)


def peak_bytes(call):
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_other_arrays_in_the_file_are_not_read(tmp_path):
    words, _, _ = trained(str)
    path = tmp_path / "words.safetensors"
    words.save(path)
    add_hole(path, "other", np.uint8, [1 << 25])
    assert peak_bytes(lambda: Vocabulary.load(path, table_layer(1))) < 1 << 24


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "message"),
    [
        ("seen", np.int64, [2, 1 << 21], f"seen has shape (2, {1 << 21}) for 3 keys"),
        ("pending_counts", np.int64, [1 << 22], "have different lengths"),
        ("keys.bytes", np.uint8, [1 << 25], "string positions of keys are invalid"),
    ],
)
def test_the_sizes_are_checked_before_the_arrays_are_read(name, dtype, shape, message, tmp_path):
    words, _, _ = trained(str)
    path = tmp_path / "words.safetensors"
    words.save(path)
    add_hole(path, name, dtype, shape)

    def load():
        with pytest.raises(HotrowError, match=re.escape(message)):
            Vocabulary.load(path, table_layer(1))

    assert peak_bytes(load) < 1 << 24


def test_a_large_sparse_file_is_rejected(tmp_path):
    words, _, _ = trained(int)
    path = tmp_path / "words.safetensors"
    words.save(path)
    add_hole(path, "seen", np.int64, [2, 1 << 24])
    if not 0 < path.stat().st_blocks < 1000:
        pytest.skip("this file system has no sparse files")
    with pytest.raises(HotrowError, match=r"sparse file: only .* of its 268,\d+,\d+ bytes are"):
        Vocabulary.load(path, table_layer(1))


@pytest.mark.parametrize("key_type", [str, int])
def test_a_state_dict_continues_the_run(key_type):
    words, layer, optimizer = trained(key_type)
    buffer = io.BytesIO()
    torch.save(words.state_dict(), buffer)
    buffer.seek(0)
    other = table_layer(1)
    other_optimizer = hotrow.optim.AdamW(other.parameters())
    loaded = Vocabulary.load(torch.load(buffer, weights_only=True), other, other_optimizer)
    other.load_state_dict(layer.state_dict())
    other_optimizer.load_state_dict(optimizer.state_dict())
    for each in (words, loaded):
        each.admit(KEYS[key_type]([9, 4, 4, 2, 2]))  # key 9 has been seen once before
        each.evict(4)
    assert_same_state(loaded, words)


def test_a_state_dict_does_not_change_with_the_vocabulary():
    words, _, _ = trained(int)
    state = words.state_dict()
    before = {name: copy.deepcopy(value) for name, value in state.items()}
    loaded = Vocabulary.load(state, table_layer(1))
    for each in (words, loaded):
        each.admit(KEYS[int]([1, 5, 5, 9]))
        each.evict(2)
    for name, value in before.items():
        assert np.array_equal(state[name], value)


STATE_DAMAGE = {
    "KeyError: 'seen'": lambda state: state.pop("seen"),
    "its version is 3": lambda state: state.update(version=3),
    "unknown is 'x'": lambda state: state.update(unknown="x"),
    "unknown_rows is '1'": lambda state: state.update(unknown_rows="1"),
    "keys is not a list of strings": lambda state: state["keys"].append(3),
    "seen has shape (2, 3) for 3 keys": lambda state: state.update(seen=state["seen"][:, 1:]),
    "an array is 2-D float32": lambda state: state.update(seen=state["seen"].float()),
    "an array is a list": lambda state: state.update(seen=[]),
    "a key is repeated": lambda state: state["keys"].__setitem__(0, state["keys"][1]),
    "after the last batch": lambda state: state.update(batch_count=0),
}


@pytest.mark.parametrize("message", STATE_DAMAGE)
def test_a_damaged_state_dict_changes_nothing(message):
    state = trained(str)[0].state_dict()
    STATE_DAMAGE[message](state)
    layer = table_layer(1)
    with pytest.raises(HotrowError, match=re.escape(message)):
        Vocabulary.load(state, layer)
    assert layer.num_embeddings == 1


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    words, _, _ = trained(str)
    path = tmp_path / "words.safetensors"
    words.save(path)
    before = path.read_bytes()

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    words.admit(["new", "new"])
    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(HotrowError, match="No space left"):
        words.save(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["words.safetensors"]


INVALID = {
    "unknown is 'row 0'": lambda: Vocabulary(table_layer(1), unknown="row 0"),
    "unknown_rows is 2, but unknown='error'": lambda: Vocabulary(table_layer(2), unknown_rows=2),
    "unknown='row' needs one row": lambda: Vocabulary(
        table_layer(2), unknown="row", unknown_rows=2
    ),
    "unknown='hash' needs at least one row": lambda: Vocabulary(table_layer(2), unknown="hash"),
    "admit_after is 2, but with unknown='error'": lambda: Vocabulary(table_layer(1), admit_after=2),
    "key_type is <class 'float'>": lambda: Vocabulary(table_layer(1), key_type=float),
    "keys contains 'a' twice": lambda: Vocabulary(table_layer(2), keys=["a", "a"]),
    "the layer has 3 rows, but the vocabulary needs 2: 1 for": lambda: Vocabulary(
        table_layer(3), keys=["a"], unknown="row"
    ),
    "keys[1] is 3, but this vocabulary has string keys": lambda: Vocabulary(
        table_layer(1), keys=["a"]
    ).look_up(["a", 3]),
    "keys is an array of float64": lambda: Vocabulary(
        table_layer(1), keys=[5], key_type=int
    ).look_up([1.5]),
    "by is 'age'": lambda: Vocabulary(table_layer(1), keys=["a"]).evict(1, by="age"),
}


@pytest.mark.parametrize("message", INVALID)
def test_invalid_arguments(message):
    with pytest.raises(HotrowError, match=re.escape(message)):
        INVALID[message]()


def test_no_layer_changes_if_one_of_them_cannot():
    layer, bias = table_layer(1), table_layer(1, 1)
    optimizer = hotrow.optim.AdamW(layer.parameters())  # this optimizer doesn't train `bias`
    words = Vocabulary([layer, bias], optimizer, unknown="row")
    with pytest.raises(HotrowError, match="none of its groups has this parameter"):
        words.admit(["a"])
    assert layer.num_embeddings == bias.num_embeddings == len(words) == 1
    assert "a" not in words


@pytest.mark.parametrize(
    ("key_type", "keys", "message"),
    [
        (int, [[1, 2], [3, 4]], "keys is a nested list"),
        (int, np.array([1], "m8[h]"), "an array of timedelta64"),
        (str, "abc", "keys is a string"),
    ],
)
def test_keys_whose_shape_or_type_is_unclear_are_refused(key_type, keys, message):
    words = Vocabulary(nn.Embedding(1, 2), key_type=key_type, unknown="row")
    with pytest.raises(HotrowError, match=message):
        words.admit(keys)
