"""`verify` on plans that are wrong in one condition only: each is rejected, and the condition named.

A fault is a condition and an effect: in most, the output of a module is 1% too large when the condition holds.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests import zoo
from tests.support import tiny_model
from tests.support.faulty_styles import installed
from tests.support.tiny_model import TinyPlan
from titanplans import registered_plans
from titanplans.errors import VerifyError
from titanplans.proof import verify
from titanplans.split.cache import CACHES

pytestmark = pytest.mark.thorough


@dataclass
class Call:
    """One call of a module of the split model, as a hook sees it."""

    module: Any
    args: tuple
    kwargs: dict[str, Any]
    output: Any
    rank: int
    count: int
    """Forwards of the module in training up to this one, without recomputations."""
    evaluated: bool
    """Whether the module was called in evaluation mode before."""

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def tensor(self) -> torch.Tensor:
        return self.args[0] if self.args else self.kwargs["hidden_states"]

    @property
    def weight(self) -> torch.Tensor:
        return self.module._parameters["weight"]


def larger(call: Call) -> Any:
    if isinstance(call.output, tuple):
        return (call.output[0] * 1.01, *call.output[1:])
    return call.output * 1.01


def larger_gradient(call: Call) -> Any:
    if call.output.requires_grad:
        call.output.register_hook(lambda grad: grad * 1.01)
    return call.output


def detached(call: Call) -> Any:
    return (
        (call.output[0].detach(), *call.output[1:])
        if isinstance(call.output, tuple)
        else call.output.detach()
    )


def wrong(
    base: type, method: str, key: str, when: Callable[[Call], Any], effect: Callable[[Call], Any] = larger
) -> type:
    """Return the plan `base` whose module `key` has an `effect` in calls for which `when` holds.

    `method` is the method of the plan that returns the style of `key`; without a key it returns the style itself.
    """

    def faulty(style: Any) -> Any:
        def install(original: Any, module: Any, border: Any) -> None:
            original(module, border)
            state = {"count": 0, "evaluated": False}

            def hook(module: Any, args: tuple, kwargs: dict, output: Any) -> Any:
                state["count"] += module.training and torch._C._current_graph_task_id() == -1
                call = Call(module, args, kwargs, output, border.rank, **state)
                state["evaluated"] |= not module.training
                return effect(call) if when(call) else output

            module.register_forward_hook(hook, with_kwargs=True)

        return installed(style, install)

    def with_fault(self: Any, *args: Any, **kwargs: Any) -> Any:
        plan = getattr(super(Wrong, self), method)(*args, **kwargs)
        return plan | {key: faulty(plan[key])} if key is not None else faulty(plan)

    Wrong = type("Wrong", (base,), {method: with_fault})
    return Wrong


def mask(call: Call) -> torch.Tensor | None:
    """Return the attention mask [batch, 1, queries, keys] that a mixer of transformers gets: True where it attends."""
    return call.kwargs.get("attention_mask")


def padded(call: Call, key: int) -> bool:
    """Whether the last query of some sequence does not attend to `key`, the first or last one."""
    return mask(call) is not None and bool((~mask(call)[:, 0, -1, key]).any())


def cached(call: Call) -> bool:
    """Whether the mixer has a cache, by either of transformers' names."""
    return any(call.kwargs.get(name) is not None for name in CACHES)


def positions_repeat(call: Call) -> bool:
    cosines = call.kwargs["position_embeddings"][0][0]
    return len(cosines.unique(dim=0)) < len(cosines)


def is_outdated(call: Call, value: torch.Tensor, key: Any = None) -> bool:
    """Whether `value` differs from the first value that this module got, which a plan may have cached."""
    first = call.module.__dict__.setdefault("kept", {}).setdefault(key, value.detach().clone())
    return not torch.equal(first, value)


