"""`convert` accepts modules of any class: abstract, generic, or with a custom metaclass."""

import abc
import copy
import functools
import inspect
import io
import pickle
from typing import Generic, TypeVar
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hotrow import HotrowError, convert
from hotrow.table.parameter import Table

T = TypeVar("T")


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(9, 3)
        self.linear = nn.Linear(9, 3)

    def forward(self, ids):
        return self.items(ids) + self.linear(F.one_hot(ids, 9).float())


class AbstractFirst(abc.ABC, Body):
    @abc.abstractmethod
    def name(self):
        """Return a name."""


class Concrete(AbstractFirst):
    def name(self):
        return "concrete"


class GenericFirst(Generic[T], Body):
    pass


class Slots(Body):
    __slots__ = ("extra",)


class CountsSubclasses(Body):
    count = 0

    def __init_subclass__(cls, required, **kwargs):
        raise AssertionError("converting must not call this")


class Meta(type):
    def mro(cls):
        return super().mro()


class WithMetaclass(Body, metaclass=Meta):
    pass


CLASSES = [Body, Concrete, GenericFirst, Slots, CountsSubclasses, WithMetaclass]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("to", ["lookup", "matmul"])
def test_modules_of_any_class_are_converted(cls, to):
    ids = torch.tensor([1, 8, 1])
    model = nn.Sequential(cls(), nn.Identity())
    expected = model(ids)
    convert(model, to, min_entries=0)
    assert isinstance(model[0], cls)
    assert type(model[0]).__name__ == cls.__name__
    torch.testing.assert_close(model(ids), expected)
    if to == "lookup":
        assert type(model[0].items.weight) is Table
        outcomes = [finding.outcome for finding in convert.report(model).findings]
        assert outcomes == ["table", "linear(9, 3) looked up"]


def test_a_converted_class_keeps_its_metaclass():
    """Python caches the attributes of a class only if its metaclass doesn't change the MRO."""
    for cls in CLASSES:
        metaclass, has_hook = type(type(convert(cls()))), cls in (CountsSubclasses, GenericFirst)
        assert issubclass(metaclass, type(cls))
        assert ("mro" in vars(metaclass)) is has_hook


@pytest.mark.parametrize("cls", CLASSES)
def test_a_copy_and_a_saved_module_are_converted_too(cls):
    model = convert(cls(), min_entries=0)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other(torch.tensor([1]))
        assert any("looked up" in str(each) for each in convert.report(other).findings)


def make(cls):
    return cls()


class MadeByClass(Body):
    def __reduce__(self):
        return type(self), ()


class MadeByPartial(Body):
    def __reduce__(self):
        return functools.partial(make, type(self)), ()


class MadeByFunction(Body):
    def __reduce__(self):
        return make, (type(self),)


class MadeByItsClass(Body):
    def __reduce__(self):
        return self.__class__, ()


class MadeFromItsClass(Body):
    def __reduce__(self):
        return make, (self.__class__,)


def make_of_array(array):
    return MadeFromAnArray()


class MadeFromAnArray(Body):
    def __reduce__(self):
        return make_of_array, (np.arange(3),)


def test_a_module_that_is_made_from_an_array_can_be_copied():
    assert isinstance(copy.deepcopy(convert(MadeFromAnArray())), MadeFromAnArray)


class KeepsItsClass(Body):
    def __getstate__(self):
        return {**self.__dict__, "cls": type(self)}


