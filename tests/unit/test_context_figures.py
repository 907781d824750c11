"""Bytes and seconds of plans, held to sums by hand."""

from dataclasses import replace

import pytest

from boost_core.config import JobSpec
from boost_core.config.parallelism import ContextConfig
from boost_core.context.placement import Window, local_tasks, moved_tasks, place
from boost_core.context.plan import AttentionLayer, ContextPlan, Rates, busiest, figures
from boost_core.context.selection import ContextPlanner
from boost_core.plan.machine import machine_for
from tests.benchmarks.context_methods import by_piece, efficiency
from tests.benchmarks.lengths import documents_of
from tests.sent import sent_by

LAYER = AttentionLayer(hidden_size=4096, key_size=4096, heads=32, rank=1024, tensor_parallel_size=8)
GROUPED = AttentionLayer(hidden_size=8192, key_size=1024, heads=64)
RATES = Rates(flops=400e12, node_bytes=400e9, fabric_bytes=50e9)
CHUNK = 4096  # at which attention is at its full rate
ENDS, HOW = ("sender", "receiver"), ("latents", "keys")


def one_document(ranks: int, stages: int = 1, chunks: int = 2) -> ContextPlan:
    window = Window((ranks * chunks * CHUNK,), CHUNK)
    placement = place(window, ranks, "contiguous")
    return ContextPlan(window, ranks, placement, local_tasks(window, placement), stages)


def test_a_layer_in_bytes_and_flops() -> None:
    assert LAYER.key_bytes == 2 * 4096 * 2 // 8
    assert LAYER.latent_bytes * 4 == LAYER.key_bytes  # r = d/4: a quarter
    assert LAYER.gathered_bytes == 7 * LAYER.latent_bytes
    assert LAYER.saved_bytes == 4096 * 2 // 8 + 4 * 32 // 8
    assert LAYER.flops(10) == 10 * 4 * 512
    # Attention of 32K tokens a rank is hidden by so many FLOPs a byte: d_kv/(d T) of them, as long as all is needed.
    tokens = 8000
    assert LAYER.flops(tokens) / LAYER.key_bytes == tokens * 4096 / 4096
    # With FCP's heads, 4K blocks are hidden from 12 GB/s on at this rate.
    assert RATES.flops * GROUPED.key_bytes / GROUPED.flops(CHUNK) == pytest.approx(12.2e9, rel=0.01)


