"""What benchmarks/gpu.py makes of a trace."""

from benchmarks.gpu import waits_in


def test_calls_that_wait_are_counted_between_the_steps_only():
    events = [
        ("cudaDeviceSynchronize", 1, 2),
        ("steps", 5, 50),
        ("aten::add", 6, 7),
        ("cudaLaunchKernel", 6, 7),
        ("cudaMemcpyAsync", 7, 8),
        ("cudaStreamSynchronize", 9, 12),
        ("cudaMalloc", 20, 21),
        ("cudaMalloc", 30, 31),
        ("cuStreamSynchronize", 40, 41),
        ("cudaDeviceSynchronize", 60, 61),
    ]
    expected = {"cudaStreamSynchronize": 1, "cudaMalloc": 2, "cuStreamSynchronize": 1}
    assert waits_in(events) == expected
