"""Every way to call the forward of a split model gives the results of the unsplit model, or is refused.

Ranks are threads of this process; the unsplit model runs next to them, on the same weights.
"""

import copy
import inspect
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests import zoo
from tests.support import step_comparison
from tests.support.process_groups import run_on_threads
from tests.support.tiny_model import Tiny, TinyPlan, changed
from tests.zoo import plan
from titanplans import Degrees, PlanError, apply_plan, check_plan
from titanplans.errors import ParallelError
from titanplans.loss import added_loss
from titanplans.parallel import cross_entropy

NAMES = ("llama", "gemma3_text", "gla")


def on_ranks(work, name="llama", model=None, **options):
    """Run `work(split, unsplit)` on two ranks, with the model called `name`."""
    unsplit = zoo.build(name, options=False) if model is None else model

    def start(rank):
        split = copy.deepcopy(unsplit)
        plan = TinyPlan if isinstance(unsplit, Tiny) else None
        apply_plan(split, rank.mesh, **{"loss_parallel": False, "plan": plan} | options)
        work(split, copy.deepcopy(unsplit))

    run_on_threads(start)


def same(split, unsplit):
    """Check equality up to rounding; Gemma's norms and softmax round to float32."""
    assert split.shape == unsplit.shape
    assert torch.dist(step_comparison.full_copy(split), unsplit) <= 1e-5 * unsplit.norm()


