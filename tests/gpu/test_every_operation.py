"""Every operation, on tensors of a GPU, does what it does on those of a CPU, which have oracles."""

import pytest
import torch

pytestmark = pytest.mark.ranks(1, 2)


def drawn(hvd, *shape, dtype=torch.float32, seed=0):
    """Other values on every rank, that add and multiply exactly."""
    generator = torch.Generator().manual_seed(100 * seed + hvd.rank())
    values = torch.randint(-8, 9, shape, generator=generator)
    return values.to(dtype)


def reduced(**options):
    def run(hvd, put):
        return [
            hvd.allreduce(put(drawn(hvd, count, dtype=dtype)), **_named(hvd, options))
            for count in (1, 1001, 2_048_003)
            for dtype in (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64)
            if dtype.is_floating_point or options["op"] not in ("Average", "Adasum")
        ]

    return run


def _named(hvd, options):
    return {**options, "op": getattr(hvd, options["op"])}


def in_place(hvd, put):
    tensors = [put(drawn(hvd, 7, 3, seed=seed)) for seed in range(4)]
    assert hvd.allreduce_(tensors[0], op=hvd.Min) is tensors[0]
    assert hvd.broadcast_(tensors[1], root_rank=hvd.size() - 1) is tensors[1]
    hvd.grouped_allreduce_(tensors[2:], op=hvd.Sum)
    return tensors


def grouped(hvd, put):
    tensors = [put(drawn(hvd, 4 * hvd.size(), seed=seed)) for seed in range(3)]
    result = [
        *hvd.grouped_allreduce(tensors, op=hvd.Average),
        *hvd.grouped_allgather(tensors),
        *hvd.grouped_reducescatter(tensors, op=hvd.Sum),
    ]
    hvd.grouped_broadcast_(tensors, root_rank=0)
    return [*result, *tensors]


def rows_of_each(hvd, put):
    rows = put(drawn(hvd, 2 * hvd.rank() + 1, 5))
    return [hvd.allgather(rows), hvd.allgather(rows[:0]), hvd.allgather(put(torch.tensor(3.0)))]


def splits(hvd, put):
    counts = torch.tensor([hvd.rank() + 1, *[2] * (hvd.size() - 1)])
    block = put(drawn(hvd, int(counts.sum()), 3))
    received, theirs = hvd.alltoall(block, splits=counts)
    return [received, theirs, hvd.alltoall(put(drawn(hvd, 2 * hvd.size(), 2)))]


def scattered(hvd, put):
    uneven = put(drawn(hvd, 2 * hvd.size() + 1, 3))
    return [hvd.reducescatter(uneven, op=hvd.Sum), hvd.reducescatter(uneven, op=hvd.Average)]


def compressed(hvd, put):
    halves = [
        hvd.allreduce(put(drawn(hvd, 1000)), op=hvd.Sum, compression=compression)
        for compression in (hvd.Compression.fp16, hvd.Compression.bf16)
    ]
    assert all(half.dtype == torch.float32 for half in halves)
    return halves


def scaled(hvd, put):
    factors = {"prescale_factor": 0.5, "postscale_factor": 4.0}
    return [
        hvd.allreduce(put(drawn(hvd, count, dtype=dtype)), op=hvd.Sum, **factors)
        for count in (99, 2_048_003)
        for dtype in (torch.float32, torch.float64, torch.float16)
    ]


def in_a_process_set(hvd, put):
    if hvd.size() == 1:
        return []  # it would be the world
    process_set = hvd.add_process_set([hvd.size() - 1])
    result = []
    if process_set.included():
        result = [hvd.allreduce(put(torch.full((5,), 3.0)), process_set=process_set, op=hvd.Sum)]
    hvd.remove_process_set(process_set)
    return result


def objects_with_tensors(hvd, put):
    text, tensor = hvd.broadcast_object(("text", put(drawn(hvd, 3))), root_rank=hvd.size() - 1)
    assert text == "text"
    return [tensor]


def others_work_for_who_has_joined(hvd, put):
    steps = 2 if hvd.rank() == 0 else 4
    results = [hvd.allreduce(put(torch.ones(4)), op=hvd.Sum, name="steps") for _ in range(steps)]
    hvd.join()
    return results