def wrong_after_another(call: Call) -> Any:
    """Scale the gradient as if the sequence had the length of the newest forward."""
    length = call.module.__dict__["newest"] = call.shape[1]
    if call.output.requires_grad:
        call.output.register_hook(lambda grad: grad * (length / call.module.__dict__["newest"]))
    return call.output


@dataclass
class Fault:
    """A plan that is wrong in one condition."""

    when: Callable[[Call], Any]
    says: str
    """A pattern of the condition that the report has to name."""
    model: str = "tiny"
    method: str = "attn_plan"
    key: str | None = "v_proj"
    effect: Callable[[Call], Any] = larger
    options: dict[str, Any] = field(default_factory=dict)


IMAGE = zoo.config("gemma3").image_token_id
PAIRS = {"conditions": "pairs"}
WHOLE_SEQUENCE = {"sequence_parallel": False}
"""Context-parallel ranks divide the sequence length in training."""

FAULTS = {
    "more than 64 tokens": Fault(lambda c: c.shape[1] > 64, "13[01] tokens"),
    "more than 128 tokens": Fault(lambda c: c.shape[1] > 128, "13[01] tokens", method="mlp_plan", key="up_proj"),
    "an odd length": Fault(lambda c: c.shape[1] % 2, "15 tokens", options=WHOLE_SEQUENCE),
    "an odd length, in full": Fault(lambda c: c.shape[1] % 2, "131 tokens"),
    "fewer than 8 tokens": Fault(lambda c: 1 < c.shape[1] < 8, "4 tokens"),
    "a batch of one": Fault(lambda c: c.shape[0] == 1, "a batch of 1"),
    "more than two sequences": Fault(lambda c: c.shape[0] > 2, "a batch of 3", effect=larger_gradient),
    "many tokens in all": Fault(lambda c: c.shape.numel() > 16 * 130, "13[01] tokens"),
    "left padding": Fault(lambda c: padded(c, 0), "left padding", "qwen3", key=""),
    "right padding": Fault(lambda c: padded(c, -1), "right padding", "qwen3", key=""),
    "any mask, in FLA": Fault(
        lambda c: c.kwargs.get("attention_mask") is not None, "padding", "gla", key=""
    ),
    "documents by positions": Fault(positions_repeat, "documents", "qwen3", key=""),
    "documents by offsets": Fault(lambda c: c.kwargs.get("cu_seqlens") is not None, "documents", "gla", key=""),
    "repeated tokens": Fault(
        lambda c: len(c.args[0].unique()) <= 3 < c.args[0].numel(), "repeated tokens",
        method="vocab_embedding", key=None,
    ),
    "text without images": Fault(
        # The text repeats three tokens, of which one is the image token; with images it is at most a quarter of the tokens.
        lambda c: c.module.training and (c.args[0] == IMAGE).double().mean() > 0.3, "without images", "gemma3",
        method="vocab_embedding", key=None,
    ),
    "evaluation mode": Fault(lambda c: not c.module.training, "an evaluation"),
    "more than 64 tokens in an evaluation": Fault(
        lambda c: not c.module.training and c.shape[1] > 64, "131 tokens"
    ),
    "right padding in an evaluation": Fault(
        lambda c: not c.module.training and padded(c, -1), "right padding", "qwen3", key=""
    ),
    "without a gradient": Fault(lambda c: not torch.is_grad_enabled(), "an evaluation"),
    "a training after an evaluation": Fault(lambda c: c.module.training and c.evaluated, "an evaluation"),
    "a cache": Fault(lambda c: cached(c), "a cache", "qwen3", key=""),
    "one token with a cache": Fault(lambda c: c.shape[1] == 1, "a cache", "qwen3"),
    "a frozen weight": Fault(lambda c: not c.weight.requires_grad, "frozen"),
    "a trained weight next to frozen ones": Fault(
        lambda c: torch.is_grad_enabled() and c.weight.requires_grad and not c.tensor.requires_grad, "frozen",
        key="k_proj",
    ),
    "run again in the backward": Fault(
        lambda c: torch._C._current_graph_task_id() != -1 and c.module.training, "recomputed"
    ),
    "float32": Fault(lambda c: c.output.dtype == torch.float32, "float32", options=PAIRS),
    "bfloat16": Fault(
        lambda c: c.output.dtype == torch.bfloat16, "bfloat16", "qwen3", effect=lambda c: c.output * 2, options=PAIRS
    ),
    "from the second micro batch on": Fault(lambda c: c.module.training and c.count > 1, "several micro batches"),
    "from the third step on": Fault(lambda c: c.module.training and c.count > 4, "3 steps"),
    "another length than before": Fault(
        lambda c: c.module.__dict__.setdefault("first", c.shape[1]) != c.shape[1], "tokens"
    ),
    "a gradient that exists already": Fault(
        lambda c: c.weight.grad is not None, "several micro batches", effect=larger_gradient
    ),
    "a full block of 128 tokens": Fault(lambda c: c.shape[1] % 64 == 0, "128 tokens", options=PAIRS),
    "a mask cached by its shape": Fault(
        lambda c: mask(c) is not None and is_outdated(c, mask(c), mask(c).shape), "padding", "qwen3", key=""
    ),
    "padding with a cache": Fault(
        lambda c: cached(c) and padded(c, 0), "left padding", "qwen3", key=""
    ),
    "a weight cached for evaluations": Fault(
        lambda c: not c.module.training and is_outdated(c, c.module.weight), "2 steps", method="mlp_plan", key="up_proj",
        model="qwen3",
    ),
    "a mixer in which nothing trains": Fault(
        lambda c: not any(p.requires_grad for p in c.module.parameters()) and c.output[0].requires_grad,
        "frozen mixers", key="", model="qwen3", effect=detached,
    ),
    "an MLP in which nothing trains": Fault(
        lambda c: not any(p.requires_grad for p in c.module.parameters()) and c.output.requires_grad,
        "frozen mixers", method="mlp_plan", key="", effect=detached,
    ),
    "a weight that was frozen": Fault(
        lambda c: not c.module.__dict__.setdefault("trained", c.weight.requires_grad) and c.weight.requires_grad,
        "frozen", effect=larger_gradient,
    ),
    "a frozen norm that a gradient passes": Fault(
        lambda c: not c.weight.requires_grad and c.args[0].requires_grad, "frozen", key="q_norm",
        effect=larger_gradient,
    ),
    "several forwards before a backward": Fault(
        lambda c: c.module.training, "several micro batches", effect=wrong_after_another
    ),
    "the last rank, odd lengths": Fault(
        lambda c: c.rank == 1 and c.shape[1] % 2, "15 tokens", effect=larger_gradient, options=WHOLE_SEQUENCE
    ),
}  # fmt: skip


