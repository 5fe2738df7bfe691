"""Ranks as threads: each knows its rank, collectives work, a failure ends all ranks, a wrong group is refused."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests import zoo
from tests.support.faulty_styles import leaving
from tests.support.mutants.architectures import ARCHITECTURES
from tests.support.plain_proofs import verify_plain, verify_sharded
from tests.support.tiny_model import Tiny, TinyPlan, changed
from titanplans import Degrees, PlanError, TPOptions
from titanplans.loss import cross_entropy
from titanplans.proof.batches.conditions import PLAIN
from titanplans.proof.case import prove_case
from titanplans.proof.ranks import threads
from titanplans.proof.ranks.lockstep import RanksDiverged
from titanplans.proof.ranks.world import Worlds
from titanplans.split.module_weight import add_deferred_bias

CPU = torch.device("cpu")
BOTH = (True, False)
CASES = [TPOptions(Degrees(tp=degree), loss, loss == (degree == 2)) for degree in (2, 4) for loss in BOTH]
"""At each degree each option is on once and off once; the four cases together are all combinations."""


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_plans_are_proved_at_odd_sizes(architecture):
    """At degree 4 several ranks share a key/value head."""
    for degree in (2, 4):

        def prove(world, degree=degree):
            chosen = [options for options in CASES if options.degrees.tp == degree]
            return [prove_case(architecture.reference(), None, options, PLAIN, world) for options in chosen]

        cases = threads.run(degree, CPU, prove)
        assert all(case.passed for case in cases), [case.worst for case in cases]


class ByTheFirst(TinyPlan):
    """Only the rank `adds` adds the bias to its partial sum: correct if `rank` returns a rank's index in the mesh."""

    adds = 0

    def rank(self, mesh):
        return mesh.get_local_rank()

    def attn_plan(self, attn):
        def leave(border, module, output):
            mine = self.rank(border.mesh) == self.adds
            biased = add_deferred_bias(module, output)
            return border.leave(biased if mine else output + 0 * biased)

        return super().attn_plan(attn) | {"o_proj": leaving(self.rowwise(), leave)}


def test_a_thread_knows_its_rank():
    class Another(ByTheFirst):
        adds = 1

    class Nobody(ByTheFirst):
        adds = 2

    verdicts = [verify_sharded(Tiny, p, ranks="threads").passed for p in (ByTheFirst, Another, Nobody)]
    assert verdicts == [True, True, False]


def test_the_global_rank_is_not_the_rank_in_the_mesh():
    """With data parallelism the global rank is not the rank in the mesh; the threads are the second of two replicas."""

    class ByTheWorld(ByTheFirst):
        def rank(self, mesh):
            return dist.get_rank()

    class BySize(ByTheFirst):
        def rank(self, mesh):
            return mesh.get_local_rank() * dist.get_world_size() // (2 * mesh.size())

    class OnTheFirst(ByTheFirst):
        """A plan that is correct only in the second replica."""

        adds = True

        def rank(self, mesh):
            return mesh.get_local_rank() == (0 if dist.get_rank() else 1)

    class Telling(ByTheFirst):
        """Correct, although it asks for the global rank, as code does that logs only on global rank 0."""

        def rank(self, mesh):
            return mesh.get_local_rank() if dist.get_rank() else 0

    assert verify_sharded(Tiny, BySize).passed, "there are two replicas"
    assert verify_sharded(Tiny, Telling).passed
    assert not verify_sharded(Tiny, OnTheFirst).passed
    report = verify_sharded(Tiny, ByTheWorld)
    (case,) = report.cases
    assert case.finding.first.name == "layers.0.attn.o_proj"
    assert case.notes == (
        "tests.proof.ranks.test_threads calls torch.distributed.get_rank(), "
        "the global rank, which with data parallelism differs "
        "from the rank in the mesh: use mesh.get_local_rank()",
    )
    assert case.notes[0] in report.table()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_default_group_is_not_the_group_of_the_mesh(direction):
    def averaged(tensor):
        """Divide by the number of ranks of the default group, which is correct only if that group is the mesh."""
        ranks = torch.ones(())
        dist.all_reduce(ranks)
        return tensor * (2 / ranks)

    def leave(border, module, output):
        if direction == "forward":
            output = averaged(output)
        else:
            output.register_hook(averaged)
        return border.leave(add_deferred_bias(module, output))

    over_all = changed(TinyPlan, lambda plan: {"o_proj": leaving(plan.rowwise(), leave)})
    (case,) = verify_sharded(Tiny, over_all).cases
    (note,) = case.notes
    assert ("in layers.0.attn.o_proj" if direction == "forward" else "in the backward") in note
    assert "called AllReduce on the default group, in which other data-parallel ranks are, too" in note
    assert "use the mesh's group, mesh.get_group()" in note


