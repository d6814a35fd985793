"""pytest over real MPI processes.

`@pytest.mark.ranks(1, 2, 3, 4)` runs a test once for each of these numbers of ranks. Importing
torch costs seconds, so mpirun is not started per test but per number of ranks: one *job* runs all
tests of that number, and its ranks write their reports to files that the main pytest reads as they
appear. A test that hangs or crashes ends its job; the tests after it get a new one.

A tuple, as in `ranks((2, 1))`, is a number of ranks for each of several hosts, which are network
namespaces (benchmarks/hosts.py); `--hosts=2` deals the ranks of all other tests out among two.

- plugin.py   the main process: marker, order, one result out of all ranks' reports
- job.py      the job as the main process sees it: start, wait, stacks of a hang, kill
- worker.py   the job as each of its ranks sees it: run, report, meet the others
- processes.py  mpirun's command line, the end of all it started, the `run_ranks` fixture
"""