def plan_of(fault: Fault) -> type:
    base = TinyPlan if fault.model == "tiny" else registered_plans()[fault.model]
    return wrong(base, fault.method, fault.key, fault.when, fault.effect)


def proved(model: str, plan: Any, layers: int = 1, **options: Any) -> Any:
    options = {
        "degrees": [2],
        "loss_parallel": True,
        "sequence_parallel": True,
        "conditions": "each",
    } | options

    def build():
        # One block is enough, since each fault is in every block; more would take longer.
        return (
            zoo.build(model) if model == "tiny" else zoo.build(model, options=False, num_hidden_layers=layers)
        )

    def images(size, length, seed):
        return zoo.inputs(model, batch_size=size, seq_len=max(length, 8), seed=seed)

    return verify(build, plan, inputs=images if model == "gemma3" else None, **options)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_one_condition_is_rejected_with_the_condition(name):
    fault = FAULTS[name]
    report = proved(fault.model, plan_of(fault), **fault.options)
    assert not report.passed
    failed = [case for case in report.cases if not case.passed]
    assert all(any(re.search(fault.says, condition) for condition in case.conditions) for case in failed), [
        case.conditions for case in failed
    ]
    assert "wrong only with" in report.table()


@pytest.mark.parametrize("model", ["tiny", "qwen3", "gla"])
def test_a_hook_by_itself_is_not_wrong(model):
    fault = Fault(lambda call: False, "", model)
    assert proved(model, plan_of(fault)).passed


