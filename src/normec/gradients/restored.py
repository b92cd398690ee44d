"""Keeps what code of the user's own saw of one client from the others, and of clipped records as well.

A model, a loss or a transform may keep what it saw, and use it much later, when no check compares gradients any more.
So in a private run whatever such code has kept while it computed a client, or a block of clipped records, is undone
afterwards: it starts every client, and every local step, as it was between the rounds. vmap parts the clients and
records within a block.

What is restored: the attributes, slots and buffers of models, losses, transforms, augmentations and penalties, of the
modules and functions that they hold, of the objects whose methods they hold, and of the classes of all these; what a
function or a method keeps in its closure, its default values and its attributes; lists, dicts and sets among all these,
and tensors that were changed in place, parameters of losses and of other parts included. Frozen parameters of a model
are not changed back, because a run that changes them is refused. What stays changed are global variables, other objects
that an attribute or a closure holds (NumPy arrays, meters, generators), frozen parameters that were changed through
their `data`, data sets, and files.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import is_
from types import CellType, FunctionType, MemberDescriptorType, MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import UsageError
from .own_code import has_own_code, module_has_own_code, own_bases, own_classes

if TYPE_CHECKING:
    from ..problems.problem import Problem

_PARTS = ("loss", "penalty", "augment", "transform")
_CONTAINERS = (dict, list, deque, set)
_FIXED = (tuple, frozenset)
_NESTED = (*_CONTAINERS, *_FIXED)
_SIMPLE = frozenset((bool, int, float, str, type(None)))  # types of values that cannot change
_EMPTY: dict[Any, Any] = {}
_MANY, _LARGE = 64, 1 << 20  # tensors in an object's attributes, and numbers in a tensor, from which on they are data
_OF_PROBLEMS = ("model", "_untouched", "_evaluation_parts", "_evaluation_copy")  # which nobody but a `Problem` calls
_OF_MODULES = frozenset(vars(nn.Module()))  # the attributes that every module has
_Copy = tuple[Tensor, int, Tensor]  # a tensor, its version, and a copy of it
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class UserState:
    """What the code behind some parts of a problem can keep; nothing for code of PyTorch and of this library alone.

    Modules and functions are looked up once: a model has the same ones in every round.
    """

    def __init__(
        self,
        *parts: object,
        model: nn.Module | None = None,
        attributes_of: object = None,
        besides: Collection[str] = (),
    ) -> None:
        """`model`: a further part, whose parameters and buffers engines set for every client.

        `attributes_of`: an object whose attributes are restored, with the containers and tensors in them. Many tensors
        in one container, and large ones, may be the data of clients, so they are copied once, and looked at again where
        they count a change. In attributes that are named `besides` no code is looked up.
        """
        self._modules: list[nn.Module] = []  # with code of the user's own
        self._owned: list[dict[str, Any]] = []  # parameters and buffers, also of PyTorch's own modules
        self._shallow: list[Any] = []  # dicts whose values are restored
        self._deep: list[Any] = []  # dicts and lists that are restored with the containers and tensors in them
        self._cells: list[CellType] = []
        self._slots: list[tuple[MemberDescriptorType, object]] = []  # of objects
        self._classes: list[type] = []
        self._known: dict[int, object] = {}
        self._walked: dict[int, object] = {}  # containers whose modules and functions are known
        self._copies: dict[int, _Copy] = {}
        self._looked: dict[int, object] | None = None  # modules and functions that were there at the last look
        self._recorded: list[object] = []  # copies that CUDA graphs write to and read, as often as they are replayed
        self._within = 0  # how many contexts are open, whose copies have to last
        self._data: dict[int, Tensor] = {}  # tensors that are looked at only where they count a change
        self._trained = frozenset(map(id, model.modules())) if model is not None else frozenset()
        self._set_by_engines = frozenset(map(id, model.parameters())) if model is not None else frozenset()
        held = getattr(attributes_of, "__dict__", {})
        if attributes_of is not None:
            self._known[id(attributes_of)] = attributes_of
            self._deep.append(held)
            self._add_classes(attributes_of)
        for part in (model, *parts):
            self._add(part)
        self._look_up({name: value for name, value in held.items() if name not in besides})
        of_modules = {id(value) for owned in self._owned for value in owned.values()}
        self._data = {id(one): one for one in _data_in(held) if id(one) not in of_modules}
        if self:
            with _as_stored():
                self._look_again()
                self._walk()  # copies the tensors before anything traces or records a pass

    def __bool__(self) -> bool:
        return bool(self._shallow or self._deep or self._slots or self._classes)

    def restored(self) -> AbstractContextManager[None]:
        """Return a context that undoes at its end what the code has kept since its beginning."""
        return self._restored() if self else nullcontext()

    @contextmanager
    def _restored(self) -> Iterator[None]:
        with _as_stored():
            if not self._within:
                self._look_again()
            before, tensors, grads = self._walk()
        self._within += 1
        cells = [(cell, _contents(cell)) for cell in self._cells]
        slots = [(slot, of, _in_slot(slot, of)) for slot, of in self._slots]
        classes = [(kind, dict(vars(kind))) for kind in self._classes]
        try:
            yield
        finally:
            self._within -= 1
            for kind, attributes in classes:
                _restore_class(kind, attributes)
            for slot, of, contents in slots:
                now = _in_slot(slot, of)
                if contents and not (now and now[0] is contents[0]):
                    slot.__set__(of, contents[0])
                elif now and not contents:
                    slot.__delete__(of)
            for cell, contents in cells:
                if contents:
                    cell.cell_contents = contents[0]
                elif _contents(cell):
                    del cell.cell_contents
            for container, held in before:
                _restore(container, held)
            for tensor, grad in grads:
                if tensor.grad is not grad:
                    tensor.grad = grad
            with _as_stored():
                for copied in tensors:
                    self._restore_tensor(*copied)

    def _add(self, part: Any) -> None:
        """Look up what a part can keep, and the modules and functions that it calls."""
        if isinstance(part, MethodType):
            self._add(part.__func__)
            part = part.__self__
            self._add_bases(part)  # of a class method
        if part is None or id(part) in self._known or isinstance(part, type):
            return
        if not has_own_code(part):
            if isinstance(part, nn.Module):
                self._add_tensors(part)
            return
        if isinstance(part, nn.Module):
            for module in part.modules():
                self._add_module(module)
            return
        self._known[id(part)] = part
        if isinstance(part, partial):
            self._add(part.func)
            self._add_contents([*part.args, part.keywords])
        if isinstance(part, FunctionType):
            self._cells += part.__closure__ or ()
            self._add_contents([one for cell in part.__closure__ or () for one in _contents(cell)])
            self._add_contents([*(part.__defaults__ or ()), *(part.__kwdefaults__ or {}).values()])
        if hasattr(part, "__dict__"):
            self._add_contents(vars(part))
        self._add_classes(part)

    def _add_classes(self, part: object) -> None:
        """Look up what is in the slots of an object, and what its classes can keep."""
        for kind in own_classes(part):
            known = vars(kind).values() if "__slots__" in vars(kind) else ()
            slots = [slot for slot in known if isinstance(slot, MemberDescriptorType)]
            self._slots += [(slot, part) for slot in slots]
            self._look_up([one for slot in slots for one in _in_slot(slot, part)])
            self._add_class(kind)

    def _add_bases(self, part: object) -> None:
        """Look up what a class and its bases can keep; nothing if the part is not a class."""
        for kind in own_bases(part) if isinstance(part, type) else ():
            self._add_class(kind)

    def _add_class(self, kind: type) -> None:
        """Look up what a class of the user's own and its methods can keep."""
        if id(kind) in self._known:
            return
        self._known[id(kind)] = kind
        self._classes.append(kind)
        for value in list(vars(kind).values()):
            if isinstance(value, staticmethod | classmethod):
                self._add(value.__func__)
            elif isinstance(value, property):
                self._look_up([value.fget, value.fset])
            else:
                self._look_up([value])

    def _add_module(self, module: nn.Module) -> None:
        if id(module) in self._known:
            return
        self._known[id(module)] = module
        # Other modules may assign them as well.
        self._shallow += vars(module), module._buffers, module._modules, module._parameters
        if module_has_own_code(module):
            hooks = [getattr(module, name) for name in _HOOKS]
            self._modules.append(module)
            self._shallow += hooks
            self._look_up([vars(module), *hooks])
            for one in vars(module).values():
                self._add_bases(one)
            self._add_classes(module)
        if id(module) not in self._trained:
            self._owned += module._buffers, module._parameters

    def _add_tensors(self, part: nn.Module) -> None:
        """Look up the buffers and parameters of a module of PyTorch that code of the user's own holds."""
        if not self._known:  # nothing but the module itself can read them
            return
        for module in part.modules():
            held = [one for one in (module._buffers, module._parameters) if one]
            if id(module) not in self._known and id(module) not in self._trained and held:
                self._known[id(module)] = module
                self._shallow += held
                self._owned += held

    def _add_contents(self, held: Any) -> None:
        self._deep.append(held)
        self._look_up(held)
        for one in list(_values(held)):
            self._add_bases(one)

    def _look_up(self, held: Any) -> None:
        """Add the modules and functions in a container."""
        stack = [held]
        while stack:
            for value in _values(stack.pop()):
                if isinstance(value, _NESTED) and id(value) not in self._walked:
                    self._walked[id(value)] = value
                    stack.append(value)
                if callable(value):
                    self._add(value)

    def _look_again(self) -> None:
        """Look up modules and functions that the caller has assigned since the last look, such as another loss."""
        new, known = [], self._looked or {}
        stack: list[Any] = [*self._shallow, *self._deep]
        stack += [_contents(cell) for cell in self._cells] + [_in_slot(slot, of) for slot, of in self._slots]
        seen: set[int] = set()
        while stack:
            for value in _values(stack.pop()):
                if type(value) in _SIMPLE:
                    continue
                if isinstance(value, _NESTED) and value and id(value) not in seen:
                    seen.add(id(value))
                    stack.append(value)
                if callable(value) and id(value) not in known:
                    new.append(value)
        first, self._looked = self._looked is None, known | {id(value): value for value in new}
        if new and not first:
            self._look_up(new)
            self._look_again()

    def _walk(self) -> tuple[list[tuple[Any, Any]], list[_Copy], list[tuple[Tensor, Tensor | None]]]:
        """Return the containers with copies of their contents, the tensors with theirs, and the tensors' gradients."""
        grads: list[tuple[Tensor, Tensor | None]] = []
        before = [(held, dict(held) if held else _EMPTY) for held in self._shallow]
        copies: dict[int, _Copy] = {}
        stack, seen = list(self._deep), set(map(id, self._deep))
        stack.append(tuple(one for cell in self._cells for one in _contents(cell)))
        stack.append(tuple(one for slot, of in self._slots for one in _in_slot(slot, of)))
        stack += [tuple(vars(kind).values()) for kind in self._classes]
        owned = tuple(value for held in self._owned for value in held.values())
        copies |= {id(value): self._copy_of(value) for value in owned if value is not None}
        for module in self._modules:
            stack.append(tuple(value for name, value in vars(module).items() if name not in _OF_MODULES))
            stack.append(tuple(module._buffers.values()))
        while stack:
            container = stack.pop()
            if not isinstance(container, _FIXED):
                before.append((container, _copied(container) if container else _EMPTY))
            for value in _values(container) if container else ():
                if type(value) in _SIMPLE:
                    continue
                if isinstance(value, Tensor):
                    if id(value) not in self._set_by_engines:
                        copies[id(value)] = self._copy_of(value)
                elif isinstance(value, _NESTED) and id(value) not in seen:
                    seen.add(id(value))
                    stack.append(value)
        for tensor, _, _ in list(copies.values()):
            if tensor.requires_grad and tensor.is_leaf:
                grads.append((tensor, tensor.grad))
                if tensor.grad is not None:
                    copies[id(tensor.grad)] = self._copy_of(tensor.grad)
        self._copies = copies
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._recorded.append(copies)
        return before, list(copies.values()), grads

    def _copy_of(self, tensor: Tensor) -> _Copy:
        if is_lazy(tensor):
            raise UsageError(
                "a loss or another part has parameters or buffers that its first call makes, so they may follow from "
                "the first client's records; call it once on made-up data before"
            )
        if tensor.is_inference():
            with torch.inference_mode():
                return tensor, -1, tensor.clone()
        known = self._copies.get(id(tensor))
        if known is not None and known[1] == tensor._version:
            if self._counts_changes(tensor):
                return known
            if tensor.shape == known[2].shape and tensor.dtype == known[2].dtype and not self._within:
                known[2].copy_(tensor)
                return known
        return tensor, tensor._version, tensor.clone()

    def _counts_changes(self, tensor: Tensor) -> bool:
        return id(tensor) in self._data or _counts_changes(tensor)

    def _restore_tensor(self, tensor: Tensor, version: int, copied: Tensor) -> None:
        if tensor.is_inference():  # it has no version
            with torch.inference_mode():
                tensor.copy_(copied)
            return
        if tensor._version == version and (self._counts_changes(tensor) or _holds(tensor, copied)):
            return
        if tensor._version != version and tensor.grad_fn is not None and not tensor._is_view():
            tensor.detach_()
        if not _has_strides(tensor):
            tensor.copy_(copied)
        elif tensor.shape == copied.shape:
            _once(tensor, tensor).copy_(_once(copied, tensor))
        else:  # it was resized
            tensor.data = copied.clone()
        self._copies[id(tensor)] = tensor, tensor._version, copied