def test_two_ranks_by_hand() -> None:
    plan = one_document(2)
    found = figures(plan, LAYER, RATES)
    areas = [8192 * 8193 // 2, 16384 * 16385 // 2 - 8192 * 8193 // 2]
    assert found.imbalance == areas[1] * 2 / sum(areas)
    assert busiest(plan.keys) == 2
    sent = sent_by(plan, LAYER)
    assert sent == (0, 2 * CHUNK * LAYER.key_bytes)
    # Rank 1 attends to its own keys, a triangle, while those of rank 0 come, and then to these, a square.
    own, others = (LAYER.flops(area) / RATES.flops for area in (8192 * 8193 // 2, 8192**2))
    wire = sent.fabric_bytes / RATES.fabric_bytes
    assert found.forward_seconds == pytest.approx(max(own, wire) + others)
    assert found.backward_seconds == pytest.approx(max(2.5 * own, 2 * wire) + 2.5 * others)
    assert sent_by(plan, LAYER, node_ranks=2) == (sent.fabric_bytes, 0)


def test_latents_are_a_quarter_between_nodes_and_are_projected() -> None:
    plan = one_document(2)
    latents = figures(plan, LAYER, RATES, "latents")
    assert sent_by(plan, LAYER, "latents").fabric_bytes * 4 == sent_by(plan, LAYER).fabric_bytes
    received = 2 * CHUNK
    wire = received * (LAYER.latent_bytes / RATES.fabric_bytes + LAYER.gathered_bytes / RATES.node_bytes)
    own, others = (LAYER.flops(area) / RATES.flops for area in (8192 * 8193 // 2, 8192**2))
    projected = received * 4 * 1024 * 4096 / 8 / RATES.flops
    assert latents.forward_seconds == pytest.approx(max(own, wire) + others + projected)
    assert latents.backward_seconds == pytest.approx(max(2.5 * own, 2 * wire) + 2.5 * others + 3 * projected)
    # Inside a node they would lose, so keys and values go there: nothing changes.
    assert figures(plan, LAYER, RATES, "latents", node_ranks=2) == figures(plan, LAYER, RATES, node_ranks=2)
    with pytest.raises(ValueError, match="has no latents to send"):
        figures(plan, GROUPED, RATES, "latents")


def test_moved_queries_go_and_outputs_come_back() -> None:
    window = Window((2 * CHUNK, *[CHUNK // 8] * 16), CHUNK)
    placement = place(window, 2, "contiguous")
    tasks = moved_tasks(window, placement, 2)
    plan = ContextPlan(window, 2, placement, tasks, 1)
    assert {each.sender for each in plan.queries} == {0, 1}  # a large one goes, and small ones come
    moved = len(plan.queries) * (LAYER.query_bytes + LAYER.saved_bytes)
    assert sent_by(plan, LAYER).fabric_bytes == CHUNK * (len(plan.keys) * LAYER.key_bytes + moved)
    # Where computing takes no time: the longer ways of keys and queries, and then the way of the outputs back. Backward
    # twice the keys, and queries with what their gradients take; these come back.
    slow, instant = 1e6, 1e30
    wires = [
        max(sum(getattr(each, end) == rank for each in sent) for end in ("sender", "receiver"))
        for rank in range(2)
        for sent in (plan.keys, plan.queries)
    ]
    query, kept = LAYER.query_bytes, LAYER.saved_bytes
    on_wires = figures(plan, LAYER, Rates(instant, slow, slow))
    for times, of_moved, seconds in (
        (1, query + kept, on_wires.forward_seconds), (2, 3 * query + kept, on_wires.backward_seconds),
    ):  # fmt: skip
        each = [times * wires[2 * rank] * LAYER.key_bytes + wires[2 * rank + 1] * of_moved for rank in range(2)]
        assert seconds == pytest.approx(CHUNK * max(each) / slow)
    most = max(sum(areas) for areas in plan.stage_areas)
    free = figures(plan, LAYER, replace(RATES, fabric_bytes=instant))
    assert free.forward_seconds == pytest.approx(LAYER.flops(most) / RATES.flops)


def test_moved_tasks_as_latents_send_a_share_each_way_and_keep_what_they_computed() -> None:
    window = Window((2 * CHUNK, *[CHUNK // 8] * 16), CHUNK)
    placement = place(window, 2, "contiguous")
    plan = ContextPlan(window, 2, placement, moved_tasks(window, placement, 2), 1)
    wide, latents = sent_by(plan, LAYER), sent_by(plan, LAYER, moved="latents")
    of_keys = CHUNK * len(plan.keys) * LAYER.key_bytes
    share = 1024 * 2 // 8
    assert latents.fabric_bytes - of_keys == CHUNK * len(plan.queries) * 2 * share
    assert wide.fabric_bytes - of_keys == CHUNK * len(plan.queries) * (2 * 4096 * 2 // 8 + 4 * 32 // 8)
    assert LAYER.remote_bytes == LAYER.saved_bytes + share
    foreign = max(sum(each.receiver == rank for each in plan.queries) for rank in range(2))
    # Where computing takes no time: on the wires, shares; and the other ranks' in the node, as often backward again for
    # the queries' latents. Where wires take none, two products forward, five backward.
    slow, instant = 1e6, 1e30
    on_wires = figures(plan, LAYER, Rates(instant, instant, slow), moved="latents")
    busiest_keys = max(sum(getattr(each, end) == rank for each in plan.keys) for rank in (0, 1) for end in ENDS)
    busiest_queries = max(sum(getattr(each, end) == rank for each in plan.queries) for rank in (0, 1) for end in ENDS)
    of_wire = CHUNK * (busiest_keys * LAYER.key_bytes + 2 * busiest_queries * share) / slow
    assert on_wires.forward_seconds == pytest.approx(of_wire)
    in_node = [figures(plan, LAYER, Rates(instant, slow, instant), moved="latents")]
    in_node += [
        figures(plan, LAYER, replace(RATES, node_bytes=instant, fabric_bytes=instant), moved=how) for how in HOW
    ]
    gathered, made, unmade = ((each.forward_seconds, each.backward_seconds) for each in in_node)
    assert gathered == pytest.approx([foreign * CHUNK * 7 * share * times / slow for times in (2, 3)])
    products = foreign * CHUNK * 2 * 1024 * 512 / RATES.flops
    least = [made[number] - unmade[number] for number in (0, 1)]
    assert all(0 < less <= most * 1.0001 for less, most in zip(least, (2 * products, 5 * products), strict=True))


def test_queries_may_travel_as_latents_where_few_heads_of_keys_do_not() -> None:
    spec = {
        "name": "long", "model": {"preset": "7b", "num_key_value_heads": 8}, "resources": {"gpus_per_worker": 1},
        "parallelism": {"tensor_parallel_size": 4, "context_parallel_size": 4, "context": {"pool": "tasks"}},
        "training": {"steps": 1, "sequence_length": 131072, "global_batch_size": 1, "micro_batch_size": 1,
                     "precision": "bf16"},
    }  # fmt: skip
    for changes, sent in (
        ({}, ("keys", "latents")),
        ({"context": {"pool": "tasks", "exchange": "keys"}}, ("keys", "keys")),
        ({"context": {"pool": "tasks", "exchange": "latents"}}, ("latents", "latents")),
        ({"strategy": "vanilla"}, ("keys", "keys")),
    ):
        job = JobSpec.model_validate(spec | {"parallelism": spec["parallelism"] | changes})
        found = ContextPlanner.of(job, machine_for(job.resources, "bf16"))
        assert (found.exchange, found.moved) == sent
        assert found.moves_latents == (sent[1] == "latents")


def test_stages_hide_more() -> None:
    slow = replace(RATES, fabric_bytes=5e9)  # else a rank's own keys hide all that come
    seconds = [figures(one_document(8, stages, 8), GROUPED, slow).seconds for stages in (1, 4)]
    assert seconds[1] < seconds[0]


def test_the_rate_of_pieces() -> None:
    assert [efficiency(tokens) for tokens in (256, 512, 2048, 4096, 10**6)] == pytest.approx([0.125, 0.25, 0.9, 1, 1])
    assert 0.25 < efficiency(1024) < 0.9


def dealing(rates: Rates = RATES, layer: AttentionLayer = GROUPED) -> ContextPlanner:
    return ContextPlanner(8, 2048, None, layer, rates)


def test_what_is_even_is_taken_where_links_are_fast_and_what_sends_least_where_they_are_slow() -> None:
    documents = documents_of("wlbllm", 2**17, 3)
    fast, slow = dealing(replace(RATES, fabric_bytes=1e15)), dealing(replace(RATES, fabric_bytes=1e8))
    even, least = fast.plan(documents), slow.plan(documents)
    assert figures(even, GROUPED, RATES).imbalance <= 1.03
    assert len(least.keys) < len(even.keys) / 3
    for each, other in ((fast, least), (slow, even)):
        taken, left = (figures(plan, GROUPED, each.rates).seconds for plan in (each.plan(documents), other))
        assert taken < left
    assert even.stages == least.stages == 4


def test_tasks_move_where_that_takes_less_time_and_a_quarter_of_a_ranks_chunks_at_most() -> None:
    """Eight chunks a rank leave this window uneven; on fast links offloaded tasks even it out."""
    fast, slow = (replace(RATES, fabric_bytes=each) for each in (400e9, 10e9))
    documents = documents_of("bimodal", 2**17, 1)
    for rates, moves in ((fast, True), (slow, False)):
        own = dealing(rates)
        tasks = replace(own, moves_tasks=True)
        fixed, chosen = own.plan(documents), tasks.plan(documents)
        assert not fixed.queries
        assert bool(chosen.queries) == moves
        assert busiest(chosen.queries) <= chosen.window.chunks // 8 // 4
        taken = [figures(plan, GROUPED, own.rates).seconds for plan in (chosen, fixed)]
        assert taken[0] < taken[1] if moves else taken[0] == taken[1]


def test_kernels_that_take_pieces_together_have_their_full_rate_on_short_ones() -> None:
    window = Window((4 * 512,), 512)
    placement = place(window, 1, "contiguous")
    alone = ContextPlan(window, 1, placement, local_tasks(window, placement), 1)
    apart, together = (of_plan(alone, LAYER, RATES).seconds for of_plan in (by_piece, figures))
    assert apart == pytest.approx(4 * together)
    assert together == pytest.approx(3.5 * LAYER.flops(window.area) / RATES.flops)


def test_jobs_deal_by_their_machine_and_their_nodes() -> None:
    spec = {
        "name": "long", "model": {"preset": "7b", "sliding_window": 65536}, "resources": {"gpus_per_worker": 1},
        "parallelism": {"tensor_parallel_size": 4, "context_parallel_size": 4},
        "training": {"steps": 1, "sequence_length": 131072, "global_batch_size": 1, "micro_batch_size": 1,
                     "precision": "bf16"},
    }  # fmt: skip
    job = JobSpec.model_validate(spec)
    machine = machine_for(job.resources, "bf16")
    found = ContextPlanner.of(job, machine)
    assert (found.ranks, found.chunk, found.sees, found.exchange, found.node_ranks) == (4, 4096, 65536, "latents", 2)
    assert found.rates == Rates(machine.profile.attention_flops, 240e9, 20e9)
    everywhere = job.parallelism.model_copy(update={"context": ContextConfig(exchange="latents")})
    assert ContextPlanner.of(job.model_copy(update={"parallelism": everywhere}), machine).node_ranks == 1
