"""The fused loss, which the head computes in chunks, equals the loss of logits, needs no full logits, and refuses misuse."""

import functools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutput

from tests import zoo
from tests.support import process_groups, step_comparison
from tests.support.refusals import refusal
from tests.support.tiny_model import Block, TinyPlan
from titanplans import registered_plans
from titanplans.loss import NotFused
from titanplans.parallel import (
    DDPConfig,
    Degrees,
    FSDP2Config,
    FusedLoss,
    ParallelError,
    ParallelManager,
    align_gradients,
    cross_entropy,
)
from titanplans.proof.compare.forward import call

ROWS, LENGTH = 4, 8


class Model(nn.Module):
    """A tiny decoder with a vocabulary that no degree divides."""

    def __init__(self, vocabulary=13, tied=False, bias=False, cap=None, hidden=16):
        super().__init__()
        self.config = SimpleNamespace(
            model_type="tiny", fuse_linear_cross_entropy=False, final_logit_softcapping=cap
        )
        self.embed = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList([Block()])
        self.norm = nn.RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=bias)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, input_ids, labels=None, use_cache=False):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.after_head(self.lm_head(self.norm(x))))

    def after_head(self, logits):
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap


def build(dtype=torch.float64, **options):
    torch.manual_seed(0)
    return Model(**options).to(dtype)


def batch(vocabulary=13):
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(vocabulary, (2, ROWS, LENGTH), generator=generator)
    labels[:, :3] = -100
    return tokens, labels


def loss_of(model, tokens, labels, fused=None, **objective):
    """Return the loss. Its divisor is not the number of labels, so that the tests notice a wrong divisor."""
    if fused is None:
        logits = model(tokens).logits
    else:
        with fused(labels, **objective):
            logits = model(tokens).logits
    return cross_entropy(logits, labels, 40, **objective)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# Over ranks.

OBJECTIVE = {"label_smoothing": 0.1, "z_loss": 0.01}
BIASED, CAPPED = {"bias": True}, {"vocabulary": 7, "tied": True, "cap": 2.0}
PLAN = {"plan": TinyPlan}
CASES = {
    "fsdp2, biased": (FSDP2Config(), Degrees(), BIASED),
    "fsdp2, capped, tied": (FSDP2Config(fsdp_reshard_after_forward="always"), Degrees(), CAPPED),
    "hsdp": (FSDP2Config(fsdp_defer_grad_sync="replicas"), Degrees(dp_replicate=2), CAPPED),
    "ddp": (DDPConfig(), None, CAPPED),
    "ddp, unused": (DDPConfig(find_unused_parameters=True), None, BIASED),
    "tp 2 x fsdp2, biased": (FSDP2Config(**PLAN), Degrees(tp=2), BIASED),
    "tp 2 x fsdp2, capped, tied, recomputed": (
        FSDP2Config(**PLAN, activation_checkpoint={"mode": "full"}),
        Degrees(tp=2),
        CAPPED,
    ),
    "tp 2 x fsdp2, offloaded": (FSDP2Config(**PLAN, enable_cpu_offload=True), Degrees(tp=2), BIASED),
    "tp 4, gathered logits": (FSDP2Config(**PLAN, disable_loss_parallel=True), Degrees(tp=4), BIASED),
    "tp 4, capped": (FSDP2Config(**PLAN), Degrees(tp=4), CAPPED),
    "tp 4, whole sequence": (FSDP2Config(**PLAN, enable_sequence_parallel=False), Degrees(tp=4), CAPPED),
}
REDUCED = {
    "fsdp2 in bfloat16": (FSDP2Config(mixed_precision_param="bfloat16"), Degrees(), CAPPED),
    "tp 2 in bfloat16": (FSDP2Config(**PLAN, mixed_precision_param="bfloat16"), Degrees(tp=2), BIASED),
    "ddp in autocast": (DDPConfig(autocast_dtype="bfloat16"), None, BIASED),
}