def autograd(hvd, put):
    leaf = put(drawn(hvd, 6, 2)).requires_grad_()
    (hvd.allreduce(leaf, op=hvd.Sum).square().sum() + hvd.allgather(leaf).sum()).backward()
    return [leaf.grad]


OPERATIONS = {
    **{op: reduced(op=op) for op in ("Sum", "Average", "Min", "Max", "Product")},
    "Adasum": reduced(op="Adasum"),
    **{
        function.__name__: function
        for function in (
            in_place,
            grouped,
            rows_of_each,
            splits,
            scattered,
            compressed,
            scaled,
            in_a_process_set,
            objects_with_tensors,
            others_work_for_who_has_joined,
            autograd,
        )
    },
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_as_on_a_cpu(hvd, gpu, name):
    run = OPERATIONS[name]
    expected = run(hvd, lambda tensor: tensor)
    # Adasum's dot products are added up in another order.
    tolerance = 1e-2 if name == "Adasum" else 0
    for _ in range(3):
        found = run(hvd, lambda tensor: tensor.to(gpu, copy=True))
        assert len(found) == len(expected)
        for mine, right in zip(found, expected):
            assert mine.dtype == right.dtype
            torch.testing.assert_close(mine.cpu(), right, rtol=tolerance, atol=tolerance)


# ---- training ----------------------------------------------------------------------------------


def model_on(device, seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).to(
        device
    )


def flat(model):
    return torch.cat([param.detach().cpu().flatten() for param in model.parameters()])


def train(model, optimizer, gpu, rank, steps, passes=1):
    for step in range(steps):
        optimizer.zero_grad()
        for half in range(passes):
            inputs = torch.full((4, 6), 0.1 * (step + half) + rank, device=gpu)
            model(inputs).square().mean().backward()
        optimizer.step()


def everyone_has(hvd, mine):
    return all(torch.equal(theirs, mine) for theirs in hvd.allgather_object(mine))


def test_weights_and_state_are_broadcast(hvd, gpu):
    model = model_on(gpu, seed=hvd.rank())
    inner = torch.optim.Adam(model.parameters(), lr=0.01 * (hvd.rank() + 1))
    train(model, inner, gpu, hvd.rank(), steps=2 + hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(inner, root_rank=0)
    assert everyone_has(hvd, flat(model))
    for state in inner.state.values():
        assert everyone_has(hvd, state["exp_avg"].cpu())
        assert state["exp_avg"].device.type == gpu.type
    assert inner.param_groups[0]["lr"] == 0.01


def test_gradients_of_several_passes(hvd, gpu):
    model = model_on(gpu, seed=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        backward_passes_per_step=2,
    )
    train(model, optimizer, gpu, hvd.rank(), steps=3, passes=2)
    assert everyone_has(hvd, flat(model))
    assert not torch.equal(flat(model), flat(model_on(gpu, seed=0)))


def test_algorithms_change_while_training(hvd, gpu):
    model = model_on(gpu, seed=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    for name in ("bytegrad", "gradient_allreduce"):
        optimizer.set_algorithm(name)
        train(model, optimizer, gpu, hvd.rank(), steps=2)
        assert everyone_has(hvd, flat(model))


@pytest.mark.parametrize("name", ["gradient_allreduce", "topk", "async_model_average", "qadam"])
def test_a_wrapped_module_of_the_old_names(hvd, gpu, name):
    import bagua.torch_api as old

    old.init_process_group()
    model = model_on(gpu, seed=0)
    if name == "qadam":
        from bagua.torch_api.algorithms.q_adam import QAdamOptimizer

        inner = QAdamOptimizer(model.parameters(), warmup_steps=2)
        name = old.algorithms.Algorithm.init("qadam", q_adam_optimizer=inner)
    else:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = model.with_bagua([inner], name)
    before = flat(model)
    train(wrapped, inner, gpu, hvd.rank(), steps=4)
    assert not torch.equal(flat(model), before)
    assert flat(model).isfinite().all()


def test_values_of_shared_memory_and_of_a_gpu_in_one_call(hvd, gpu):
    shared = hvd.empty_shared(1000).fill_(hvd.rank() + 1)
    there = torch.full((500,), 2.0, device=gpu)
    first, second = hvd.grouped_allreduce([shared, there], op=hvd.Sum)
    n = hvd.size()
    assert (first == n * (n + 1) // 2).all()
    assert (second == 2 * n).all()
    assert second.device.type == gpu.type
