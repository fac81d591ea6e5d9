"""A mode around the user's loss that sees every use of every trainable parameter and hands it to a rule.

Three kinds of tensors matter: *tracked* ones (trainable parameters, and whatever is made from them alone, such as
``weight.t()``, whose gradients are pulled back to the parameters afterwards), *constants* (made from no data), and
everything else, which may carry examples. An operation between a tracked tensor and data is a *use*: its rule runs it
with the parameter detached and keeps what turns the output gradient into per-example gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from sordino.errors import UnsupportedModel
from sordino.gradients.bookkeeping.following import Follower, Sight
from sordino.gradients.bookkeeping.moves import COMPOSED, MOVES
from sordino.gradients.bookkeeping.operations import (
    BACKWARDS,
    FOLLOWED,
    QUESTIONS,
    REARRANGE,
    Trace,
    accepts,
    asks_slopes,
    find_tensors,
    is_metadata,
    keeps_lengths,
    refuse_derivatives,
    refuse_statistics,
)
from sordino.gradients.bookkeeping.places import Place
from sordino.gradients.bookkeeping.slopes import Differentiates, Slopes, WithWayBack
from sordino.gradients.bookkeeping.unseen import UNSEEN, Bypassed, Sightings, share_unseen
from sordino.gradients.rules import RULES, generic
from sordino.gradients.rules.base import Call, Layout, NoRule, ParameterShare, is_in_place, name_of
from sordino.gradients.rules.elementwise import EXPANSIONS, expands_examples, find_spread
from sordino.gradients.rules.formulas import Formula
from sordino.gradients.rules.slopes import SLOPES, Back, find_way


@contextmanager
def set_aside_others() -> Iterator[None]:
    """Keep the recordings of loops that were given up, which a traceback may still hold, out of what happens here."""
    modes = [_pop_mode() for _ in _get_current_function_mode_stack()][::-1]
    for mode in modes:
        if not isinstance(mode, Recording):
            _push_mode(mode)
    try:
        yield
    finally:
        for _ in _get_current_function_mode_stack():
            _pop_mode()
        for mode in modes:
            _push_mode(mode)


@dataclass
class Use:
    """One operation that used tracked tensors; `closed` when nothing else that it used has a gradient."""

    name: str
    shape: tuple[int, ...]
    shares: list[ParameterShare]
    batch_dims: int
    versions: list[tuple[Tensor, int]]
    call: int
    closed: bool
    layout: Layout | None = None
    place: Place | None = None

    def unchanged(self) -> None:
        """Refuse if something that was kept has been modified in place since."""
        for tensor, version in self.versions:
            if tensor._version != version:
                raise NoRule(f"{self.name}: its input was modified in place afterwards")


@dataclass
class Tracked:
    """A trainable parameter, or a tensor made from parameters alone.

    `attached` has the autograd graph back to the parameters; for a parameter it is the parameter. When this is one
    parameter only rearranged or cut, `path` says how it was cut: (call, piece) for each cut; otherwise None. `formula`
    is the operation that made it alone.
    """

    attached: Tensor
    handle: Tensor
    roots: tuple[Tensor, ...]
    path: tuple[tuple[int, int], ...] | None = ()
    formula: Formula | None = None

    def apart_from(self, other: Tracked) -> bool:
        """Whether the two are different pieces of the same cut, so that their gradients are orthogonal in the root."""
        if self.path is None or other.path is None:
            return False
        cuts = zip(self.path, other.path, strict=False)
        return any(mine[0] == theirs[0] and mine[1] != theirs[1] for mine, theirs in cuts)


class Recording(TorchFunctionMode):
    """Records the uses of `parameters` while it is entered; knows nothing of what happens to the gradients.

    A use that cannot be book-kept is remembered as the `failure` and raised, or, when `lenient`, left to autograd.
    With `traced` the operations are written down, for losses whose examples cannot be followed.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        constants: Iterable[Tensor],
        data: Any,
        size: int,
        shared: frozenset[tuple[int, str]],
        lenient: bool = False,
        traced: bool = False,
        bypassed: bool = False,
        differentiates: bool = False,
    ) -> None:
        super().__init__()
        self.unseen = Sightings() if bypassed else None
        self.roots: dict[int, Tensor] = {}
        self.past: dict[int, Tensor] = {}
        self.tracked = {id(parameter): Tracked(parameter, parameter, (parameter,)) for parameter in parameters}
        self.constants = {id(constant): constant for constant in constants}
        self.trace = Trace([*parameters, *self.constants.values()]) if traced else None
        self.follower = Follower(size, data, self.tracked) if size > 1 else None
        self.slopes = Slopes(self) if differentiates else None
        self.size = size
        self.uses: list[Use] = []
        self.calls = 0
        self.shared, self.lenient = shared, lenient
        self.ignore()
        self.anchor = torch.zeros((), requires_grad=True)
        self.failure: NoRule | None = None
        self.left = False
        self.replayed: dict[str, str] = {}
        self.final = self.recomputes = self.repeating = False
        self.sorted: dict[int, tuple[Tensor, Tensor]] = {}
        self.packed: dict[int, tuple[Tensor, Tensor | None]] = {}

    def ignore(self) -> None:
        """Nobody listens to gradients."""
        self.on_gradient: Callable[[Use, Tensor], None] = lambda use, gradient: None

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Nobody listens to gradients for a while."""
        listening = self.on_gradient
        self.ignore()
        try:
            yield
        finally:
            self.on_gradient = listening

    def leave(self) -> None:
        """Stop recording, wherever in the stack of modes this one stands: a loop that was given up is left late."""
        self.left = True
        above = []
        if self in _get_current_function_mode_stack():
            while (top := _pop_mode()) is not self:
                above.append(top)
        for mode in reversed(above):
            _push_mode(mode)

    def __exit__(self, *error: object) -> None:
        self.leave()  # torch would fail if an interrupt in its own code had taken the mode away already

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.left or func in QUESTIONS:
            return func(*args, **kwargs)
        tensors = list(find_tensors(args, kwargs))
        if self.unseen is not None and torch.is_grad_enabled() and not is_metadata(func):
            self.look_for_unseen(self.unseen, tensors)
        tracked = [tensor for tensor in tensors if id(tensor) in self.tracked]
        refuse_statistics(func, args, kwargs, self.is_shared, self.size)
        if asks_slopes(func, tracked, kwargs) and not self.lenient:
            return self.find_slopes(args[0], args[1], kwargs)
        refuse_derivatives(func, tracked, kwargs, self.lenient)
        if self.repeating:
            return self.run(func, args, kwargs, tensors, tracked)
        before, follower = len(self.uses), self.follower
        sight = None if follower is None else follower.look(tensors)
        if sight is not None and types and not all(issubclass(kind, Tensor) for kind in types):
            sight.lost = True  # an object of the user's that does this operation in its own way
        result = self.run(func, args, kwargs, tensors, tracked)
        if follower is not None:
            self.follow(follower, sight, func, result, args, kwargs, self.uses[before:])
        self.note(func, args, kwargs, result)
        return result

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Write down what has run, for those who ask for it later."""
        if self.slopes is not None:
            self.slopes.note(func, args, kwargs, result)
        if self.trace is not None:
            self.trace.note(func, args, kwargs, result, self.is_shared)
        if self.unseen is not None:
            self.unseen.note(find_tensors((result,), {}))

    def find_slopes(self, outputs: Any, inputs: Any, given: dict[str, Any]) -> tuple[Tensor | None, ...]:
        """Gradients by activations within the loss."""
        if self.slopes is None:
            raise Differentiates("the loss differentiates the model")
        return self.slopes.differentiate(outputs, inputs, given)

    def follow(
        self, follower: Follower, sight: Sight | None, func: Any, result: Any, args: Any, kwargs: Any, uses: list[Use]
    ) -> None:
        """Find the examples in the result of an operation and in the outputs of the uses that it is made of."""
        follower.gave_up |= func in BACKWARDS
        if func is Tensor.__setitem__:
            result = args[0]
        place = follower.follow(sight, MOVES.get(func), result, args, kwargs)
        if uses and place is None and not (sight is not None and (sight.carriers or sight.lost)):
            place = follower.guess(uses[0].shape, uses[0].batch_dims, result)
        if uses and place is not None and func in COMPOSED and id(args[1]) in self.packed:
            place = follower.place_sequences(result[1], self.packed[id(args[1])][1])
            follower.gave_up |= place is None
        mixed = 2 if func is F.scaled_dot_product_attention else 0
        for use in uses:
            if place is not None:
                use.place = follower.place_use(place, use.shape, result, func in COMPOSED, mixed)
            if place is not None and (use.place is None or use.place.dim >= use.batch_dims):
                follower.gave_up = True

    def look_for_unseen(self, unseen: Sightings, tensors: Iterable[Tensor]) -> None:
        """Take up what a function that no mode sees made of parameters: as made from them alone, or as a use."""
        for tensor in tensors:
            roots, activations = unseen.find(tensor, lambda leaf: id(leaf) in self.tracked)
            if not roots or id(tensor) in self.tracked or self.repeating:
                continue
            self.calls += 1
            name = UNSEEN
            examples = tensor.dim() > 0 and len(tensor) % self.size == 0
            if not activations and (not examples or (self.calls, name) in self.shared):
                if any(self.tracked[id(root)].attached is not root for root in roots):
                    raise Bypassed(f"{name}: made from a tensor that was made from parameters")
                self.tracked[id(tensor)] = Tracked(tensor, tensor, tuple(roots), None)
                continue
            # What a checkpoint saved is computed again when it is asked for, once.
            known = (lambda node: False) if self.recomputes else unseen.nodes.__contains__
            shares = share_unseen(tensor, roots, self.quietly, self.is_shared, known)
            use = Use(name, tensor.shape, shares, tensor.dim(), [], self.calls, closed=not activations)
            self.uses.append(use)
            self.roots.update({id(root): root for root in roots})
            tensor.register_hook(lambda gradient, use=use: self.on_gradient(use, gradient))

    def is_shared(self, tensor: Tensor) -> bool:
        """The same for every example: one that has a gradient has had an activation written into it since."""
        return id(tensor) in self.tracked or (id(tensor) in self.constants and not tensor.requires_grad)

    def run(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], tracked: list[Tensor]) -> Any:
        """Run one operation: as it is without tracked tensors, otherwise as a use of them."""
        if not tracked or not torch.is_grad_enabled() or is_metadata(func):
            result = func(*args, **kwargs)
            if not tracked and isinstance(result, Tensor):
                self.note_constant(func, result, tensors)
            if func in FOLLOWED:
                self.note_order(func, args, result)
            return result
        before = [tensor._version for tensor in tensors] if self.lenient else []
        try:
            return self.use(func, args, kwargs, tensors, tracked)
        except NoRule as failure:
            self.failure = failure
            if not self.lenient:
                raise
            written = is_in_place(name_of(func)) and id(args[0]) in self.tracked
            if written and not self.adds_nothing(args[0], tensors):
                raise UnsupportedModel(f"{failure}: write {name_of(func)} without in-place changes") from failure
            if [tensor._version for tensor in tensors] != before:  # to run it again would change them twice
                raise UnsupportedModel(f"{failure}: write {name_of(func)} without in-place changes") from failure
            return func(*self.attach(args), **{name: self.attach(value) for name, value in kwargs.items()})

    def adds_nothing(self, written: Tensor, tensors: list[Tensor]) -> bool:
        """Whether a tracked tensor is still made from the same parameters after these were written into it."""
        roots = {id(root) for root in self.tracked[id(written)].roots}
        found = (self.tracked[id(each)].roots if id(each) in self.tracked else (each,) for each in tensors)
        return all(id(root) in roots or not root.requires_grad for each in found for root in each)

    def attach(self, value: Any) -> Any:
        """Arguments with every tracked tensor replaced by the one that has its graph."""
        if type(value) in (tuple, list):
            return type(value)(map(self.attach, value))
        return self.tracked[id(value)].attached if id(value) in self.tracked else value

    def note_constant(self, func: Any, result: Tensor, tensors: list[Tensor]) -> None:
        """A tensor made from no data is the same for every example, unless it was made one row per example."""
        constant = all(id(tensor) in self.constants for tensor in tensors)
        spread = find_spread(tensors[0], result, self.size) if constant and tensors and func in EXPANSIONS else None
        if spread is not None and self.follower is not None:
            self.follower.put(result, Place(spread))
        elif constant and (result.dim() == 0 or len(result) != self.size):
            self.constants[id(result)] = result
        elif not constant and tensors and is_in_place(name_of(func)):
            self.constants.pop(id(tensors[0]), None)

    def note_order(self, func: Any, args: Any, result: Any) -> None:
        """pack_padded_sequence sorts the examples (index_select) and packs them: remember which row is which."""
        if func is torch.Tensor.index_select:
            self.sorted[id(result)] = (result, args[2])
        else:
            order = self.sorted.get(id(args[0]), (None, None))[1]
            self.packed[id(result[1])] = (result[1], order)

    def use(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], tracked: list[Tensor]) -> Any:
        """Run one operation on tracked tensors: derive from parameters alone, or hand it to its rule."""
        self.calls += 1
        self.recomputes = self.recomputes or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        name = name_of(func)
        if kwargs.get("out") is not None:
            raise NoRule(f"{name}: writes into out=")
        known = all(map(self.is_shared, tensors))
        if args and id(args[0]) in self.tracked and is_in_place(name) and not self.is_being_made(args[0]):
            if not known or not self.adds_nothing(args[0], tensors) or not self.is_unused(args[0]):
                raise NoRule(f"{name}: modifies a parameter in place during the loss")
            return self.rewrite(func, args, kwargs)
        over_examples = func in EXPANSIONS and expands_examples(func, args, kwargs, self.size)
        closed = not any(t.requires_grad for t in tensors if id(t) not in self.tracked)
        if (known and not over_examples) or (closed and (self.calls, name) in self.shared):
            return self.derive(func, args, kwargs, tracked)
        call = Recorded(self, func, self.calls, tracked, closed)
        if self.slopes is not None and not closed:
            return self.use_with_way_back(call, args, kwargs, tensors)
        rule = RULES.get(func)
        if rule is not None and accepts(rule, kwargs):
            try:
                return rule(call, *args, **kwargs)
            except NoRule as reason:
                self.replayed[name] = str(reason)
        self.replayed.setdefault(name, f"{name}: has no rule")
        return generic.replay(call, *args, **kwargs)

    def use_with_way_back(self, call: Recorded, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Run an operation through which the loss may differentiate."""
        call.way = find_way(call.function, args, kwargs)
        rule = (SLOPES if call.way is None else RULES).get(call.function)
        # The way back is that of one activation; the others' gradients would be lost.
        activations = {id(each) for each in tensors if each.requires_grad and id(each) not in self.tracked}
        lost = call.way is not None and activations != {id(call.way[0])}
        if rule is None or lost or self.recomputes or not accepts(rule, kwargs):
            raise NoRule(f"{name_of(call.function)}: gradients within the loss go back by it and have no rule")
        return rule(call, *args, **kwargs)

    def is_being_made(self, tensor: Tensor) -> bool:
        """Whether a tracked tensor was a constant until parameters were written into it, and was not used since."""
        used = any(share.parameter is tensor for use in self.uses for share in use.shares)
        return self.tracked[id(tensor)].attached is tensor and not tensor.is_leaf and not used

    def is_unused(self, made: Tensor) -> bool:
        """Whether a tensor made from parameters lies in memory that is no parameter's and that no use has read yet."""
        read = [*self.tracked[id(made)].roots, *(share.parameter for use in self.uses for share in use.shares)]
        return not any(each is not None and is_in_memory_of(each, made) for each in read)

    def rewrite(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Change what was made from parameters in place, and with it all views of it: autograd keeps their graphs."""
        with keep_for_later() if self.recomputes else nullcontext():
            changed = func(*self.attach(args), **kwargs)
        for key, each in self.tracked.items():
            if is_in_memory_of(each.handle, args[0]):
                self.tracked[key] = replace(each, path=None, formula=None)
        return args[0] if isinstance(changed, Tensor) else changed

    def derive(self, func: Any, args: Any, kwargs: Any, tracked: list[Tensor]) -> Any:
        """Compute a tensor from parameters alone, keep its graph to them, and track it like a parameter.

        A constant that parameters are written into is such a tensor from then on, and is itself its graph's end.
        """
        with keep_for_later() if self.recomputes else nullcontext():
            results = func(*self.attach(args), **{name: self.attach(value) for name, value in kwargs.items()})
        several = isinstance(results, (tuple, list))
        kept = keeps_lengths(func, args)
        given = tracked[:1] if kept else tracked  # the others only lend their shape
        roots = tuple({id(root): root for t in given for root in self.tracked[id(t)].roots}.values())
        source = self.tracked[id(tracked[0])].path if kept else None
        if is_in_place(name_of(func)):
            self.tracked[id(args[0])] = Tracked(args[0], args[0], roots, None)
            return results

        def track(piece: Any, index: int) -> Any:
            if not isinstance(piece, Tensor) or not piece.requires_grad:
                return piece
            handle = piece.detach().requires_grad_()  # so that a use past the recording leaves a gradient here
            cut = None if source is None or name_of(func) in REARRANGE else (*source, (self.calls, index))
            path = source if name_of(func) in REARRANGE else cut
            formula = None if several else Formula.of(func, args, kwargs)
            self.tracked[id(handle)] = Tracked(piece, handle, roots, path, formula)
            return handle

        pieces = [track(piece, index) for index, piece in enumerate(results if several else [results])]
        return type(results)(pieces) if several else pieces[0]

    def backward(self, loss: Tensor, retain_graph: bool) -> None:
        """The backward pass of a recorded loss; a gradient that reaches a parameter past the recording is refused.

        Checkpointed parts run their forward again during it: with parameters detached as before, but not recorded.
        """
        parameters = [t.handle for t in self.tracked.values() if t.handle.requires_grad and t.handle.is_leaf]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        self.repeating, left, self.left = True, self.left, False
        try:
            if self.recomputes:
                with self:  # torch's public backward functions would leave the mode again
                    run = torch.autograd.graph._engine_run_backward
                    ones = (torch.ones_like(loss),)
                    run((loss,), ones, retain_graph, False, (), allow_unreachable=True, accumulate_grad=True)
            else:
                loss.backward(retain_graph=retain_graph)
            self.past = {id(p): p.grad for p in parameters if p.grad is not None}
            if not self.past.keys() <= self.roots.keys():
                raise Bypassed("autograd.Function: a parameter is used by a custom function or a reentrant checkpoint")
        finally:
            self.repeating, self.left = False, left
            for parameter, grad in zip(parameters, before, strict=True):
                parameter.grad = grad

    def tap(self, output: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
        """Arrange for the gradient of `output` to be received, also where it is changed in place afterwards.

        A view that is changed in place gets another past, and its hooks are never called: F.linear of three dimensions
        gives such views.
        """
        if output.requires_grad and output._is_view() and torch._C._functorch.peek_interpreter_stack() is None:
            through: Tensor = Through.apply(output, receive)  # type: ignore[no-untyped-call]
            return through
        if output.requires_grad:
            output = output.clone() if output._is_view() else output  # under vmap, which has no way through
            output.register_hook(receive)
            return output
        fresh = output.detach() if output._is_view() else output
        tapped: Tensor = Tap.apply(fresh, self.anchor, receive)  # type: ignore[no-untyped-call]
        return tapped


def is_in_memory_of(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are views of the same memory."""
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def keep_for_later() -> AbstractContextManager[object]:
    """What is made from parameters alone keeps what its way back needs, also in a checkpointed part.

    Gradients are pulled back after the backward pass, when nobody records: to run the part again then would not detach
    its parameters, and save other tensors than the first time.
    """
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


class Recorded(Call):
    """The recording's side of a rule's call."""

    def __init__(
        self, recording: Recording, function: Callable[..., Any], index: int, tracked: list[Tensor], closed: bool
    ) -> None:
        self.recording, self.function, self.index, self.closed = recording, function, index, closed
        self.anchor = recording.anchor
        self.way: tuple[Tensor, Back] | None = None
        self._tracked = tracked

    def tracks(self, value: object) -> bool:
        return id(value) in self.recording.tracked

    def is_shared(self, tensor: Tensor) -> bool:
        return self.recording.is_shared(tensor)

    def tracked(self) -> list[Tensor]:
        return list({id(tensor): tensor for tensor in self._tracked}.values())

    def keep(
        self, output: Tensor, inputs: Sequence[Tensor], shares: Sequence[ParameterShare], batch_dims: int
    ) -> Tensor:
        if output.is_complex():
            raise NoRule(f"{name_of(self.function)}: complex numbers have no rule")
        receive = self.receive(output.shape, inputs, shares, batch_dims)
        slopes = self.recording.slopes
        if slopes is not None and self.way is not None:
            (given, back), use = self.way, self.recording.uses[-1]
            # torch has no types for functions
            output = WithWayBack.apply(output, partial(slopes.run_back, use, back), given)  # type: ignore[no-untyped-call]
        return self.recording.tap(output, receive)

    def receive(
        self, shape: tuple[int, ...], inputs: Sequence[Tensor], shares: Sequence[ParameterShare], batch_dims: int
    ) -> Callable[[Tensor], None]:
        mine = [share for share in shares if self.tracks(share.parameter)]
        versions = [(tensor, tensor._version) for tensor in inputs]
        use = Use(name_of(self.function), shape, mine, batch_dims, versions, self.index, self.closed)
        if self.recording.repeating:
            return lambda gradient: None
        self.recording.uses.append(use)
        return lambda gradient: self.recording.on_gradient(use, gradient)

    def use(self, function: Callable[..., Any], *args: Any) -> Any:
        tensors = list(find_tensors(args, {}))
        tracked = [tensor for tensor in tensors if self.tracks(tensor)]
        return self.recording.use(function, args, {}, tensors, tracked) if tracked else function(*args)

    def final(self) -> bool:
        return self.recording.final

    def order_of(self, batch_sizes: Tensor) -> Tensor | None:
        packed = self.recording.packed.get(id(batch_sizes))
        if packed is None:
            raise NoRule("packed sequence: packed outside of the loss, so the order of its examples is unknown")
        return packed[1]


class Through(torch.autograd.Function):
    """Its input in the same memory, but not as a view of anything; what comes back is received and passed on."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
        ctx.receive = receive
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.receive(gradients[0])
        return gradients[0], None


class Tap(torch.autograd.Function):
    """Gives an output that depends on nothing trainable a gradient, so that in-place operations may follow."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
        ctx.receive = receive
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.receive(gradients[0])
        return None, None, None