def test_groups_of_other_ranks_than_the_mesh():
    """Sources are global ranks; collectives that only some of the threads would join are refused."""

    def on(ranks):
        def work(world):
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                dist.all_reduce(torch.zeros(1), group=group)

        return work

    threads.run(4, CPU, on([5, 7]))  # the other ranks do nothing meanwhile
    with pytest.raises(RuntimeError, match=r"group of ranks 1, 5, .*other data-parallel"):
        threads.run(4, CPU, on([1, 5]))

    def two_dimensions(world):
        mesh, rank = world.mesh_of(2), world.mesh.get_local_rank()
        assert (mesh.mesh_dim_names, tuple(mesh.get_coordinate())) == (("cp", "tp"), divmod(rank, 2))
        shard = distribute_tensor(torch.arange(4.0), mesh, [Replicate(), Shard(0)])
        assert shard.to_local().tolist() == [2.0 * (rank % 2), 2.0 * (rank % 2) + 1]
        assert shard.full_tensor().tolist() == [0, 1, 2, 3]
        tensor = torch.ones(1 + rank // 2)  # another shape in the other group
        dist.all_reduce(tensor, group=mesh["tp"].get_group())
        assert tensor.tolist() == [2.0] * (1 + rank // 2)

    threads.run(4, CPU, two_dimensions)

    def unequal(world):
        dist.all_reduce(
            torch.ones(1 + world.mesh.get_local_rank() % 2), group=world.mesh_of(2)["tp"].get_group()
        )

    with pytest.raises(RanksDiverged, match=r"different collectives: rank 0 .*; rank 1 "):
        threads.run(4, CPU, unequal)

    def stages(world):
        """Two groups run different numbers of collectives, then all ranks run one. At last a rank waits for an ended
        rank."""
        rank, group = world.mesh.get_local_rank(), world.mesh_of(2)["tp"].get_group()
        tensor = torch.ones(2)
        for _ in range(1 + 2 * (rank // 2)):
            dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [2.0 if rank < 2 else 8.0] * 2
        dist.all_reduce(tensor, group=world.mesh.get_group())
        assert tensor.tolist() == [20.0] * 2
        if rank != 3:
            dist.all_reduce(tensor, group=group)

    with pytest.raises(
        RanksDiverged, match=r"different collectives: rank 0 .*; rank 2 AllReduce.*; rank 3 the end"
    ):
        threads.run(4, CPU, stages)

    def work(world):
        rank, group = world.mesh.get_local_rank(), world.mesh.get_group()
        assert (dist.get_rank(), dist.get_world_size()) == (4 + rank, 8)
        assert (dist.get_rank(group), dist.get_world_size(group)) == (rank, 4)
        tensor = torch.full((4,), float(rank))
        assert distribute_tensor(tensor.clone(), world.mesh, [Replicate()]).to_local().tolist() == [0.0] * 4
        assert distribute_tensor(tensor, world.mesh, [Shard(0)], src_data_rank=3).to_local().tolist() == [3.0]
        shards = distribute_tensor(torch.arange(8.0), world.mesh, [Shard(0)])
        assert shards.equal(shards.clone())
        assert not shards.equal(shards + (rank == 1))  # torch uses the default group for this
        for each in (group, None):
            dist.barrier(each)
        dist.broadcast(tensor, src=dist.get_global_rank(group, 2), group=group)
        assert tensor.tolist() == [2.0] * 4
        with pytest.raises(ValueError, match="rank 0 is not part of group"):
            dist.broadcast(tensor, src=0, group=group)
        dist.all_reduce(tensor, group=dist.new_group([4, 5, 6, 7]))
        return tensor.tolist()

    assert threads.run(4, CPU, work) == [8.0] * 4


def test_a_gradient_that_one_rank_lacks():
    """In the sum of gradients, a rank waits for a rank that has no gradient. The plan is rejected, and no rank hangs."""

    def leave(border, module, output):
        return border.leave(add_deferred_bias(module, output) if border.rank == 0 else output)

    of_the_first = changed(TinyPlan, lambda plan: {"o_proj": leaving(plan.rowwise(), leave)})
    (case,) = verify_sharded(Tiny, of_the_first).cases
    assert case.worst == "runs in step 1, after its backward"
    assert "the ranks called different collectives: rank 0 " in case.notes[0]


def test_further_losses_are_compared_where_they_leave_the_model():
    def halved(logits, labels, tokens):
        """A loss that is wrong only if the vocabulary is sharded."""
        return cross_entropy(logits, labels, tokens) / (2 if isinstance(logits, DTensor) else 1)

    losses = {"ours": cross_entropy, "halved": halved}
    sharded, gathered = verify_sharded(Tiny, TinyPlan, loss_parallel=None, losses=losses).cases
    assert {c.what for c in sharded.checks if not c.passed} == {"halved loss"}
    assert gathered.passed


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_an_error_of_one_rank_ends_the_others(where):
    failing = {"first": 0, "middle": 1, "last": 2}[where]
    raised = []

    def work(world):
        try:
            if world.mesh.get_local_rank() == failing:
                raise LookupError(f"rank {failing}")
            world.gather([torch.ones(1)])
            world.gather([torch.ones(1)])
        except BaseException as error:
            raised.append(type(error).__name__)
            raise

    with pytest.raises(LookupError, match=f"rank {failing}"):
        threads.run(3, CPU, work)
    assert sorted(raised) == ["LookupError", "RankStopped", "RankStopped"]
    assert not dist.is_initialized()


def test_all_ranks_continue_after_a_failure_that_is_caught():
    def work(world):
        rank = world.mesh.get_local_rank()

        def fails():
            world.gather_objects(rank)
            if rank == 1:
                raise ValueError("of one")
            world.gather_objects(rank)

        for _ in range(3):
            with pytest.raises(ValueError, match="of one"):
                world.together(fails)
        total = torch.full((2,), float(rank))
        dist.all_reduce(total, group=world.mesh.get_group())
        return world.gather_objects(total.tolist())

    assert threads.run(4, CPU, work) == [[6.0, 6.0]] * 4


@pytest.mark.parametrize("depth", [0, 1])
def test_ranks_that_diverge_raise(depth):
    """Ranks that call different collectives, use different shapes, or end early: none waits forever."""

    def other_shapes(world):
        dist.all_reduce(torch.zeros(1 + world.mesh.get_local_rank()), group=world.mesh.get_group())

    def other_collectives(world):
        return world.gather([torch.zeros(1)]) if world.mesh.get_local_rank() else world.gather_objects(1)

    def nothing_more(world):
        return world.gather_objects(1) if world.mesh.get_local_rank() else None

    for lose in (other_shapes, other_collectives, nothing_more):
        nested = (lambda world, lose=lose: world.together(lambda: lose(world))) if depth else lose
        with pytest.raises(RanksDiverged, match=r"different collectives: rank 0 .*; rank 1 "):
            threads.run(2, CPU, nested)


def test_a_rank_that_returns_early_makes_the_others_raise():
    def work(world):
        if world.mesh.get_local_rank() == 0:
            return None
        return world.together(lambda: world.gather_objects(1))

    with pytest.raises(RanksDiverged):
        threads.run(3, CPU, work)


def test_an_interrupt_ends_every_rank():
    """An interrupt ends the ranks, whether it reaches the main thread, which waits for the ranks, or a rank."""
    begun = threading.Event()

    def forever(world):
        begun.set()
        while True:
            world.gather_objects(1)

    def interrupt():
        begun.wait()
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        threads.run(2, CPU, forever)
    assert not dist.is_initialized()

    def raises(world):
        if world.mesh.get_local_rank() == 1:
            raise KeyboardInterrupt
        world.gather_objects(1)

    with pytest.raises(KeyboardInterrupt):
        threads.run(2, CPU, raises)


def test_the_state_of_the_callers_process_is_restored(monkeypatch):
    """With this setting torch waits for all ranks of the default group, of which some have no thread here; it is
    ignored."""
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    before = torch.get_num_threads(), torch.is_grad_enabled(), torch.random.get_rng_state()
    with torch.no_grad():
        assert all(threads.run(2, CPU, lambda world: world.gather_objects(torch.is_grad_enabled())))
    assert threads.run(2, CPU, lambda world: world.gather_objects(torch.get_num_threads())) == [before[0]] * 2
    assert torch.equal(before[2], torch.random.get_rng_state())
    assert os.environ["TORCH_DIST_INIT_BARRIER"] == "1"
    assert not dist.is_initialized()


def test_unknown_kinds_of_ranks_are_refused():
    with pytest.raises(PlanError, match="ranks = 'processes': "):
        verify_plain(Tiny, ranks="processes")
    with pytest.raises(PlanError, match="ranks = 'threads' on meta"):
        Worlds("threads", Tiny().to("meta"))


def test_32_ranks():
    def build():
        sizes = {"num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 64, "head_dim": 4}
        return zoo.build("qwen3", num_hidden_layers=1, **sizes)

    report = verify_sharded(build, degrees=[32])
    assert report.passed, report.table()