def test_replicas_that_are_not_broadcast_are_rejected():
    """The split broadcasts rank 0's values, but a faulty style restores each rank's own initial values."""

    class Own(TinyPlan):
        def attn_plan(self, attn):
            before = attn.q_norm.weight.detach().clone()

            def install(original, module, border):
                with torch.no_grad():
                    module._parameters["weight"].to_local().copy_(before)

            return super().attn_plan(attn) | {"q_norm": installed(self.replicated_in_region(), install)}

    report = proved("tiny", Own)
    (failed,) = [case for case in report.cases if not case.passed]
    assert failed.conditions == ("values that differ between the ranks before the split",)


def test_a_weight_that_is_copied_once_is_rejected():
    """The weight copied in the first step is out of date in the second."""

    def stale(call):
        first = call.module.__dict__.setdefault("first", call.module.weight.detach().clone())
        return torch.nn.functional.linear(call.tensor, first)

    fault = Fault(lambda call: True, "2 steps", effect=stale)
    report = proved("tiny", plan_of(fault))
    assert not report.passed
    assert all(
        "2 steps" in case.conditions or case.conditions == () for case in report.cases if not case.passed
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_sum_rounded_to_bfloat16_is_rejected(dtype):
    """A bound for the worst case of all roundings in float32 would allow this fault: its error is 16,000 of 19,008
    epsilons."""
    fault = Fault(lambda c: True, "", key="o_proj", effect=lambda c: c.output.bfloat16().to(c.output.dtype))
    report = proved("tiny", plan_of(fault), dtype=dtype)
    assert not any(case.passed for case in report.cases)
    assert report.cases[0].conditions == ()


def test_a_fault_in_one_block_alone_is_rejected():
    fault = Fault(lambda c: c.module.__dict__.get("last"), "", method="layer_plan", key="attn_norm")
    base = plan_of(fault)

    class ByIndex(base):
        blocks = 0

        def layer_plan(self, layer):
            type(self).blocks += 1
            layer.attn_norm.__dict__["last"] = type(self).blocks % 2 == 0
            return super().layer_plan(layer)

    assert not proved("tiny", ByIndex, conditions="plain").passed


def test_every_plan_of_the_zoo_is_proved_in_every_condition():
    for name in ("tiny", "gla"):
        report = proved(name, TinyPlan if name == "tiny" else None, layers=2, conditions="pairs")
        assert report.passed, report.table()


class PatchesMethod(TinyPlan):
    """Removes the activation from the class of the MLP, and so from every model of the process."""

    def mlp_plan(self, mlp):
        tiny_model.MLP.forward = lambda self, x: self.down_proj(self.gate_proj(x) * self.up_proj(x))
        return super().mlp_plan(mlp)


class PatchesFunction(TinyPlan):
    """A plan with a style that replaces a function of torch."""

    def mlp_plan(self, mlp):
        def patching(original, module, border):
            original(module, border)
            torch.nn.functional.silu = torch.nn.functional.relu

        return super().mlp_plan(mlp) | {"up_proj": installed(self.colwise(), patching)}


@pytest.mark.parametrize(
    ("plan", "named"),
    [(PatchesMethod, "tests.support.tiny_model.MLP.forward"), (PatchesFunction, "torch.nn.functional.silu")],
)
def test_a_plan_that_changes_the_code_of_the_unsplit_model_is_refused(monkeypatch, plan, named):
    monkeypatch.setattr(tiny_model.MLP, "forward", tiny_model.MLP.forward)
    monkeypatch.setattr(torch.nn.functional, "silu", torch.nn.functional.silu)
    with pytest.raises(VerifyError, match=f"replaced {named} for every model"):
        proved("tiny", plan)