@pytest.mark.parametrize(
    "cls",
    [
        MadeByClass,
        MadeByPartial,
        MadeByFunction,
        MadeByItsClass,
        MadeFromItsClass,
        KeepsItsClass,
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
def test_modules_with_custom_pickling_are_converted_after_loading(cls, protocol):
    model = convert(cls(), min_entries=0)
    for other in (pickle.loads(pickle.dumps(model, protocol)), copy.deepcopy(model)):
        assert type(other) is type(model)
    saved = pickle.loads(pickle.dumps({"cls": type(model)}, protocol))
    assert saved["cls"] is type(model)


class Single(Body):
    def __reduce__(self):
        return "single"


single = Single()


def test_a_module_that_is_saved_by_name_stays_the_same_object():
    convert(single, min_entries=0)
    assert pickle.loads(pickle.dumps(single)) is single


class Counts(Body):
    calls = 0

    def forward(self, ids):
        type(self).calls += 1
        self.__class__.latest = ids
        return super().forward(ids)


def test_attributes_of_the_class_are_set_on_the_original_class(monkeypatch):
    monkeypatch.setattr(Counts, "calls", 0)
    model, ids = convert(Counts(), min_entries=0), torch.tensor([1])
    model(ids)
    model(ids)
    assert Counts.calls == 2
    assert Counts.latest is ids


def test_methods_of_the_class_can_be_replaced_wrapped_and_restored(monkeypatch):
    model, ids = convert(Counts(), min_entries=0), torch.tensor([1])
    before = model(ids)
    forward = type(model).forward
    type(model).forward = lambda self, ids: forward(self, ids) + 1
    assert torch.equal(model(ids), before + 1)
    type(model).forward = forward
    assert torch.equal(model(ids), before)
    with mock.patch.object(type(model), "forward", return_value=7):
        assert model(ids) == 7
    assert torch.equal(model(ids), before)


def test_an_attribute_of_the_class_can_be_deleted():
    model = convert(Counts(), min_entries=0)
    for value in (None, 1):
        type(model).note = value
        assert Counts.note is value
    del type(model).note
    assert not hasattr(Counts, "note")


class SubOfConverted(type(convert(Concrete(), min_entries=0))):
    pass


def test_a_subclass_of_a_converted_class_has_its_own_attributes():
    SubOfConverted.note = 1
    assert not hasattr(Concrete, "note")
    assert pickle.loads(pickle.dumps(SubOfConverted)) is SubOfConverted


def test_a_user_can_subclass_the_class_of_a_converted_module():
    class Sub(type(convert(Concrete(), min_entries=0))):
        def name(self):
            return "sub of " + super().name()

    assert Sub().name() == "sub of concrete"
    assert isinstance(Sub(), AbstractFirst)


class FinalMeta(type):
    def mro(cls):
        if any(isinstance(base, FinalMeta) for base in cls.__bases__):
            raise TypeError(f"{cls.__base__.__name__} is final")
        return super().mro()


class Final(Body, metaclass=FinalMeta):
    pass


def test_a_class_that_refuses_subclasses_is_named_and_the_rest_is_converted():
    model = convert(nn.Sequential(Final(), Concrete()), min_entries=0)
    assert type(model[0]) is Final
    assert type(model[0].items.weight) is type(model[1].items.weight) is Table
    (finding,) = [each for each in convert.report(model).findings if each.path == "0"]
    assert not finding.converted
    assert finding.why == (
        "its one-hots are not found, because Final cannot be subclassed: Final is final"
    )
    with pytest.raises(HotrowError, match="Final is final: convert the modules inside it"):
        convert(nn.Sequential(Concrete(), Final()), to="matmul")


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(9, 3)

    def uses_scale(self):
        return True

    def act(self, x):
        return 3 * x

    def forward(self, ids):
        x = self.act(self.items(ids))
        return 2 * x if self.uses_scale else x

    @torch.no_grad()
    def decorated(self, ids, *, scale=1):
        return scale * self(ids)


class WithAttribute(Base):
    uses_scale = False


class WithProperty(Base):
    uses_scale = property(lambda self: False)


class WithStaticMethod(Base):
    act = staticmethod(torch.relu)


class WithClassMethod(Base):
    @classmethod
    def act(cls, x, scale=1.0):
        return x if torch.is_tensor(x) else 3 * scale


class WithFunctionOfTorch(Base):
    act = torch.tanh


class WithModule(Base):
    act = nn.ReLU()


class WithNames(Base):
    _direction = "left"
    _original = False

    def __init__(self):
        super().__init__()
        self.register_buffer("_min_entries", torch.tensor(2.0))

    def act(self, x):
        assert not self._original
        return x * self._min_entries if self._direction == "left" else x


class AsksForItsClass(Base):
    uses = 0

    def act(self, x):
        type(self).uses += 1
        type(self).scale = lambda self, x: 5 * x
        is_overridden = type(self).act is not AsksForItsClass.act
        return super().act(x) if is_overridden else self.scale(x)


@pytest.mark.parametrize("to", ["lookup", "matmul"])
@pytest.mark.parametrize(
    "cls",
    [
        WithAttribute,
        WithProperty,
        WithStaticMethod,
        WithClassMethod,
        WithFunctionOfTorch,
        WithModule,
        WithNames,
        AsksForItsClass,
    ],
)
def test_a_converted_module_finds_what_its_class_defines(cls, to):
    model = cls()
    ids = torch.tensor([1, 8, 1])
    expected = model(ids)
    convert(model, to, min_entries=0)
    torch.testing.assert_close(model(ids), expected, rtol=0, atol=0)


class Compiled(Base):
    scale = 2

    @property
    def is_scaled(self):
        return type(self).act is Compiled.act

    @classmethod
    def shift(cls, x):
        return x + cls.scale

    def act(self, x):
        return super().act(x) if self.is_scaled else x

    def forward(self, ids):
        x = super().forward(ids) * len(self.__class__.__name__)
        return self.shift(x)


def test_a_compiled_module_finds_what_its_class_defines():
    model, ids = Compiled(), torch.tensor([1, 8, 1])
    expected = model(ids)
    compiled = torch.compile(convert(model, min_entries=0), backend="eager")
    torch.testing.assert_close(compiled(ids), expected)


def test_the_class_of_a_converted_module_can_be_assigned():
    model, ids = convert(WithAttribute(), min_entries=0), torch.tensor([1])
    model.__class__ = WithProperty
    assert type(model) is WithProperty
    assert torch.equal(model(ids), 3 * model.items(ids))


class Registered(type):
    names = set()  # noqa: RUF012

    def __init__(cls, name, bases, members):
        super().__init__(name, bases, members)
        if name in Registered.names:
            raise KeyError(f"{name} exists already")
        Registered.names.add(name)


class OfARegistry(Body, metaclass=Registered):
    pass


def test_a_metaclass_does_not_see_the_class_of_a_converted_module():
    model = convert(OfARegistry(), min_entries=0)
    model(torch.tensor([1]))
    assert any("looked up" in finding.outcome for finding in convert.report(model).findings)
    assert Registered.names == {"OfARegistry"}


class Tripled:
    def act(self, x):
        return 3 * super().act(x)


def test_a_class_that_is_added_to_a_converted_module_is_kept():
    """`torch.distributed.fsdp.fully_shard` adds a class to a module like this."""
    ids, results = torch.tensor([1]), []
    for is_converted in (False, True):
        torch.manual_seed(0)
        model = convert(WithAttribute(), min_entries=0) if is_converted else WithAttribute()
        cls = type(model)
        model.__class__ = type(cls.__name__, (Tripled, cls), {})
        copied, again = copy.deepcopy(model), copy.deepcopy(model)
        if is_converted:
            again = copy.deepcopy(convert(again, min_entries=7))
        results.append(torch.stack([each(ids) for each in (model, copied, again)]))
    assert torch.equal(*results)
    assert torch.equal(results[0][0], 9 * model.items(ids))


class Counted(Base):
    count = 0

    def __init_subclass__(cls, by=1, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.count += by


def test_a_subclass_of_a_converted_class_runs_the_hook_of_its_base():
    cls = type(convert(Counted()))
    assert Counted.count == 0

    class Extended(Tripled, cls, by=5):
        pass

    assert (Extended.count, Counted.count) == (5, 0)
    assert type(convert(Extended(), min_entries=7)).count == 5


REPLACED = {
    "static method": staticmethod(torch.relu),
    "class method": classmethod(lambda cls, x: 5 * x),
    "partial": functools.partial(torch.mul, 7),
    "mock": mock.Mock(side_effect=torch.tanh),
    "function": lambda self, x: 9 * x,
}


@pytest.mark.parametrize("name", REPLACED)
def test_a_method_may_be_replaced_after_the_conversion(name, monkeypatch):
    plain, ids = WithAttribute(), torch.tensor([1])
    model = convert(copy.deepcopy(plain), min_entries=0)
    monkeypatch.setattr(WithAttribute, "act", REPLACED[name], raising=False)
    assert torch.equal(model(ids), plain(ids))


def test_the_class_of_a_converted_module_keeps_its_annotations():
    class Annotated(Base):
        count: int = 3

    model = convert(Annotated())
    assert type(model).__annotations__ == Annotated.__annotations__


class Numbered(type):
    def __init__(cls, name, bases, members, scale=2):
        super().__init__(name, bases, members)
        cls.scale, cls.names = scale, [name, *members]

    def __new__(cls, name, bases, members, scale=2):
        act = members["act"]
        members["act"] = lambda self, x: 1 + act(self, x)
        return super().__new__(cls, name, bases, members)


class Scaled(Base, metaclass=Numbered, scale=5):
    def act(self, x):
        return self.scale * x


def test_a_metaclass_does_not_change_the_attributes_of_the_class():
    names, ids = Scaled.names, torch.tensor([1])
    model = convert(Scaled(), min_entries=0)
    assert type(model).scale == model.scale == Scaled.scale == 5
    assert model.names is Scaled.names is names
    assert torch.equal(model(ids), 2 * (1 + 5 * model.items(ids)))


def test_the_arguments_of_a_converted_method_can_be_inspected():
    model = convert(WithClassMethod())
    plain = WithClassMethod()
    assert inspect.getfullargspec(model.forward) == inspect.getfullargspec(plain.forward)
    for name in ("forward", "decorated"):
        found, expected = (inspect.signature(getattr(each, name)) for each in (model, plain))
        assert found == expected


class Sealed(WithClassMethod):
    """A module that refuses to set attributes after `__init__`."""

    def __init__(self):
        super().__init__()
        self.is_sealed = True

    def __setattr__(self, name, value):
        if self.__dict__.get("is_sealed"):
            raise AttributeError(f"cannot set {name}")
        super().__setattr__(name, value)


def test_a_module_that_refuses_to_set_attributes_is_converted():
    model = convert(Sealed())
    assert isinstance(model, Sealed)
    assert type(model) is not Sealed
    with pytest.raises(AttributeError, match="cannot set x"):
        model.x = 1