_states: WeakKeyDictionary[Problem, tuple[tuple[object, ...], UserState]] = WeakKeyDictionary()


def state_of(problem: Problem) -> UserState:
    """Return what the code of a problem can keep, which is looked up once."""
    parts = (problem.model, *(getattr(problem, name) for name in _PARTS), problem.form.collate)
    known = _states.get(problem)
    if known is None or not all(map(is_, known[0], parts)):
        subclass = problem if has_own_code(problem) else None
        known = _states[problem] = (
            parts,
            UserState(*parts[1:], model=problem.model, attributes_of=subclass, besides=_OF_PROBLEMS),
        )
    return known[1]


def look_up_again(problem: Problem) -> None:
    """Look up once more what the code of a problem can keep, which may have got hooks since the problem was made."""
    _states.pop(problem, None)


def forgetful(problem: Problem) -> Problem:
    """Return the problem with an augmentation, a transform and a penalty that keep nothing between two calls."""
    found = copy.copy(problem)
    for name in ("augment", "transform", "penalty"):
        setattr(found, name, forgetful_part(getattr(problem, name)))
    return found


def forgetful_part(part: Any) -> Any:
    """Return a function that keeps nothing from one call to the next; the part itself if it cannot keep anything."""
    state = UserState(part)
    return _Forgetful(part, state) if state else part


