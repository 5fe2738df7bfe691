"""Models that users might write, by class name: `SUPPORTED` models run in pipeline stages, `REFUSED` models can't."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, LAYERS, VOCABULARY = 16, 4, 4096
SUPPORTED: dict[str, type[nn.Module]] = {}
REFUSED: dict[str, tuple[type[nn.Module], str]] = {}
"""By class, a regular expression that matches the refusal of the model."""


class Block(nn.Module):
    """A residual block that mixes tokens, after adding the tensors `more` to its input."""

    def __init__(self, index=0):
        super().__init__()
        self.index = index
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x, *more):
        y = self.norm(sum(more, x)).cumsum(1) / 4
        return x + self.down(F.silu(self.up(y)))


class Model(nn.Module):
    """An embedding, blocks, a norm and a head."""

    Block = Block

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(self.Block(index) for index in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.add()

    def add(self):
        """Add further modules. Models that need some override this."""

    def forward(self, input_ids):
        return self.lm_head(self.norm(self.body(self.embed(input_ids), input_ids)))

    def body(self, x, ids):
        for layer in self.layers:
            x = layer(x)
        return x


def supported(cls):
    SUPPORTED[cls.__name__] = cls
    return cls


def refused(pattern):
    def add(cls):
        REFUSED[cls.__name__] = cls, pattern
        return cls

    return add


@supported
class Plain(Model):
    pass


@supported
class EmbeddingInEachBlock(Model):
    def body(self, x, ids):
        x0 = x
        for layer in self.layers:
            x = layer(x, x0)
        return x


@supported
class EmbeddingAtTheHead(Model):
    def body(self, x, ids):
        return super().body(x, ids) + 0.5 * x


@supported
class DetachedEmbeddingAtTheHead(Model):
    def body(self, x, ids):
        return super().body(x, ids) + x.detach()


@supported
class ValueEmbeddings(Model):
    def add(self):
        self.values = nn.Embedding(VOCABULARY, WIDTH)

    def body(self, x, ids):
        values = self.values(ids)
        for at, layer in enumerate(self.layers):
            x = layer(x, values) if at in (0, 3) else layer(x)
        return x


@supported
class NormOfTheEmbedding(Model):
    def add(self):
        self.first_norm = nn.LayerNorm(WIDTH)

    def body(self, x, ids):
        x = x0 = self.first_norm(x)
        for layer in self.layers:
            x = layer(x, x0)
        return x


@supported
class NormBeforeAndAfter(Model):
    def body(self, x, ids):
        x = x0 = self.norm(x)
        for layer in self.layers:
            x = layer(x, x0)
        return x


@supported
class MaskOfEmbeddings(Model):
    def body(self, x, ids):
        mask = (x.sum(-1, keepdim=True) > 0).to(x.dtype)
        for layer in self.layers:
            x = layer(x, mask)
        return x


@supported
class Conditioned(Model):
    def add(self):
        self.condition = nn.Linear(WIDTH, WIDTH)

    def body(self, x, ids):
        condition = self.condition(x.mean(1, keepdim=True))
        for layer in self.layers:
            x = layer(x, condition)
        return x


@supported
class InputsOfEachLayer(Model):
    def add(self):
        self.project = nn.Linear(WIDTH, LAYERS * WIDTH)
        self.each = nn.Embedding(VOCABULARY, LAYERS * WIDTH)
        self.each_norm = nn.LayerNorm(WIDTH)

    def body(self, x, ids):
        inputs = self.each_norm(self.project(x).unflatten(-1, (LAYERS, WIDTH)))
        inputs = inputs + self.each(ids).unflatten(-1, (LAYERS, WIDTH))
        for at, layer in enumerate(self.layers):
            x = layer(x, inputs[..., at, :])
        return x


@supported
class FirstBlockAtTheHead(Model):
    def body(self, x, ids):
        states = []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        return x + states[0]


@supported
class SumOfAllStates(Model):
    def add(self):
        self.weights = nn.Parameter(torch.rand(LAYERS + 1))

    def body(self, x, ids):
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return (torch.stack(states, -1) * self.weights).sum(-1)


class GrowingBlock(Block):
    def forward(self, x, *before):
        return super().forward(x, *before), *before, x


@supported
class GrowingTuples(Model):
    Block = GrowingBlock

    def body(self, x, ids):
        state = (x,)
        for layer in self.layers:
            state = layer(*state)
        return sum(state)


@supported
class Skips(Model):
    def body(self, x, ids):
        skips = []
        for at, layer in enumerate(self.layers):
            x = layer(x) if at < LAYERS // 2 else layer(x, skips.pop())
            if at < LAYERS // 2:
                skips.append(x)
        return x


@supported
class Tied(Model):
    def add(self):
        self.lm_head.weight = self.embed.weight


class DictBlock(Block):
    def forward(self, hidden, index):
        return {"hidden": super().forward(hidden), "index": index + 1}


@supported
class DictsByKeyword(Model):
    Block = DictBlock

    def body(self, x, ids):
        state = {"hidden": x, "index": 0}
        for layer in self.layers:
            state = layer(**state)
        return state["hidden"] * state["index"]


@supported
class ParallelBlocks(Model):
    def body(self, x, ids):
        first, second, third, fourth = self.layers
        x = x + first(x) + second(x)
        return x + third(x) + fourth(x)


@supported
class LearnedPositions(Model):
    def add(self):
        self.positions = nn.Parameter(torch.randn(1, 64, WIDTH))

    def body(self, x, ids):
        x = x0 = x * WIDTH**0.5 + self.positions[:, : x.shape[1]]
        for layer in self.layers:
            x = layer(x, x0)
        return x


@supported
class EmbeddedTwice(Model):
    def body(self, x, ids):
        before = self.embed(ids.roll(1, 1))
        for layer in self.layers:
            x = layer(x, before)
        return x


class MovingBlock(Block):
    def __init__(self, index=0):
        super().__init__(index)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x, *more):
        if self.training:
            self.mean.mul_(0.5).add_(x.detach().mean((0, 1)), alpha=0.5)
        return super().forward(x - self.mean, *more)


@supported
class MovingBuffers(Model):
    Block = MovingBlock


@supported
class CountingBuffer(Model):
    def add(self):
        self.register_buffer("count", torch.zeros(()))

    def body(self, x, ids):
        self.count += 1
        return super().body(x, ids) / self.count


@supported
class ReturnsAnObject(Model):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        last = self.body(x, input_ids)
        return SimpleNamespace(logits=self.lm_head(self.norm(last + x)), hidden=(x, last))


@supported
class WrittenInPlace(Model):
    def body(self, x, ids):
        shifted = torch.zeros_like(x)
        shifted[:, 1:] = x[:, :-1]
        for layer in self.layers:
            x = layer(x, shifted)
        return x


@supported
class CachedPositions(Model):
    def add(self):
        self.cached = None

    def body(self, x, ids):
        if self.cached is None:
            self.cached = torch.arange(x.shape[1], device=x.device)[None, :, None] / 10
        for layer in self.layers:
            x = layer(x, self.cached)
        return x


@supported
class MaskOfShapeAlone(Model):
    def body(self, x, ids):
        mask = torch.ones_like(x[..., :1]).cumsum(1)
        for layer in self.layers:
            x = layer(x, mask)
        return x


@supported
class CountsBlocks(Model):
    def body(self, x, ids):
        done = SimpleNamespace(count=0)
        hooks = [
            layer.register_forward_hook(lambda *_: setattr(done, "count", done.count + 1))
            for layer in self.layers
        ]
        for layer in self.layers:
            x = layer(x, torch.full_like(x, done.count))
        for hook in hooks:
            hook.remove()
        return x


@refused("calls layers.0 when block 4 is due")
class LoopedTwice(Model):
    def body(self, x, ids):
        return super().body(super().body(x, ids), ids)


@refused("calls layers.1 when block 3 is due")
class MiddleLooped(Model):
    def body(self, x, ids):
        for at in (0, 1, 2, 1, 2, 3):
            x = self.layers[at](x)
        return x


@refused("calls layers.3 when block 0 is due")
class Backwards(Model):
    def body(self, x, ids):
        for layer in reversed(self.layers):
            x = layer(x)
        return x


@refused("does not call layers.3")
class SkippedBlock(Model):
    def body(self, x, ids):
        for layer in self.layers[:-1]:
            x = layer(x)
        return x


@refused("its second forward differs")
class CountsForwards(Model):
    def add(self):
        self.count = 0

    def body(self, x, ids):
        self.count += 1
        return super().body(x, ids) / self.count


class CountingBlock(Block):
    calls = 0

    def forward(self, x, *more):
        self.calls += 1
        return super().forward(x * self.calls, *more)


@refused("its second forward differs")
class BlocksCountForwards(Model):
    Block = CountingBlock


class KeepingBlock(Block):
    def forward(self, x, *more):
        if self.index == 0:
            self.shared.first = x.sin()
        return super().forward(x, getattr(self.shared, "first", torch.zeros_like(x)))


@refused("layers.2 computes other results")
class StateWithADefault(Model):
    Block = KeepingBlock

    def add(self):
        for layer in self.layers:
            layer.shared = SimpleNamespace()

    def body(self, x, ids):
        shared = SimpleNamespace()
        for layer in self.layers:
            layer.shared = shared
        return super().body(x, ids)


class ReadingBlock(Block):
    def forward(self, x, *more):
        if self.index == 0:
            self.shared["first"] = x
        return super().forward(x, self.shared["first"])


@refused("stage 1 of 2 has only its own modules .* ends with: KeyError: 'first'")
class FirstBlockInADict(Model):
    Block = ReadingBlock

    def body(self, x, ids):
        shared = {}
        for layer in self.layers:
            layer.shared = shared
        return super().body(x, ids)


GLOBAL: dict = {}


class GlobalBlock(Block):
    shared = GLOBAL

    def forward(self, x, *more):
        if self.index == 0:
            self.shared["first"] = x
        return super().forward(x, self.shared["first"])


@refused("layers.2 computes other results")
class FirstBlockInAGlobal(Model):
    Block = GlobalBlock


class AppendingBlock(Block):
    def forward(self, x, *more):
        y = super().forward(x)
        self.seen.append(y)
        return y


@refused("the logits are made of values that only another stage has")
class ListOfStates(Model):
    Block = AppendingBlock

    def body(self, x, ids):
        seen = []
        for layer in self.layers:
            layer.seen = seen
        return super().body(x, ids) + sum(seen)


@refused("layers.2 gets other arguments|logits are made of")
class AsksForAClass(Model):
    def body(self, x, ids):
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer, Block):
                x = 2 * x
        return x


@refused("draws random numbers .aten.bernoulli|draws random numbers .aten.native_dropout")
class FunctionalDropout(Model):
    def body(self, x, ids):
        return F.dropout(super().body(x, ids), 0.5, self.training)


@refused("draws random numbers .aten.randn")
class Noise(Model):
    def body(self, x, ids):
        return super().body(x + 0.1 * torch.randn_like(x), ids)


@dataclass
class State:
    x: torch.Tensor


class DataclassBlock(Block):
    def forward(self, state):
        return State(super().forward(state.x))


@refused("layers.0 returns a State")
class Dataclasses(Model):
    Block = DataclassBlock

    def body(self, x, ids):
        return super().body(State(x), ids).x


class PeekingBlock(Block):
    def forward(self, x, *more):
        following = self.following[0]
        return super().forward(x if following is None else following.norm(x))


@refused("stage 0 of 2 has only its own modules|gets other arguments")
class ReadsTheNextBlock(Model):
    Block = PeekingBlock

    def body(self, x, ids):
        for at, layer in enumerate(self.layers):
            layer.following = [self.layers[at + 1] if at + 1 < LAYERS else None]
        return super().body(x, ids)


@refused("converts hidden states to a Python number")
class BranchesOnStates(Model):
    def body(self, x, ids):
        for layer in self.layers:
            x = layer(x)
            if x.mean() > 0:
                x = -x
        return x


@refused("converts hidden states to a Python number")
class BranchesOnEmbeddings(Model):
    def body(self, x, ids):
        scale = 2 if x.mean() > 0 else 1
        return scale * super().body(x, ids)


@refused("mean changes differently")
class MovingBufferOfEmbeddings(Model):
    def add(self):
        self.register_buffer("mean", torch.zeros(WIDTH))

    def body(self, x, ids):
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return super().body(x, ids)


class InPlaceBlock(Block):
    def forward(self, x, *more):
        return x.add_(super().forward(x) - x)


@refused("ends with: RuntimeError: a leaf Variable that requires grad")
class InPlaceBlocks(Model):
    Block = InPlaceBlock


@refused("draws random numbers")
class DropsLayers(Model):
    def body(self, x, ids):
        for layer in self.layers:
            if not self.training or torch.rand([]) >= 0.0:
                x = layer(x)
        return x


@refused("embed.weight gets a gradient of zeros, but gets no gradient in the unsplit model")
class DetachesAtTheBorder(Model):
    def body(self, x, ids):
        for at, layer in enumerate(self.layers):
            x = layer(x.detach() if at == 2 else x)
        return x


class SizingBlock(Block):
    def forward(self, x, *sizes):
        return super().forward(x) / (1 + sum(sizes)), len(x)


@refused("layers.2 gets other arguments")
class ReturnsTheBatchSize(Model):
    Block = SizingBlock

    def body(self, x, ids):
        state = (x,)
        for layer in self.layers:
            state = layer(*state)
        return state[0]


class ReadingValues(Block):
    def forward(self, x, *scales):
        y = super().forward(x) * (1 + sum(scales))
        return y, y.detach().abs().max().item()


@refused("layers.0 converts a tensor to a Python number and returns 0, which other stages can't know")
class ReturnsAValue(Model):
    Block = ReadingValues

    def body(self, x, ids):
        state = (x,)
        for layer in self.layers:
            state = layer(*state)
        return state[0]


@supported
class PaddingTakenOut(Model):
    def body(self, x, ids):
        is_text = ids != 0
        if not is_text.all():
            x = x * is_text.unsqueeze(-1)
        return super().body(x, ids)


@refused("the logits are made of values that only another stage has")
class EmbeddingsOfPadding(Model):
    def body(self, x, ids):
        last = super().body(x, ids)
        if (ids == 0).any():
            last = last + x
        return last


class MixtureOfDepths(Block):
    def __init__(self, index=0):
        super().__init__(index)
        self.router = nn.Linear(WIDTH, 1)

    def forward(self, x, *more):
        keep = self.router(x) > 0
        return torch.where(keep, super().forward(x), x) if keep.any() else x


@supported
class SkipsTokens(Model):
    Block = MixtureOfDepths


class FlagBlock(Block):
    high = False

    def forward(self, x, *more):
        self.high = bool(x.std() > 0.1)
        return super().forward(x)


@refused("'StandInBlock' object has no attribute 'high'")
class FlagOfABlock(Model):
    Block = FlagBlock

    def body(self, x, ids):
        for layer in self.layers:
            x = layer(x)
            if layer.high:
                x = 2 * x
        return x


@refused("the logits are made of values that only another stage has|layers.2 gets other arguments")
class EmbeddedBySequence(Model):
    def forward(self, input_ids):
        x = torch.stack([self.embed(row) for row in input_ids])
        return self.lm_head(self.norm(self.body(x, input_ids) + x))


@refused("the logits are made of values that only another stage has")
class LoopsOverIds(Model):
    def body(self, x, ids):
        y = super().body(x, ids)
        for _ in range(int(ids.max() % 3)):
            y = y + x
        return y


@refused("more than 100,000 times")
class WaitsForAValue(Model):
    def body(self, x, ids):
        seen = torch.zeros_like(ids)
        while not (seen > 2).all():
            seen = seen + 1
        return super().body(x, ids)


@refused("layers.1 is called inside torch.utils.checkpoint")
class CheckpointedPair(Model):
    def body(self, x, ids):
        first, second, third, fourth = self.layers
        x = checkpoint(lambda x: third(second(x)), first(x), use_reentrant=False)
        return fourth(x)


@refused("layers.0 is called inside torch.utils.checkpoint")
class ReentrantCheckpoints(Model):
    def body(self, x, ids):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


@refused("the gradient of an argument of layers.1 has a hook")
class HookedGradients(Model):
    def body(self, x, ids):
        for layer in self.layers:
            x = layer(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 0.5)
        return x


@refused("the gradient of an argument of layers.0 has a hook")
class HookedModules(Model):
    def add(self):
        for layer in self.layers:
            layer.register_full_backward_hook(halve)


def halve(_module, gradients, _outputs):
    return (gradients[0] * 0.5,)


@refused("the logits are made of values that only another stage has|has only its own modules")
class TiedByAnAttribute(Model):
    def add(self):
        self.tied = [self.embed.weight]

    def forward(self, input_ids):
        return F.linear(self.norm(self.body(self.embed(input_ids), input_ids)), self.tied[0])


class CountingTensors(Block):
    def forward(self, x, *more):
        self.seen.append(self.index)
        return super().forward(x * torch.tensor(1.0 / len(self.seen), device=x.device, dtype=x.dtype))


@refused("layers.2 computes other results")
class CountsInATensor(Model):
    Block = CountingTensors

    def body(self, x, ids):
        seen = []
        for layer in self.layers:
            layer.seen = seen
        return super().body(x, ids)


class MovingParameter(Block):
    def forward(self, x, *more):
        y = super().forward(x) * self.gain
        if self.index == LAYERS - 1 and self.training:
            with torch.no_grad():
                self.gain.mul_(0.5)
        return y.clone()


@refused("gain changes differently|RuntimeError")
class MovesASharedParameter(Model):
    Block = MovingParameter

    def add(self):
        gain = nn.Parameter(torch.ones(()))
        for layer in self.layers:
            layer.gain = gain


@supported
class ConstantsOnTheWay(Model):
    def body(self, x, ids):
        for layer in self.layers:
            x = layer(x * torch.tensor(0.5, device=x.device, dtype=x.dtype), x[:, [0, 3, 1, 2, 4, 5, 6, 7]])
        return x


class ChunkingBlock(Block):
    def forward(self, x, *more):
        return super().forward(torch.cat([x, *more], -1)).chunk(2, -1)


@supported
class Chunks(Model):
    Block = ChunkingBlock

    def body(self, x, ids):
        chunks = (x,)
        for layer in self.layers:
            chunks = layer(*chunks)
        return torch.cat(chunks, -1)