def largest_error(config, degrees, options, dtype):
    """Return the largest error of the loss and gradients of two accumulated micro batches, and of the loss in
    evaluation."""
    model, (tokens, labels) = build(dtype, **options), batch(options.get("vocabulary", 13))
    expected = loss_of(model, tokens, labels) + 0  # cross entropy alone
    training_loss = cross_entropy(model(tokens).logits, labels, 40, **OBJECTIVE)
    training_loss.backward()
    expected_gradients = gradients(model)
    model.zero_grad()
    manager = ParallelManager(config, degrees, device_type="cpu")
    split = manager.parallelize(model)
    dp = manager.mesh.get_mesh("dp")
    mine = slice(dp.get_local_rank() * ROWS // dp.size(), (dp.get_local_rank() + 1) * ROWS // dp.size())
    fused, total = FusedLoss(split, chunk_tokens=3), torch.zeros((), dtype=dtype)
    # The model gets full sequences in both micro batches. One has labels only in the first half, the other in the second.
    for index, half in enumerate((slice(0, LENGTH // 2), slice(LENGTH // 2, LENGTH))):
        labels_of_half = torch.full_like(labels, -100)
        labels_of_half[:, half] = labels[:, half]
        with manager.accumulate(last=index == 1):
            loss = loss_of(split, tokens[mine], labels_of_half[mine], fused, **OBJECTIVE)
            loss.backward()
        total += loss.detach()
    torch.distributed.all_reduce(total, group=dp.get_group())
    with manager.evaluation():
        evaluated = loss_of(split, tokens[mine], labels[mine], fused)
        assert not evaluated.requires_grad
        logits = split(tokens[mine]).logits  # the model itself is unchanged
    assert dtype != torch.float64 or (evaluated - cross_entropy(logits, labels[mine], 40)).abs() < 1e-14
    torch.distributed.all_reduce(evaluated, group=dp.get_group())
    align_gradients(split.parameters())
    split_gradients = {
        step_comparison.unwrapped_name(name): step_comparison.full_copy(p.grad)
        for name, p in split.named_parameters()
        if p.grad is not None
    }
    assert split_gradients.keys() == expected_gradients.keys()
    gradient_errors = [
        (
            (split_gradients[name] - expected_gradients[name]).abs().max()
            / expected_gradients[name].abs().max()
        ).item()
        for name in expected_gradients
    ]
    return max((total - training_loss).abs().item(), (evaluated - expected).abs().item(), *gradient_errors)


def over_ranks(rank):
    exact = {name: largest_error(*case, torch.float64) for name, case in CASES.items()}
    return exact, {name: largest_error(*case, torch.float32) for name, case in REDUCED.items()}


@pytest.mark.thorough
def test_the_fused_loss_over_ranks_equals_that_of_logits():
    exact, reduced = process_groups.run(over_ranks, 4)
    assert max(exact.values()) < 1e-14, exact  # some tens of roundings in float64
    assert max(reduced.values()) < 6e-2, reduced  # 8 bits of mantissa, through one block


# In one process.


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_the_fused_loss_equals_that_of_logits_for_any_chunk(chunk):
    model, (tokens, labels) = build(cap=2.0, bias=True), batch()
    loss = loss_of(model, tokens, labels)
    loss.backward()
    expected = gradients(model)
    model.zero_grad()
    fused_loss = loss_of(model, tokens, labels, FusedLoss(model, chunk_tokens=chunk))
    fused_loss.backward()
    torch.testing.assert_close(fused_loss, loss, rtol=1e-14, atol=0)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-11, atol=1e-15)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(registered_plans()))
def test_the_fused_loss_of_every_architecture(name):
    changes = {
        "gemma2": {"final_logit_softcapping": 5.0},
        "gemma3_text": {"final_logit_softcapping": 5.0},
        "cohere2": {"logit_scale": 0.25},
        "granite": {"logits_scaling": 3.0},
    }
    model = zoo.build(name, **changes.get(name, {})).double().eval()  # a router may keep a type of its own
    inputs = zoo.inputs(name)
    labels = inputs["input_ids"].roll(-1, 1)

    def logits():
        return call(model, inputs).logits

    if name == "minicpm3":  # scales the input of its head by the field that scales the logits of other models
        with pytest.raises(NotFused, match="as the model's config says"), FusedLoss(model)(labels):
            logits()
        return
    with torch.no_grad():
        expected = cross_entropy(logits(), labels, 1)
        with FusedLoss(model, chunk_tokens=7)(labels):
            deferred = logits()
        torch.testing.assert_close(cross_entropy(deferred, labels, 1), expected, rtol=1e-12, atol=0)


def test_gradients_are_summed_over_chunks_in_float32():
    """The head's gradient is summed in float32, because a sum of 64 chunks in bfloat16 would stop growing."""
    torch.manual_seed(0)
    model = Model(hidden=16).bfloat16()
    tokens, labels = torch.full((1, 2048), 3), torch.full((1, 2048), 5)
    exact = Model(hidden=16).double()
    exact.load_state_dict(model.state_dict())
    cross_entropy(exact(tokens).logits, labels, 1).backward()
    loss = FusedLoss(model, chunk_tokens=32)
    with loss(labels):
        logits = model(tokens).logits
    cross_entropy(logits, labels, 1).backward()
    expected, actual = exact.lm_head.weight.grad, model.lm_head.weight.grad
    assert actual.dtype == torch.bfloat16
    assert ((actual - expected).norm() / expected.norm()) < 2**-7


class Largest(TorchDispatchMode):
    """Records the largest number of elements of a tensor that is allocated."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                size = leaf.untyped_storage().nbytes() // leaf.element_size()
                self.most = max(self.most, size)
        return out


def test_only_the_logits_of_one_chunk_are_allocated():
    model = Model(vocabulary=512)
    tokens, labels = torch.randint(512, (2, 4, 64))
    fused, sizes = FusedLoss(model, chunk_tokens=8), []
    for computes in (fused, None):
        with Largest() as largest:
            loss_of(model, tokens, labels, computes).backward()
        sizes.append(largest.most)
    assert sizes == [512 * 16, 4 * 64 * 512]  # fused: the head's gradient; not fused: the full logits


def test_no_gradient_is_computed_without_need():
    model, (tokens, labels) = build(), batch()
    products = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            product = func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
            if product and 13 in (*args[0].shape, *args[1].shape):
                products.append(out.shape)
            return out

    fused = FusedLoss(model, chunk_tokens=1000)
    with Products():
        with torch.no_grad():
            loss_of(model, tokens, labels, fused)
        assert products == [(32, 13)]
        products.clear()
        model.lm_head.requires_grad_(False)
        loss_of(model, tokens, labels, fused).backward()
        assert products == [(32, 13), (32, 16)]
    assert model.lm_head.weight.grad is None


def same_as_of_logits(model, run, tokens, labels):
    """Check that the fused loss and its gradients equal those from the logits that `run(model, tokens)` returns."""
    fused, results = FusedLoss(model, chunk_tokens=3), []
    for of_labels in (nullcontext, fused):
        with of_labels(labels):
            logits = run(model, tokens)
        loss = cross_entropy(logits, labels, 40)
        loss.backward()
        results.append((loss.detach(), gradients(model)))
        model.zero_grad()
    torch.testing.assert_close(results[1], results[0], rtol=1e-11, atol=1e-15)


def test_a_batch_without_tokens():
    tokens, labels = batch()
    same_as_of_logits(build(bias=True), lambda model, x: model(x).logits, tokens[:0], labels[:0])


@pytest.mark.parametrize("cap", [None, 2.0])
def test_a_checkpoint_around_the_full_model(cap):
    def run(reentrant, model, tokens):
        def after_embed(x):
            return model.after_head(model.lm_head(model.norm(model.layers[0](x))))

        return checkpoint(after_embed, model.embed(tokens), use_reentrant=reentrant)

    same_as_of_logits(build(cap=cap), functools.partial(run, False), *batch())
    with pytest.raises(ParallelError, match="use use_reentrant = False"):
        same_as_of_logits(build(cap=cap), functools.partial(run, True), *batch())


def test_autocast_does_not_change_float64():
    def run(model, tokens):
        with torch.autocast("cpu", torch.bfloat16):
            return model(tokens).logits

    same_as_of_logits(build(), run, *batch())


def test_two_losses_of_one_forward():
    model, (tokens, labels) = build(), batch()
    with FusedLoss(model)(labels):
        logits = model(tokens).logits
    (cross_entropy(logits, labels, 40) + 2 * cross_entropy(logits, labels, 40)).backward()
    grads = gradients(model)
    model.zero_grad()
    (3 * loss_of(model, tokens, labels)).backward()
    torch.testing.assert_close(grads, gradients(model), rtol=1e-11, atol=1e-15)


def refusals():
    tokens, labels = batch()

    def of(model, use=lambda model, fused: None):
        use(model, FusedLoss(model))

    def with_head(head):
        model = build()
        model.lm_head = head
        return model

    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    class Doubled(Model):
        def after_head(self, logits):
            return logits * 2

    class Sliced(Model):
        def after_head(self, logits):
            return logits[:, -1:]

    class Twice(Model):
        def after_head(self, logits):
            return logits + self.lm_head(torch.zeros(ROWS, LENGTH, 16))

    class Forgets(Model):
        def forward(self, input_ids):
            return SimpleNamespace(logits=self.embed(input_ids) @ self.embed.weight.T)

    def run(model, fused, labels=labels, then=lambda loss, model: None, **other):
        with fused(labels):
            logits = model(tokens).logits
        then(cross_entropy(logits, labels, 1, **other), model)

    def other_labels(model, fused):
        with fused(labels):
            logits = model(tokens).logits
        cross_entropy(logits, labels.clone(), 1)

    def read(model, fused):
        with fused(labels):
            logits = model(tokens).logits
        logits.softmax(-1)

    def again(loss, model):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)

    def backward_twice(loss, model):
        loss.backward(retain_graph=True)
        loss.backward()

    def patched(model, fused):
        model.lm_head.forward = lambda x, forward=model.lm_head.forward: forward(x) * 2
        run(model, fused)

    def nested(model, fused):
        with fused(labels):
            run(model, fused)

    def hooked(model, fused):
        model.register_forward_hook(
            lambda module, args, output: output.logits.register_hook(torch.sign) and None
        )
        run(model, fused, then=lambda loss, model: loss.backward())

    def masked_after(model, fused):
        of_tokens = labels.clone()
        with fused(of_tokens):
            logits = model(tokens).logits
        of_tokens[:, 0] = -100
        cross_entropy(logits, of_tokens, 1)

    yield lambda: of(build(), patched), "`forward` that a library or another FusedLoss has set"
    yield lambda: of(build(), nested), "`forward` that a library or another FusedLoss has set"
    yield lambda: of(build(), hooked), "a hook has changed the gradient"
    yield lambda: of(build(), masked_after), "the labels were changed"
    yield lambda: FusedLoss(build(), chunk_tokens=0), "chunk_tokens = 0: use 1 or more"
    yield lambda: of(with_head(Scaled(16, 13))), "is a Scaled, which does more"
    yield lambda: of(with_head(nn.Bilinear(16, 16, 13))), "is a Bilinear, not an nn.Linear"
    yield lambda: of(nn.Linear(2, 2)), "Linear has no head"
    yield lambda: of(Doubled(), run), "turns a logit of -100 into -200"
    yield lambda: of(Sliced(), run), "__getitem__ was called on logits that don't exist"
    yield lambda: of(Twice(), run), "calls its head twice in one forward"
    yield lambda: of(Forgets(), run), "the forward of Forgets did not call its head"
    yield lambda: of(build(), functools.partial(run, labels=labels[:, 1:])), "28 labels for hidden"
    yield lambda: of(build(), other_labels), "the labels are not the ones"
    yield lambda: of(build(), functools.partial(run, z_loss=0.5)), "give both the same"
    yield lambda: of(build(), read), "softmax was called on logits that don't exist"
    yield lambda: of(build(), functools.partial(run, then=again)), "create_graph = True"
    yield lambda: of(build(), functools.partial(run, then=backward_twice)), "retain_graph = True"
    yield (
        lambda: cross_entropy(torch.zeros(1, 2), torch.zeros(1).long(), 1, label_smoothing=1.0),
        "label_smoothing = 1.0",
    )


@pytest.mark.parametrize("case", range(19))
def test_misuse_is_refused(case):
    attempt, message = list(refusals())[case]
    assert message in refusal(attempt, kind=ParallelError)


def test_a_head_in_float8_or_with_adapters_is_refused():
    from titanplans.parallel import LoRA, add_adapters

    model = zoo.build("qwen3", dtype=torch.float32, options=False)
    add_adapters(model, LoRA(rank=2, target_modules=("lm_head",)))
    with pytest.raises(NotFused, match="lora_A and lora_B in addition to its weight"):
        FusedLoss(model)
    from torchao.float8 import convert_to_float8_training

    model = convert_to_float8_training(Model(vocabulary=32))
    with pytest.raises(NotFused, match="Float8Linear, which does more"):
        FusedLoss(model)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_logits_has_label_smoothing_and_z_loss(smoothing):
    torch.manual_seed(0)
    logits, (_, labels) = torch.randn(ROWS, LENGTH, 13, dtype=torch.float64), batch()
    expected = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing, reduction="sum"
    )
    expected = expected + 0.25 * (logits.logsumexp(-1) ** 2)[labels != -100].sum()
    loss = cross_entropy(logits, labels, 2, label_smoothing=smoothing, z_loss=0.25)
    torch.testing.assert_close(loss, expected / 2)