class _Forgetful:
    def __init__(self, part: Any, state: UserState) -> None:
        self._part, self._state, self.draws = part, state, getattr(part, "draws", 0)

    def __call__(self, *given: Tensor) -> Tensor:
        with self._state.restored():
            found: Tensor = self._part(*given)
        return found


@contextmanager
def _as_stored() -> Iterator[None]:
    """Compute with tensors as they are in memory, also where a pass is traced or differentiated."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch(), torch.no_grad():
        yield


def _counts_changes(tensor: Tensor) -> bool:
    """Whether all changes of a tensor, except for those through its `data`, show in its version.

    Some kernels do not count theirs: those of running statistics, and those of fused optimizers.
    """
    return (isinstance(tensor, nn.Parameter) and not tensor.requires_grad) or not _has_strides(tensor)


def _has_strides(tensor: Tensor) -> bool:
    return not (tensor.is_nested or tensor.is_quantized or tensor.is_meta) and tensor.layout is torch.strided


def _holds(tensor: Tensor, copied: Tensor) -> bool:
    """Whether a tensor still has the values of its copy, which is not looked up on a GPU, because that would wait."""
    if tensor.device.type != "cpu" or tensor.shape != copied.shape:
        return False
    same = torch.equal(tensor, copied)
    if same or not (tensor.is_floating_point() or tensor.is_complex()):
        return same
    return bool(((tensor == copied) | (tensor.isnan() & copied.isnan())).all())


def _once(tensor: Tensor, like: Tensor) -> Tensor:
    """The part of a tensor in which every number of `like` lies once, which has some several times if expanded."""
    for dim, (size, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _contents(cell: CellType) -> tuple[Any, ...]:
    """The one object in a variable of a closure; none if nothing is assigned to it yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _in_slot(slot: MemberDescriptorType, of: object) -> tuple[Any, ...]:
    """The one object in a slot of another object; none if nothing is assigned to it."""
    try:
        return (slot.__get__(of),)
    except AttributeError:
        return ()


