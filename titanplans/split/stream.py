"""The residual stream of a split model: where it begins, is sharded, is gathered and ends. Start at `Stream`.

Between regions each rank holds its shard of the sequence (sequence parallelism, context parallelism or both), or all of
it. One forward passes these points:

    start    the model is called, or the module that holds its blocks
    begin    each rank takes its shard: of the input of the first block, of the output of an embedding that begins the
             stream, or of `inputs_embeds`
    end      the shards are gathered: at `end_of_stream()`; or at the output of the module that holds the blocks, if the
             call asks for hidden states or for only some logits; else at the head

The hooks of the model, of the module that holds its blocks and of its first block are in this file. Those of the
embedding, of `end_of_stream()` and of the head are in their styles.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanplans.errors import PlanError
from titanplans.split.arguments import positional
from titanplans.split.collectives import Group, gather_replicated, take_shard
from titanplans.split.layout import StreamLayout
from titanplans.split.local_tokens import LocalTokens
from titanplans.text import class_name
from titanplans.torch_private.autograd import in_backward

_KEPT = ("logits_to_keep", "num_logits_to_keep")
_TOKENS = ("input_ids", "inputs_embeds")
_HIDDEN_STATES = ("last_hidden_state", "hidden_states")
End = Literal["embedding", "head"]


class Stream:
    """The residual stream of one split model.

    With B sequences of L tokens, hidden size D and N ranks over which tokens are sharded (tp x cp; cp alone without
    sequence parallelism), a shard is [B, L / N, D]. Shards are equal. In training, a sequence length that is not a
    multiple of N is refused. Without gradients, a forward of such a length runs in full: every rank holds all tokens
    between regions, and regions sum their outputs as they do without a sharded stream.

    Args:
        layout: whether tensor-parallel ranks shard the sequence, and which dimension of the hidden states it is.
        group: the tensor-parallel ranks.
        rank: this rank's index in `group`.
        tokens: the local tokens of this rank under context parallelism.
    """

    def __init__(self, layout: StreamLayout, group: Group, rank: int, tokens: LocalTokens):
        self.group, self.rank, self.tokens = group, rank, tokens
        self.shards_sequence = layout.dim is not None or tokens.ranks > 1
        """Between regions this rank holds only some of the tokens."""
        self.shards = (1 if layout.dim is None else group[1]) * tokens.ranks
        """Number of ranks that a sequence is sharded over."""
        self.is_running = False
        """A forward has started, and its stream has not ended."""
        self.has_begun = False
        """The current forward has sharded its hidden states."""
        self.gathers_logits = False
        """The head gathers its logits, even if the plan keeps them sharded."""
        self._dim = layout.dim
        self._in_full = self._trains = self._head_follows = False
        self._length = 0
        self._calls: dict[End, set[bool]] = {"embedding": set(), "head": set()}
        """The values that `is_sharded` had in calls with a gradient; with two values, a recomputation is ambiguous."""

    @property
    def dim(self) -> int | None:
        """The dimension of hidden states that tensor-parallel ranks shard; None: each has all tokens of its CP rank."""
        return None if self._in_full else self._dim

    @property
    def runs_in_full(self) -> bool:
        """Whether in the current forward every rank holds all tokens, since the tokens can't be split equally."""
        return self._in_full

    # One forward, in order.

    def start(self, length: int | None, *, head_follows: bool) -> None:
        """Start a forward of `length` tokens, None if unknown; `head_follows`: the head is called after the blocks."""
        self.is_running, self.has_begun, self._head_follows = True, False, head_follows
        # Noted here, because gradients are off inside a reentrant checkpoint.
        self._in_full, self._trains = False, torch.is_grad_enabled()
        if length is not None:
            # Refused this early, since a compiled first block can't raise the error.
            self._refuse_unequal(length)

    def decide_sharding(self, length: int) -> None:
        """Decide whether the current forward, of `length` tokens, is sharded or runs in full.

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
                f"a sequence length of {length} is not a multiple of {self.shards}, the number of ranks that shard a "
                f"sequence in training: pad sequences to a multiple of {self.shards} (pad_to_multiple_of of a collator, "
                f"training.seq_len of a job){without}; forwards under torch.no_grad() may have any length"
            )

    def note_embedding(self, length: int, *, begins: bool) -> None:
        """Note that the current forward embeds `length` tokens; `begins`: the embedding's output begins the stream."""
        if self.is_running:
            self.decide_sharding(length)
            self.has_begun |= begins

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        """Begin the stream with `x` [B, L, D], replicated: return this rank's shard.

        Earlier work is the same on every rank, so its gradient has to be the same, too: the backward gathers it.
        """
        if self.shards_sequence:
            # The shape of a ShardedSequence is computed by a Python function, which would break a compiled graph. The shape
            # of its `shard`, an attribute, would not.
            dim, shard = self.tokens.dim, getattr(x, "shard", None)
            self.decide_sharding(x.shape[dim] if shard is None else shard.shape[dim] * self.tokens.ranks)
        self.has_begun = True
        if self._in_full and (to_full := getattr(x, "to_full", None)) is not None:
            # The model's code has changed the length of a ShardedSequence to one that can't be split equally.
            return to_full()
        return self.shard(x)

    def end(self) -> None:
        """End the stream: from here on hidden states are full on every rank."""
        self.is_running = self._in_full = False

    # Conversions between shards and the full sequence, between begin and end.

    def shard(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of `x` [B, L, D], which is replicated."""
        if self._in_full:
            return x
        x = self.tokens.take_local(x)
        return x if self._dim is None else take_shard(x, self._dim, self.rank, self.group)

    def full(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the ranks' shards `x` to [B, L, D], for work that is the same on every rank."""
        return x if self._in_full else self.tokens.gather(self.full_of_cp_rank(x))

    def full_of_cp_rank(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the shards `x` of the tensor-parallel ranks to all tokens of this CP rank."""
        if self.dim is None:
            return x
        return gather_replicated(x, self.dim, x.shape[self.dim] * self.group[1], self.rank, self.group)

    def all_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Gather `x` over the CP ranks if it has only local tokens; return any other tensor unchanged.

        `x` is recognised by its shape: [batch x tokens, ...] or [batch, tokens, ..., width], floating point.
        """
        tokens = self.tokens
        if tokens.ranks == 1 or not x.is_floating_point() or not tokens.region_shape:
            return x
        batch, length = tokens.region_shape[:2]
        local = length // tokens.ranks
        if x.ndim > 2 and x.shape[:2] == (batch, local):
            return tokens.gather(x)
        if x.ndim > 0 and len(x) == batch * local:
            return tokens.gather(x.unflatten(0, (batch, local))).flatten(0, 1)
        return x

    # State of the current forward.

    @property
    def is_sharded(self) -> bool:
        """Whether hidden states are sharded at this point of the current forward."""
        return self.shards_sequence and self.is_running and not self._in_full

    def is_sharded_at(self, end: End) -> bool:
        """Whether the current call of the embedding, or of the head, works on shards.

        Raises:
            PlanError: a backward recomputes the call, and can't tell whether it was on shards: earlier calls were of
                both kinds.
        """
        if not self.shards_sequence:
            return False
        calls = self._calls[end]
        if not self.is_running and not torch.compiler.is_compiling() and in_backward():
            if len(calls) > 1:
                raise PlanError(
                    f"a backward recomputes the {end}, which was called on shards of a sequence in one forward and on "
                    "all of it in another: exclude it from activation checkpointing"
                )
            return calls == {True}
        is_sharded = self.is_sharded
        if self._trains if self.is_running else torch.is_grad_enabled():
            calls.add(is_sharded)
        return is_sharded

    def is_shard(self, x: torch.Tensor) -> bool:
        """Whether `x` has the size of a shard of the latest forward's hidden states [..., sequence, hidden]."""
        dim = self.tokens.dim
        if not self.shards_sequence or isinstance(x, DTensor) or x.ndim != dim + 2:
            return False
        return x.shape[dim] * self.shards == self._length

    @property
    def tokens_of_cp_rank(self) -> int | None:
        """Number of local tokens of this CP rank in the current forward; None: no forward runs."""
        return self._length // self.tokens.ranks if self.is_running else None

    def check_runs(self) -> None:
        """Refuse work on shards unless a forward runs, or a backward that recomputes a forward.

        Raises:
            PlanError: neither runs.
        """
        if not torch.compiler.is_compiling() and not self.is_running and not in_backward():
            raise PlanError(
                "with sequence parallelism a module of the model was called by itself, outside of a forward of the model, "
                "so the sharding of its input is unknown: call the model, or set sequence_parallel = False"
            )


def follow_forwards(
    stream: Stream,
    model: nn.Module,
    base: nn.Module,
    begins_at: nn.Module | None,
    *,
    has_head: bool,
) -> None:
    """Install hooks: forwards of `model` and of `base` start and end the stream, and the first block begins it.

    Args:
        stream: the stream of the model.
        model: the split model.
        base: the module in it that holds the blocks, or `model` itself.
        begins_at: the first block, if each rank takes its shard there. Then all earlier code sees the full sequence, so
            anything that a model derives from its embeddings (positions, masks, the positions of images) is correct.
            None: the embedding begins the stream, and `inputs_embeds` are sharded as its output is.
        has_head: the model computes logits after the blocks.
    """
    if not stream.shards_sequence:
        return
    if begins_at is not None:
        # Before the hooks of the block's styles, which work on shards.
        begin = partial(_begin_at_input, stream)
        begins_at.register_forward_pre_hook(begin, with_kwargs=True, prepend=True)
    for module in (model,) if base is model else (model, base):
        start = partial(_start, stream, module is model, has_head, positional(module))
        module.register_forward_pre_hook(start, with_kwargs=True)
        if module is base and begins_at is None:
            begin = partial(_begin_at_inputs_embeds, stream, positional(module))
            module.register_forward_pre_hook(begin, with_kwargs=True)
        module.register_forward_hook(partial(_end, stream, module is model, has_head), always_call=True)


def keeps_some_logits(arguments: Mapping[str, Any]) -> str | None:
    """Return the name of the argument that asks a forward for the logits of only some tokens; None: it asks for all."""
    for name in _KEPT:
        kept = arguments.get(name)
        if kept is not None and not (isinstance(kept, int) and kept == 0):  # 0 asks for all
            return name
    return None


def _start(
    stream: Stream, is_model: bool, has_head: bool, names: tuple[str, ...], module: nn.Module, args, kwargs
):
    if is_model or not stream.is_running:  # skipped if the model has started the stream and calls its base
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
            f"{class_name(module)} got inputs_embeds that are sharded already, because the model computed them from an "
            "embedding that begins the stream: use vocab_embedding() without begins_stream in the plan, or compute "
            "inputs_embeds before the model is called"
        )
    embedded = stream.begin(embedded)
    index = names.index("inputs_embeds") if "inputs_embeds" in names else len(args)
    if index < len(args):
        return (*args[:index], embedded, *args[index + 1 :]), kwargs
    return args, {**kwargs, "inputs_embeds": embedded}


def _end(stream: Stream, is_model: bool, has_head: bool, module: nn.Module, args, output):
    if output is None:  # the forward raised: with always_call the hook is called even then
        stream.end()
        return None
    if isinstance(output, torch.Tensor | tuple):
        fields: Any = {}  # a compiler can't trace a tensor's `__dict__`
    else:
        fields = output if isinstance(output, dict) else getattr(output, "__dict__", {})
    asks_for_states = fields.get("hidden_states") is not None or isinstance(output, tuple)
    if not is_model and stream._head_follows and not asks_for_states:
        return None  # the hidden states stay sharded; the head ends the stream
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
    """Gather each shard in `states`, a tensor or a tuple of tensors; a tensor that occurs twice is gathered once."""
    if isinstance(states, tuple | list):
        full = [_gathered(stream, each, gathered) for each in states]
        kind: Any = type(states)
        return kind(full) if kind in (tuple, list) else kind(*full)  # a NamedTuple
    if not isinstance(states, torch.Tensor) or not stream.is_shard(states):
        return states
    if id(states) not in gathered:
        gathered[id(states)] = stream.full(states)
    return gathered[id(states)]


def begin_at_output(module: Any, stream: Stream) -> None:
    """Shard the output of `module`, a pipeline stage's stand-in for the embedding, unless it is a received shard."""

    def begin(_module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if not stream.is_sharded:
            return output
        shard = stream.begin(module.stand_in(args[0]))
        return output if module.is_received else shard

    module.register_forward_hook(begin)


def end_at_output(module: nn.Module, stream: Stream) -> None:
    """Make `module`, a stand-in for the module that ends the stream, end the stream and return zeros of all tokens."""

    def end(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        if not stream.is_running or not stream.shards_sequence:
            return output
        shape = list(output.shape)
        if not stream.runs_in_full:
            shape[stream.tokens.dim] *= stream.shards
        stream.end()
        return output.new_zeros(shape)

    module.register_forward_hook(end)
