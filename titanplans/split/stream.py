"""The residual stream, and the borders between it and a tensor-parallel region, on plain local tensors.

On the stream each rank holds its shard of the sequence (sequence parallelism) or a replica. Inside a
region every rank holds the whole sequence and its share of the heads or of the MLP width, and
computes a partial sum of the region's output. `enter` and `leave` cross the border; their backwards
are each other's mirror image (Megatron-LM's f, g and their sequence-parallel forms, Korthikanti et
al. 2022, "Reducing Activation Recomputation", figure 5):

    border   sequence parallel   forward          backward
    enter    yes                 all-gather       reduce-scatter
    enter    no                  identity         all-reduce
    leave    yes                 reduce-scatter   all-gather
    leave    no                  all-reduce       identity
    begin    yes                 own shard        all-gather
    end      yes                 all-gather       own shard
    whole    yes                 all-gather       own shard
    shard    yes                 own shard        all-gather
    either   no                  identity         identity

Tensors are local on both sides, so a Triton kernel may stand anywhere, and a compiled graph holds
nothing but the collective and its neighbours, which is what async tensor parallelism looks for.

A sharded stream lives as long as a forward: outside of one, all hidden states are whole. A shard does not say how long the
sequence is, so the stream does (`Stream.length`), and remembers it of past forwards for what a backward computes again.
"""

import copy
import functools
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from titanplans.errors import PlanError, either
from titanplans.split.collectives import (
    Group,
    collect,
    gather,
    group_of,
    scatter_sum,
    sum_gradients,
    sum_ranks,
    take_shard,
)
from titanplans.split.layout import StreamLayout, shard_size
from titanplans.split.meshes import CutMeshes
from titanplans.split.own_tokens import OwnTokens
from titanplans.torch_private.autograd import in_backward, number_of_node, running_node, sequence_number

REMEMBERED = 1024
"""Forwards whose length a stream knows: as many may wait for their backward."""


class Forward(NamedTuple):
    """A forward of the past: the autograd nodes made while its stream was sharded, and the tokens of its sequence."""

    first: int
    """The number of its first node."""
    last: int
    """The number of the first node after it."""
    length: int