def _restore_class(kind: type, attributes: dict[str, Any]) -> None:
    """Give a class the attributes that it had."""
    now = vars(kind)
    if len(now) == len(attributes) and all(map(is_, now.values(), attributes.values())):
        return
    for name in [name for name in now if name not in attributes]:
        delattr(kind, name)
    for name, value in attributes.items():
        if name not in now or now[name] is not value:
            setattr(kind, name, value)


def _values(container: Any) -> Iterable[Any]:
    return list(container.values()) if isinstance(container, dict) else container


def _data_in(attributes: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among an object's attributes that may be the data of clients, by their number and size."""
    for value in attributes.values():
        held = list(_tensors_in([value]))
        yield from (one for one in held if len(held) >= _MANY or one.numel() >= _LARGE)


def _tensors_in(container: Any) -> Iterator[Tensor]:
    """Yield the tensors in a container and in those that it holds."""
    stack, seen = [container], {id(container)}
    while stack:
        for value in _values(stack.pop()):
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, _NESTED) and id(value) not in seen:
                seen.add(id(value))
                stack.append(value)


def _copied(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(container)
    return set(container) if isinstance(container, set) else list(container)


def _restore(now: Any, held: Any) -> None:
    """Give a container the contents that it held."""
    if not now and not held:
        return
    if isinstance(now, dict):
        same = len(now) == len(held) and all(map(is_, now, held)) and all(map(is_, now.values(), held.values()))
    else:
        same = not isinstance(now, set) and len(now) == len(held) and all(map(is_, now, held))
    if same:
        return
    now.clear()
    now.extend(held) if isinstance(now, list | deque) else now.update(held)
