"""The residual stream of a split model: where it begins, is sharded, is gathered and ends.

Between regions each rank holds its shard of the sequence (sequence parallelism, context parallelism or both), or all of it.
One forward passes these points. The hooks of the model, of the module that holds its blocks and of its first block are in
this file; those of the embedding, of `end_of_stream()` and of the head are in their styles, and call this class.

    start    the model is called, or the module that holds its blocks
    begin    every rank takes its shard: at the input of the first block, at the output of an embedding that begins the
             stream, or of `inputs_embeds`
    end      the shards are gathered: at an `end_of_stream()`, at the output of the module that holds the blocks if hidden
             states or a few logits were asked for, else at the head

Shards are equal. A sequence whose length is no multiple of the ranks is refused if gradients are wanted; without them its
forward runs in full: every rank holds all tokens between regions, and regions sum as they do without a sharded stream.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanplans.errors import PlanError
from titanplans.split.arguments import positional
from titanplans.split.collectives import Group, collect, take_shard
from titanplans.split.layout import StreamLayout
from titanplans.split.own_tokens import OwnTokens
from titanplans.text import class_name
from titanplans.torch_private.autograd import in_backward

_KEPT = ("logits_to_keep", "num_logits_to_keep")
_TOKENS = ("input_ids", "inputs_embeds")
_HIDDEN_STATES = ("last_hidden_state", "hidden_states")
End = Literal["embedding", "head"]


class Stream:
    """The residual stream of one split model.

    With B sequences of L tokens, hidden size D and N = tp x cp ranks over which tokens are sharded (cp without sequence
    parallelism), a shard is [B, L / N, D].

    Args:
        layout: whether tensor-parallel ranks shard the sequence, and which dimension of the hidden states it is.
        group: the tensor-parallel ranks, of which this is `rank`.
        tokens: the tokens of this rank under context parallelism.
    """

    def __init__(self, layout: StreamLayout, group: Group, rank: int, tokens: OwnTokens):
        self.group, self.rank, self.tokens = group, rank, tokens
        self.shards_sequence = layout.dim is not None or tokens.ranks > 1
        """A rank does not hold all tokens."""
        self.shards = (1 if layout.dim is None else group[1]) * tokens.ranks
        """Over how many ranks a sequence is sharded."""
        self.is_running = False
        """A forward has started, and its stream has not ended."""
        self.has_begun = False
        """The forward that runs has sharded its hidden states."""
        self.gathers_logits = False
        """The head gathers its logits, whatever the plan says."""
        self._dim = layout.dim
        self._in_full = self._trains = self._head_follows = False
        self._length = 0
        self._calls: dict[End, set[bool]] = {"embedding": set(), "head": set()}
        """Whether calls of the embedding and of the head that have a gradient were given shards."""

    @property
    def dim(self) -> int | None:
        """The dimension of hidden states that tensor-parallel ranks shard; None: each has all that its CP rank has."""
        return None if self._in_full else self._dim

    @property
    def runs_in_full(self) -> bool:
        """Whether every rank holds all tokens in the forward that runs, since shards of them would not be equal."""
        return self._in_full

    # A forward, in order.

    def start(self, length: int | None, *, head_follows: bool) -> None:
        """Start a forward of `length` tokens, if that is known, in which the head is called after the blocks or not."""
        self.is_running, self.has_begun, self._head_follows = True, False, head_follows
        # Asked here: inside of a reentrant checkpoint gradients are off.
        self._in_full, self._trains = False, torch.is_grad_enabled()
        if length is not None:
            self._refuse_unequal(length)  # already here: the first block may be a graph, which can't raise it

    def decide_sharding(self, length: int) -> None:
        """Decide whether the forward that runs, of `length` tokens, is sharded or runs in full.

        Raises:
            PlanError: it has a gradient, and the tokens can't be split equally.
        """
        self._length = length
        if length % self.shards:
            self._refuse_unequal(length)
            self._in_full = True
            self.tokens.region_shape = torch.Size()

    def _refuse_unequal(self, length: int) -> None:
        if self._trains and length % self.shards:
            without = "" if self.tokens.ranks > 1 else ", or set sequence_parallel = False"
            raise PlanError(
                f"a sequence of {length} tokens is no multiple of the {self.shards} ranks that it is sharded over in "
                f"training: pad sequences to a multiple of {self.shards} (pad_to_multiple_of of a collator, "
                f"training.seq_len of a job){without}; forwards under torch.no_grad() may have any length"
            )

    def note_embedding(self, length: int, *, begins: bool) -> None:
        """Note that `length` tokens are embedded, if a forward runs; `begins`: the embedding's output is the stream."""
        if self.is_running:
            self.decide_sharding(length)
            self.has_begun |= begins

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        """Begin the stream with `x` [B, L, D], the same on every rank: return this rank's shard.

        The work before is the same on every rank, and so is its gradient, which the backward gathers.
        """
        if self.shards_sequence:
            # A sharded sequence is asked for its shard: its shape would come of a function, which breaks a graph.
            dim, shard = self.tokens.dim, getattr(x, "shard", None)
            self.decide_sharding(x.shape[dim] if shard is None else shard.shape[dim] * self.tokens.ranks)
        self.has_begun = True
        if self._in_full and (numbers := getattr(x, "numbers", None)) is not None:
            return numbers()  # code has made a sequence that can't be split equally of one that could
        return self.shard(x)

    def end(self) -> None:
        """End the stream: from here on hidden states are full."""
        self.is_running = self._in_full = False

    # The two directions, between begin and end.

    def shard(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of `x` [B, L, D], which is the same on every rank."""
        if self._in_full:
            return x
        x = self.tokens.own(x)
        return x if self._dim is None else take_shard(x, self._dim, self.rank, self.group)

    def full(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, L, D] of the ranks' shards `x`, for work that is the same on every rank."""
        return x if self._in_full else self.tokens.gather(self.full_of_cp_rank(x))

    def full_of_cp_rank(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tokens of this rank of context parallelism, of the shards `x` that its tensor-parallel ranks hold."""
        if self.dim is None:
            return x
        return collect(x, self.dim, x.shape[self.dim] * self.group[1], self.rank, self.group)

    def all_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`, [batch x tokens, ...] or [batch, tokens, ..., width], with all tokens if it has a CP rank's alone.

        Anything else comes back as it is.
        """
        tokens = self.tokens
        if tokens.ranks == 1 or not x.is_floating_point() or not tokens.region_shape:
            return x
        batch, length = tokens.region_shape[:2]
        own = length // tokens.ranks
        if x.ndim > 2 and x.shape[:2] == (batch, own):
            return tokens.gather(x)
        if x.ndim > 0 and len(x) == batch * own:
            return tokens.gather(x.unflatten(0, (batch, own))).flatten(0, 1)
        return x

    # Questions.

    @property
    def is_sharded(self) -> bool:
        """Whether hidden states are shards at this point of the forward that runs."""
        return self.shards_sequence and self.is_running and not self._in_full

    def is_sharded_at(self, end: End) -> bool:
        """Whether the embedding, or the head, that is called now works on shards.

        Raises:
            PlanError: a backward computes the call again, and calls of both kinds had a gradient.
        """
        if not self.shards_sequence:
            return False
        calls = self._calls[end]
        if not self.is_running and not torch.compiler.is_compiling() and in_backward():
            if len(calls) > 1:
                raise PlanError(
                    f"a backward computes the {end} again, which was called on shards of a sequence in one forward and on "
                    "all of it in another: leave it out of checkpoints"
                )
            return calls == {True}
        is_sharded = self.is_sharded
        if self._trains if self.is_running else torch.is_grad_enabled():
            calls.add(is_sharded)
        return is_sharded

    def is_shard(self, x: torch.Tensor) -> bool:
        """Whether `x` has the size of a shard of the newest forward's hidden states [..., sequence, hidden]."""
        dim = self.tokens.dim
        if not self.shards_sequence or isinstance(x, DTensor) or x.ndim != dim + 2:
            return False
        return x.shape[dim] * self.shards == self._length

    @property
    def tokens_of_cp_rank(self) -> int | None:
        """How many tokens this rank of context parallelism has in the forward that runs; None: no forward runs."""
        return self._length // self.tokens.ranks if self.is_running else None

    def check_runs(self) -> None:
        """Refuse work on shards where no forward runs, nor a backward that computes one again.

        Raises:
            PlanError: so it is.
        """
        if not torch.compiler.is_compiling() and not self.is_running and not in_backward():
            raise PlanError(
                "with sequence parallelism a module of the model was called by itself, outside of a forward of the model, "
                "where nothing says how its input lies on the ranks: call the model, or set sequence_parallel = False"
            )


def follow_forwards(
    stream: Stream,
    model: nn.Module,
    base: nn.Module,
    begins_at: nn.Module | None,
    *,
    has_head: bool,
) -> None:
    """Let the forwards of `model` and of `base` start and end the stream, and the first block begin it.

    Args:
        stream: of the model.
        model: split.
        base: the module in it that holds the blocks, or `model` itself.
        begins_at: the first block, if each rank takes its shard there: everything before sees the full sequence, so what a
            model derives from its embeddings (positions, masks, where images stand) is right. None: the embedding begins the
            stream, and `inputs_embeds` are sharded as its output is.
        has_head: logits are made after the blocks.
    """
    if not stream.shards_sequence:
        return
    if begins_at is not None:
        begins_at.register_forward_pre_hook(partial(_begin_at_input, stream), with_kwargs=True)
    for module in (model,) if base is model else (model, base):
        start = partial(_start, stream, module is model, has_head, positional(module))
        module.register_forward_pre_hook(start, with_kwargs=True)
        if module is base and begins_at is None:
            begin = partial(_begin_at_inputs_embeds, stream, positional(module))
            module.register_forward_pre_hook(begin, with_kwargs=True)
        module.register_forward_hook(partial(_end, stream, module is model, has_head), always_call=True)


def keeps_some_logits(arguments: Mapping[str, Any]) -> str | None:
    """Return the argument by which a forward is asked for the logits of some tokens alone; None: of all tokens."""
    for name in _KEPT:
        kept = arguments.get(name)
        if kept is not None and not (isinstance(kept, int) and kept == 0):  # 0 asks for all
            return name
    return None


def _start(
    stream: Stream, is_model: bool, has_head: bool, names: tuple[str, ...], module: nn.Module, args, kwargs
):
    if is_model or not stream.is_running:  # else the model was called, and calls its base
        arguments = dict(zip(names, args, strict=False)) | kwargs
        tokens = next((arguments[name] for name in _TOKENS if arguments.get(name) is not None), None)
        dim = stream.tokens.dim
        length = tokens.shape[dim] if isinstance(tokens, torch.Tensor) and tokens.ndim > dim else None
        stream.start(length, head_follows=is_model and has_head and keeps_some_logits(arguments) is None)


def _begin_at_input(stream: Stream, block: nn.Module, args, kwargs):
    if stream.has_begun and stream.is_running:
        raise PlanError(
            f"{class_name(block)}, the first block, was called twice in a forward, and takes its shard of the sequence "
            "each time: set sequence_parallel = False"
        )
    if args:
        return (stream.begin(args[0]), *args[1:]), kwargs
    name = next((name for name in ("hidden_states", "x") if name in kwargs), None)
    if name is None:
        raise PlanError(
            f"{class_name(block)}, the first block, was called without a positional input and without 'hidden_states' "
            f"(got {', '.join(kwargs) or 'nothing'}): set sequence_parallel = False"
        )
    return args, {**kwargs, name: stream.begin(kwargs[name])}


def _begin_at_inputs_embeds(stream: Stream, names: tuple[str, ...], module: nn.Module, args, kwargs):
    arguments = dict(zip(names, args, strict=False)) | kwargs
    if (embedded := arguments.get("inputs_embeds")) is None:
        return None
    if stream.has_begun:
        raise PlanError(
            f"{class_name(module)} was called with inputs_embeds that the model has made in the same forward, from "
            "this rank's shard of an embedding that begins the stream: let its plan say vocab_embedding() without "
            "begins_stream, or make them before the model is called"
        )
    embedded = stream.begin(embedded)
    at = names.index("inputs_embeds") if "inputs_embeds" in names else len(args)
    if at < len(args):
        return (*args[:at], embedded, *args[at + 1 :]), kwargs
    return args, {**kwargs, "inputs_embeds": embedded}


def _end(stream: Stream, is_model: bool, has_head: bool, module: nn.Module, args, output):
    if output is None:  # the forward has failed
        stream.end()
        return None
    if isinstance(output, torch.Tensor | tuple):
        fields: Any = {}  # a compiler has no `__dict__` of a tensor
    else:
        fields = output if isinstance(output, dict) else getattr(output, "__dict__", {})
    asks_for_states = fields.get("hidden_states") is not None or isinstance(output, tuple)
    if not is_model and stream._head_follows and not asks_for_states:
        return None  # the head takes its shard
    gathered: dict[int, torch.Tensor] = {}
    if isinstance(output, torch.Tensor | tuple):
        output = output if is_model and has_head else _gathered(stream, output, gathered)
    else:
        for name in _HIDDEN_STATES:
            if (states := fields.get(name)) is not None:
                fields[name] = _gathered(stream, states, gathered)
        output = None
    stream.end()
    return output


def _gathered(stream: Stream, states: Any, gathered: dict[int, torch.Tensor]) -> Any:
    """Return `states`, a tensor or a tuple of them, with each shard gathered; equal tensors stay one."""
    if isinstance(states, tuple | list):
        full = [_gathered(stream, each, gathered) for each in states]
        kind: Any = type(states)
        return kind(full) if kind in (tuple, list) else kind(*full)  # a named tuple
    if not isinstance(states, torch.Tensor) or not stream.is_shard(states):
        return states
    if id(states) not in gathered:
        gathered[id(states)] = stream.full(states)
    return gathered[id(states)]


def begin_at_output(module: Any, stream: Stream) -> None:
    """Shard the output of `module`, a pipeline stage's stand-in for the embedding; what is received is a shard already."""

    def begin(_module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if not stream.is_sharded:
            return output
        shard = stream.begin(module.stand_in(args[0]))
        return output if module.is_received else shard

    module.register_forward_hook(begin)


def end_at_output(module: nn.Module, stream: Stream) -> None:
    """Let `module`, a stand-in for the module at which the stream ends, return zeros of the full sequence."""

    def end(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        if not stream.is_running or not stream.shards_sequence:
            return output
        shape = list(output.shape)
        if not stream.runs_in_full:
            shape[stream.tokens.dim] *= stream.shards
        stream.end()
        return output.new_zeros(shape)

    module.register_forward_hook(end)