class Stream:
    """The residual stream of one split model, between its regions.

    Sharded, each rank holds `ceil(length / ranks)` tokens, the last ones filled up with zeros where
    the length is not a multiple: what works token by token does not mind, regions never see them.

    Args:
        layout: whether the sequence is sharded, and which dimension of the hidden states [..., sequence, hidden] it is.
        parts: ranks of context parallelism; each has its part of the tokens.
    """

    def __init__(self, layout: StreamLayout, parts: int = 1):
        self.dim, self.parts = layout.dim, parts
        self.length = 0
        """Tokens of the whole sequence in the newest forward; set where the stream begins."""
        self.ended = False
        """No forward runs, or it has ended the stream already: hidden states are whole."""
        self.begun = False
        """The first block of the forward that runs, or its embedding, has taken its shard."""
        self.head_follows = True
        """The stream of the forward that runs lasts until the head."""
        self.whole_logits = False
        """The head gathers its logits, whatever the plan says."""
        self._first = 0
        """The number of the first autograd node of the forward that runs."""
        self._forwards: deque[Forward] = deque(maxlen=REMEMBERED)

    @property
    def is_cut(self) -> bool:
        """Whether a rank has not all tokens of the stream."""
        return self.dim is not None or self.parts > 1

    def start(self, head_follows: bool) -> None:
        """Begin a forward."""
        self.ended, self.begun, self.head_follows = False, False, head_follows
        if not torch.compiler.is_compiling():
            self._first = sequence_number()

    def stop(self) -> None:
        """End the stream of the forward that runs, if one does, and remember it for its backward, if it has one."""
        if not self.ended and not torch.compiler.is_compiling() and (last := sequence_number()) > self._first:
            self._forwards.append(Forward(self._first, last, self.length))
        self.ended = True

    def length_of(self, shard: int, ranks: int) -> int:
        """Return the length of a sequence of whose part `ranks` ranks each hold a shard of `shard` tokens.

        Raises:
            PlanError: no forward runs, or a backward computes one again that is not known.
        """
        self.check_runs()
        if torch.compiler.is_compiling() or not self.ended:
            return self.length
        return self._length_then(shard, ranks)

    def check_runs(self) -> None:
        """Refuse what works on the sharded stream where no forward runs, nor a backward that computes one again.

        Raises:
            PlanError: so it is.
        """
        if not torch.compiler.is_compiling() and self.ended and not in_backward():
            raise PlanError(
                "with sequence parallelism a part of the model was called by itself, outside of a forward of the model, "
                "where nothing says how its input lies on the ranks: call the model, or set sequence_parallel = False"
            )

    def is_sharded(self) -> bool:
        """Whether hidden states at the model's two ends are a shard; in a backward, whether they were in the forward."""
        if not self.is_cut:
            return False
        if self.ended and not torch.compiler.is_compiling() and in_backward():
            return self._forward_then() is not None
        return not self.ended

    def _forward_then(self) -> Forward | None:
        """Return the forward that made the autograd node whose backward runs, and computes something again."""
        number = number_of_node(running_node())
        return next((f for f in reversed(self._forwards) if f.first <= number < f.last), None)

    def _length_then(self, shard: int | None = None, ranks: int = 1) -> int:
        """Return the length of the forward that a backward computes again; its ranks held shards of `shard` tokens."""

        def fits(forward: Forward) -> bool:
            return shard is None or shard_size(shard_size(forward.length, self.parts), ranks) == shard

        then = self._forward_then()
        # In a reentrant checkpoint within another the inner one's nodes are made in the backward, and tell nothing.
        if then is not None and fits(then) and torch.is_grad_enabled():
            return then.length
        lengths = {forward.length for forward in self._forwards if fits(forward)}
        if len(lengths) == 1:
            return lengths.pop()
        raise PlanError(
            "a backward computes a forward again, and which one is not known: forwards of "
            f"{either(sorted(lengths)) if lengths else 'no length that is remembered'} tokens may be meant: with sequence "
            "parallelism checkpoint blocks with use_reentrant=False, and not within another checkpoint"
        )

    def for_graphs(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled `call`, for which `length` is right also in a backward: a graph can't look."""

        @functools.wraps(call)
        def called(*args: Any, **kwargs: Any) -> Any:
            if not self.ended or torch.compiler.is_compiling() or not in_backward():
                return call(*args, **kwargs)
            newest, self.length = self.length, self._length_then()
            try:
                return call(*args, **kwargs)
            finally:
                self.length = newest

        return called


class Border:
    """The border between the residual stream and the regions of one model.

    `mesh` is that of tensor parallelism, 1-D; None: nothing is cut by weights.

    With B sequences of L tokens, hidden size H and N ranks, the stream's local tensor is [B, L, H] where every rank has the
    whole stream, and [B, ceil(L / N), H] where it is sharded (`StreamLayout`), shorter on the last ranks where N does not
    divide L. Inside a region it is [B, L, H] on every rank.

    With context parallelism L is this rank's part of the tokens, but in `begin`, `end`, `whole` and `shard`, on whose far
    side a sequence has all of them.
    """

    def __init__(self, meshes: CutMeshes, layout: StreamLayout):
        self.meshes, self.mesh = meshes, meshes.tp
        self.tokens = OwnTokens(meshes.cp, layout.sequence_dim)
        self.stream = Stream(layout, self.tokens.ranks)
        mesh = meshes.tp
        self.group: Group = ("", 1) if mesh is None else group_of(mesh)
        self.rank = 0 if mesh is None else mesh.get_local_rank()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Border":
        """A copied model has a stream of its own, on the same mesh."""
        twin = memo[id(self)] = copy.copy(self)
        twin.stream = copy.deepcopy(self.stream, memo)
        return twin

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        """Begin the stream with `x` [B, L, H], whole on every rank: return this rank's shard [B, ceil(L / N), H].

        The work before it is the same on every rank, and so is its gradient, which the backward gathers.
        """
        if self.stream.is_cut:
            self.stream.length = x.shape[self.tokens.dim]
        return self.shard(x)

    def holds_shard(self, x: torch.Tensor) -> bool:
        """Whether `x` looks like a shard of the hidden states, [..., sequence, hidden], and not like all of them."""
        dim = self.tokens.dim
        if not self.stream.is_cut or isinstance(x, DTensor) or x.ndim != dim + 2:
            return False
        ranks = 1 if self.stream.dim is None else self.group[1]
        return x.shape[dim] == shard_size(shard_size(self.stream.length, self.stream.parts), ranks)

    def end(self, x: torch.Tensor) -> torch.Tensor:
        """End the stream: return [B, L, H] on every rank of the local tensor `x` [B, ceil(L / N), H]."""
        return self._whole(x, self.stream.length)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, L, H] of `x` [B, ceil(L / N), H], for the same work on every rank; `shard` goes back."""
        return self._whole(x, self.length_of(x)) if self.stream.is_cut else x

    def all_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`, [batch x tokens, ...] or [batch, tokens, ..., width], with all tokens if it has this rank's alone.

        Anything else comes back as it is.
        """
        if self.tokens.ranks == 1 or not x.is_floating_point():
            return x
        batch, length = self.tokens.region_shape[:2]
        own = shard_size(length, self.tokens.ranks)
        if x.ndim > 2 and x.shape[:2] == (batch, own):
            return self.tokens.gather(x, length)
        if x.ndim > 0 and len(x) == batch * own:
            return self.tokens.gather(x.unflatten(0, (batch, own)), length).flatten(0, 1)
        return x

    def length_of_own(self, x: torch.Tensor) -> int:
        """Return the length of the whole sequence, given all tokens `x` that the ranks of this mesh share."""
        return self.stream.length_of(x.shape[self.tokens.dim], 1)

    def shared_tokens(self, x: torch.Tensor, length: int) -> torch.Tensor:
        """Return the tokens that the ranks of this mesh share, of their shards `x` of a sequence of `length`."""
        if self.stream.dim is None:
            return x
        return collect(x, self.stream.dim, shard_size(length, self.stream.parts), self.rank, self.group)

    def _whole(self, x: torch.Tensor, length: int) -> torch.Tensor:
        return self.tokens.gather(self.shared_tokens(x, length), length)

    def shard(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard [B, ceil(L / N), H] of `x` [B, L, H], which is the same on every rank."""
        x = self.tokens.own(x)
        return x if self.stream.dim is None else take_shard(x, self.stream.dim, self.rank, self.group)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Bring the stream's local tensor `x` [B, ceil(L / N), H] into a region: return [B, L, H] on every rank.

        Each rank's gradient of the result is partial (it has seen its own share of the heads only);
        the backward sums them and lays the sum out as the stream.
        """
        if self.stream.dim is None:
            return Border.enter_whole(self, x)
        length = shard_size(self.length_of(x), self.stream.parts)
        return gather(x, self.stream.dim, length, self.group)

    def enter_whole(self, x: torch.Tensor) -> torch.Tensor:
        """Bring `x` [B, L, H], whole on every rank, into a region, after the stream has ended."""
        return x if self.mesh is None else sum_gradients(x, self.group)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Sum the partial results `x` [B, L, H] of a region over the ranks: return this rank's shard [B, ceil(L / N), H]."""
        if self.stream.dim is None:
            return x if self.mesh is None else sum_ranks(x, self.group)
        return scatter_sum(x, self.stream.dim, self.group)

    def enter_plainly(self, x: torch.Tensor) -> torch.Tensor:
        """Enter in high precision, also at a border where `enter` casts to float8."""
        return Border.enter(self, x)

    def leave_plainly(self, x: torch.Tensor) -> torch.Tensor:
        """Leave so that gradients come back in high precision."""
        return Border.leave(self, x)

    def length_of(self, x: torch.Tensor) -> int:
        """Return the length of the whole sequence, given this rank's shard `x`."""
        if self.stream.dim is not None:
            return self.stream.length_of(x.shape[self.stream.dim], self.group[1])
        return self.length_of_own(x)