def same_gradients(split, unsplit):
    for (name, mine), theirs in zip(split.named_parameters(), unsplit.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            same(mine.grad, theirs.grad)


def compare(loss):
    """Return a `work` that compares the tensor `loss(model)`, and the gradients of its sum, with the unsplit model's."""

    def work(split, unsplit):
        outputs = [loss(model) for model in (split, unsplit)]
        same(*outputs)
        for output in outputs:
            output.sum().backward()
        same_gradients(split, unsplit)

    return work


def ids(length=8, batch=2, vocabulary=96):
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_are_full(name):
    def states_and_logits(model):
        output = model(ids(), output_hidden_states=True)
        return torch.cat(
            [output.logits.square().flatten(), *(h.sin().flatten() for h in output.hidden_states)]
        )

    on_ranks(compare(states_and_logits), name)


def heads(model):
    """Return a value head's loss on hidden states of the base model, which is called directly."""
    return model.model(ids()).last_hidden_state.cos().mean()


class States(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor
    third: torch.Tensor


class Dict(Tiny):
    """Returns a dict with hidden states in a named tuple, from the module that has both blocks and head."""

    def forward(self, input_ids):
        states = [self.embed(input_ids)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return {"logits": self.lm_head(self.norm(states[-1])), "hidden_states": States(*states)}


def test_hidden_states_in_other_forms():
    def dicts(split, unsplit):
        mine, theirs = (model(ids(8, vocabulary=32)) for model in (split, unsplit))
        for a, b in zip(mine["hidden_states"], theirs["hidden_states"], strict=True):
            same(a, b)
        assert isinstance(mine["hidden_states"], States)
        same(mine["logits"], theirs["logits"])

    def tuples(split, unsplit):
        mine, theirs = (
            m(ids(), output_hidden_states=True, return_dict=False, use_cache=False) for m in (split, unsplit)
        )
        same(mine[0], theirs[0])
        for a, b in zip(mine[-1], theirs[-1], strict=True):
            same(a, b)

    torch.manual_seed(0)
    on_ranks(dicts, model=Dict())
    on_ranks(tuples)
    on_ranks(tuples, "gla")


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_base_called_by_itself_returns_full_hidden_states(name, sequence_parallel):
    on_ranks(compare(heads), name, sequence_parallel=sequence_parallel)


def prompted(model, prompt, to):
    """Return the logits of soft prompts followed by embedded tokens. `to` calls the full model, or its base model and its
    head."""
    embedded = model.get_input_embeddings()(ids())
    embedded.retain_grad()
    return to(model, torch.cat([prompt.expand(2, -1, -1), embedded], 1)), embedded


CALLED = {
    "model": lambda model, x: model(inputs_embeds=x).logits,
    "base": lambda model, x: model.lm_head(model.model(inputs_embeds=x).last_hidden_state),
    "base, by position": lambda model, x: model.lm_head(model.model(*_before_embeds(model), x)[0]),
}


def _before_embeds(model):
    names = list(inspect.signature(model.model.forward).parameters)
    return [None] * names.index("inputs_embeds")


@pytest.mark.parametrize("to", CALLED)
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_embeddings_outside_of_a_forward_and_soft_prompts(name, sequence_parallel, to):
    """The embedding returns the full sequence, `inputs_embeds` is a full sequence, and both get full gradients."""

    def work(split, unsplit):
        results = []
        for model in (split, unsplit):
            model(ids(10))  # an earlier forward of another length
            prompt = torch.linspace(-1, 1, 4 * 64).sin().view(1, 4, 64).to(next(unsplit.parameters()).dtype)
            logits, embedded = prompted(model, prompt.requires_grad_(), CALLED[to])
            logits.square().mean().backward()
            results.append((logits, embedded, embedded.grad, prompt.grad))
        for mine, theirs in zip(*results, strict=True):
            same(mine, theirs.detach())
        same_gradients(split, unsplit)

    on_ranks(work, name, sequence_parallel=sequence_parallel)


def test_recomputed_embeddings_outside_of_a_forward():
    def loss(model):
        embedded = checkpoint(model.get_input_embeddings(), ids(), use_reentrant=False)
        within = checkpoint(lambda x: model.model(inputs_embeds=x)[0], embedded * 2, use_reentrant=False)
        return model(inputs_embeds=embedded).logits.square().mean() + within.square().mean()

    on_ranks(compare(loss), "gla")


def test_embeddings_that_the_model_itself_passes_on_from_its_shard_are_refused():
    class Prompted(type(zoo.build("gla", options=False))):
        def forward(self, input_ids, **kwargs):
            return super().forward(inputs_embeds=self.model.embeddings(input_ids) * 2, **kwargs)

    model = zoo.build("gla", options=False)
    model.__class__ = Prompted
    with pytest.raises(PlanError, match="got inputs_embeds that are sharded already"):
        on_ranks(lambda split, unsplit: split(ids()), model=model)


def test_a_base_without_a_head_returns_full_hidden_states():
    def work(split, unsplit):
        compare(lambda model: model(ids()).last_hidden_state.cos())(split, unsplit)
        same(*(model(ids(6), return_dict=False)[0] for model in (split, unsplit)))

    on_ranks(work, model=zoo.build("llama", options=False).model)


class WithoutHead(Tiny):
    """Computes its logits with the embedding's weight."""

    def __init__(self):
        super().__init__()
        del self.lm_head

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(self.norm(x), self.embed.weight)


@pytest.mark.parametrize("loss_parallel", [True, False])
def test_logits_computed_with_the_embedding_s_weight_are_refused(loss_parallel):
    def work(split, unsplit):
        remedy = r"the forward of WithoutHead .* has no head: .* lm_head.weight = embedding.weight, and call lm_head"
        with pytest.raises(PlanError, match=remedy):
            split(ids(vocabulary=32))

    on_ranks(work, model=WithoutHead(), loss_parallel=loss_parallel)


def test_the_head_takes_full_hidden_states_outside_of_a_forward():
    def logits(model):
        hidden = model.model(ids(6)).last_hidden_state
        model(ids(8))
        return model.lm_head(hidden).square()

    on_ranks(compare(logits))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_head_takes_the_hidden_states_of_one_token(sequence_parallel):
    def logits(model):
        return model.lm_head(model.model(ids()).last_hidden_state[0, -1]).sin()

    on_ranks(compare(logits), sequence_parallel=sequence_parallel)


class ByKeyword(Tiny):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(input=self.norm(x))


def test_the_head_may_be_called_by_keyword():
    on_ranks(compare(lambda model: model(ids(vocabulary=32)).sin()), model=ByKeyword().double())

    def misnamed(split, unsplit):
        with pytest.raises(PlanError, match=r"without 'input' \(got x\).*by position"):
            split.lm_head(x=torch.zeros(1, 1, 16))

    on_ranks(misnamed, model=ByKeyword())


@pytest.mark.parametrize("logits_to_keep", [1, 3, torch.tensor([0, 4])], ids=["last", "three", "chosen"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_some_tokens(name, logits_to_keep):
    for loss_parallel in (False, True):
        logits = compare(lambda model: model(ids(), logits_to_keep=logits_to_keep).logits.square())
        on_ranks(logits, name, loss_parallel=loss_parallel)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_embeds_are_full_sequences(name):
    def work(split, unsplit):
        table = unsplit.get_input_embeddings().weight.detach().clone()
        same(*(model(inputs_embeds=table[ids()]).logits for model in (split, unsplit)))
        mask = torch.ones(2, 7, dtype=torch.long)
        positional = (None, mask, table[ids()]) if name == "gla" else (None, mask, None, None, table[ids()])
        same(*(model(*positional).logits for model in (split, unsplit)))

    on_ranks(work, name)


LABELS = {"llama": (None, None, None, None), "gla": (None, None, None)}
"""Positional arguments between tokens and labels."""


@pytest.mark.parametrize("name", LABELS)
def test_positional_labels_are_refused_as_by_name(name):
    def work(split, unsplit):
        for call in (lambda: split(ids(), labels=ids()), lambda: split(ids(), *LABELS[name], ids())):
            with pytest.raises(PlanError, match="was called with labels"):
                call()
        same(split(ids()).logits, unsplit(ids()).logits)

    on_ranks(work, name, loss_parallel=True)
    if name == "gla":
        fused = dict(fuse_linear_cross_entropy=True, fuse_cross_entropy=False)
        on_ranks(work, model=zoo.build("gla", options=False, **fused), sequence_parallel=False)


@pytest.mark.parametrize("name", LABELS)
def test_the_loss_of_the_model_itself(name):
    on_ranks(compare(lambda model: model(ids(), *LABELS[name], ids()).loss), name)


def test_the_loss_of_the_model_itself_with_the_load_balancing_loss():
    """Every rank computes the full load-balancing loss inside regions whose gradients are summed.

    FLA's mixture of memories adds this loss to the cross entropy that it computes itself; a user's loop calls `added_loss`.
    """

    def work(split, unsplit):
        compare(lambda model: model(ids(), labels=ids()).loss)(split, unsplit)
        same(added_loss(split, split(ids())), 10.0 * unsplit(ids(), labels=ids()).aux_loss)

    on_ranks(work, model=zoo.build("mom", fuse_cross_entropy=False, aux_loss_scale=10.0))


def test_a_loss_that_some_models_fuse_with_the_head_when_they_train():
    def work(split, unsplit):
        with pytest.raises(PlanError, match=r"called with labels, .*fuse_cross_entropy"):
            split(ids(), labels=ids())

    on_ranks(work, model=zoo.build("kda"))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_attentions_of_a_rank_are_refused(sequence_parallel):
    def work(split, unsplit):
        for call in (split, split.model):
            with pytest.raises(PlanError, match="called with output_attentions = True"):
                call(ids(), output_attentions=True)
        same(split(ids()).logits, unsplit(ids()).logits)
        split.config.output_attentions = True
        with pytest.raises(PlanError, match="output_attentions = True"):
            split(ids())

    unsplit = zoo.build("llama", options=False)
    unsplit.set_attn_implementation("eager")
    on_ranks(work, model=unsplit, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("lengths", [(16, 14), (14, 16), (8, 12)])
@pytest.mark.parametrize("reentrant", [False, True])
def test_forwards_of_several_lengths_before_one_backward(lengths, reentrant):
    def loss(model):
        for layer in model.model.layers:
            layer.forward = recomputed(layer.forward, use_reentrant=reentrant)
        losses = [model(ids(length)).logits.sin().mean() for length in lengths]
        with torch.no_grad():
            model(ids(4))
            model(ids(5))  # a forward that is not interrupted
        return sum(losses)

    on_ranks(compare(loss))
    on_ranks(compare(loss), "gla")


def recomputed(forward, use_reentrant):
    def call(*args, **kwargs):
        return checkpoint(lambda *args: forward(*args, **kwargs), *args, use_reentrant=use_reentrant)

    return call


def test_a_forward_that_is_recomputed_as_one():
    def loss(model):
        logits = [checkpoint(lambda x: model(x).logits, ids(n), use_reentrant=False) for n in (16, 14)]
        return sum(each.sin().mean() for each in logits)

    on_ranks(compare(loss))


class Reentrant(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return checkpoint(lambda *args: self.module(*args, **kwargs), *args, use_reentrant=True)


def test_a_checkpoint_within_a_reentrant_one():
    def loss(model):
        for layer in model.model.layers:
            layer.mlp = Reentrant(layer.mlp)
        model.model.layers = nn.ModuleList(map(Reentrant, model.model.layers))
        return sum(model(ids(length)).logits.sin().mean() for length in (16, 14))

    on_ranks(compare(loss))


@pytest.mark.parametrize("name", NAMES)
def test_the_sequence_is_sharded_equally_in_training_and_not_without_a_gradient(name):
    def work(split, unsplit):
        with pytest.raises(
            PlanError, match=r"a sequence length of 15 is not a multiple of 2, .*pad_to_multiple_of"
        ):
            split(ids(15))
        with torch.no_grad():
            for length in (15, 1, 16):
                mine, theirs = (model(ids(length), output_hidden_states=True) for model in (split, unsplit))
                for a, b in zip(mine.hidden_states, theirs.hidden_states, strict=True):
                    same(a, b)
                same(mine.logits, theirs.logits)
        compare(lambda model: model(ids(16)).logits.sin())(split, unsplit)

    on_ranks(work, name)


def test_an_embedding_called_on_shards_is_not_recomputed_on_full_sequences():
    """It is unknown which call of the embedding is recomputed, and therefore which tokens it gets."""

    def work(split, unsplit):
        split(ids()).logits.sum().backward()
        # With early_stop the recomputation would end before the sum over the ranks. Not by torch's global setting, which
        # ranks that are threads may leave switched off for later tests.
        outside = checkpoint(split.get_input_embeddings(), ids(), use_reentrant=False, early_stop=False)
        with pytest.raises(PlanError, match="recomputes the embedding, which was called on shards"):
            outside.sum().backward()

    on_ranks(work, "gla")


def test_a_module_of_the_model_called_by_itself_is_refused():
    def work(split, unsplit):
        split(ids())
        with pytest.raises(PlanError, match="a module of the model was called by itself"):
            split.model.layers[1].mlp(torch.zeros(2, 4, 64, dtype=torch.float64))
        hidden = torch.ones(2, 8, 64, dtype=torch.float64)
        with pytest.raises(PlanError, match="a module of the model was called by itself"):
            split.model.norm(hidden)  # its weight's gradient would be counted once for each rank
        with torch.no_grad():
            assert split.model.norm(hidden).equal(unsplit.model.norm(hidden))

    on_ranks(work)


def test_the_module_at_which_the_stream_ends_called_by_itself_is_refused():
    """The module would gather an input that every rank already has in full."""

    def work(split, unsplit):
        split(ids())
        hidden = torch.ones(2, 8, 64, dtype=torch.float64)
        with pytest.raises(PlanError, match="a module of the model was called by itself"), torch.no_grad():
            split.transformer.ln_f(hidden)

    on_ranks(work, "gpt2")


def test_a_failed_forward_leaves_no_state():
    def work(split, unsplit):
        broken = split.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        for call in (split, split.model):
            with pytest.raises(ZeroDivisionError):
                call(ids())
        broken.remove()
        same(heads(split), heads(unsplit))

    on_ranks(work)


def test_a_copied_model_has_a_separate_stream():
    def work(split, unsplit):
        twin = copy.deepcopy(split)
        same(twin(ids(8)).logits, unsplit(ids(8)).logits)
        losses = []
        for length in (16, 14):
            with torch.no_grad():
                same(twin(ids(length + 3)).logits, unsplit(ids(length + 3)).logits)
            losses.append(split(ids(length)).logits.sin().mean())
            with torch.no_grad():
                twin(ids(length + 5))
        sum(losses).backward()
        sum(unsplit(ids(length)).logits.sin().mean() for length in (16, 14)).backward()
        same_gradients(split, unsplit)
        assert all(p.grad is None for p in twin.parameters())

    on_ranks(work)
    on_ranks(work, "gla")


@pytest.mark.parametrize("wrong", [-1, 96, 97])
def test_ids_outside_of_the_vocabulary_are_an_error(wrong):
    def work(split, unsplit):
        tokens = ids()
        tokens[1, 2] = wrong
        with pytest.raises(RuntimeError, match="a token id outside of the vocabulary"):
            split(tokens)

    on_ranks(work)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("length", [8, 6])
def test_second_derivatives(sequence_parallel, length):
    """The gradient at the embeddings is penalised, as in adversarial training."""

    def work(split, unsplit):
        table = unsplit.get_input_embeddings().weight.detach().clone()
        for model in (split, unsplit):
            embedded = table[ids(length)].requires_grad_()
            loss = model(inputs_embeds=embedded).logits.sin().mean()
            (grad,) = torch.autograd.grad(loss, embedded, create_graph=True)
            (loss + grad.square().sum() * 100).backward()
            model.penalised = embedded.grad
        same(split.penalised, unsplit.penalised)
        same_gradients(split, unsplit)

    odd = zoo.build("llama", options=False, vocab_size=97)
    odd.set_attn_implementation("eager")
    on_ranks(work, model=odd, sequence_parallel=sequence_parallel)


def test_sharded_logits_are_not_differentiated_twice():
    def work(split, unsplit):
        embedded = unsplit.get_input_embeddings().weight.detach()[ids()].requires_grad_()
        loss = cross_entropy(split(inputs_embeds=embedded).logits, ids(), 14)
        with pytest.raises(ParallelError, match=r"cross entropy .*create_graph = True"):
            torch.autograd.grad(loss, embedded, create_graph=True)

    on_ranks(work, loss_parallel=True)


class Classifier(nn.Module):
    """Scores the last token with a head on the full hidden states of the base model."""

    def __init__(self):
        super().__init__()
        self.config = zoo.config("llama", options=False)
        self.model = zoo.build("llama", options=False).model
        self.score = nn.Linear(64, 3, dtype=torch.float64)

    def forward(self, input_ids):
        return self.score(self.model(input_ids).last_hidden_state)[:, -1]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_head_of_the_user(sequence_parallel):
    off_stream = changed(plan("llama"), model=lambda plan: {"score": plan.replicated_off_stream()})
    on_stream = changed(plan("llama"), model=lambda plan: {"score": plan.replicated_on_stream()})
    model = Classifier()
    options = {"model": model, "sequence_parallel": sequence_parallel, "plan": off_stream}
    on_ranks(compare(lambda model: model(ids()).sin()), **options)
    if sequence_parallel:
        with pytest.raises(PlanError, match=r"'score' .*model without a head"):
            check_plan(model, Degrees(tp=2), plan=on_stream)


@pytest.mark.parametrize("name", ["get_output_embeddings", "get_input_embeddings"])
def test_a_product_with_the_local_shard_of_the_vocabulary_is_an_error(name):
    def work(split, unsplit):
        weight = getattr(split, name)().weight
        assert weight is getattr(split, name)()._parameters["weight"]
        assert weight.shape == (96, 64)
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            nn.functional.linear(split.model(ids()).last_hidden_state, weight)
        hidden, weight = unsplit.model(ids()).last_hidden_state, weight.full_tensor()
        same(
            nn.functional.linear(hidden, weight),
            nn.functional.linear(hidden, getattr(unsplit, name)().weight),
        )

    on_ranks(work)


class Looped(Tiny):
    """A model that runs its blocks twice."""

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        return self.lm_head(self.norm(x))


def test_blocks_that_are_called_twice():
    tokens = torch.arange(32).reshape(2, 16)

    def full_sequence(split, unsplit):
        for layer in split.layers:  # also in a recomputation
            layer.forward = lambda x, forward=layer.forward: checkpoint(forward, x, use_reentrant=False)
        unsplit.load_state_dict({name: p.full_tensor() for name, p in split.state_dict().items()})
        for model in (split, unsplit):
            model(tokens).pow(2).sum().backward()
        expected = dict(unsplit.named_parameters())
        for name, param in split.named_parameters():
            grad = param.grad.full_tensor()
            assert torch.allclose(grad, expected[name].grad, rtol=1e-9, atol=1e-12), name

    def sequence_parallel(split, unsplit):
        for _ in range(2):  # a failed forward leaves no state
            with pytest.raises(PlanError, match=r"Block, .*was called twice"):
                split(tokens)

    on_ranks(full_sequence, model=Looped().double(), sequence_parallel=False)
    on_ranks(sequence_parallel, model=Looped().double())


def test_a_block_that_stands_twice_in_the_list_is_refused():
    model = Tiny()
    model.layers[1] = model.layers[0]
    with pytest.raises(PlanError, match=r"one tensor, .*no style for layers\.1\.attn_norm"):
        check_plan(model, Degrees(tp=2), plan=TinyPlan)
