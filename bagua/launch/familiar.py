"""Flags of horovodrun and bagua.distributed.launch that are no settings here.

They are accepted without effect, or refused.
"""

from __future__ import annotations

_EVENTS = "ranks wake each other by events, there is no cycle"
_CACHE = (
    "every operation is remembered as it comes, up to 65536 names and 4096 unnamed descriptions per"
    " process set; what is beyond that works and is sent in full every time"
)
_PICKED = "the collective is chosen by --allreduce"
_MPI_ONLY = "ranks always find each other through MPI"

# Accepted for existing command lines: flag, whether it takes a value, why it has no effect.
NO_EFFECT = (
    ("--disable-cache", False, _CACHE),
    ("--cache-capacity", True, _CACHE),
    ("--cycle-time-ms", True, _EVENTS),
    ("--hierarchical-allreduce", False, _PICKED),
    ("--no-hierarchical-allreduce", False, _PICKED),
    ("--hierarchical-allgather", False, _PICKED),
    ("--no-hierarchical-allgather", False, _PICKED),
    ("--gloo", False, _MPI_ONLY),
    ("--mpi", False, ""),
    ("--gloo-timeout-seconds", True, _MPI_ONLY),
    ("--mpi-threads-disable", False, "MPI is asked for the threads the engine needs"),
    ("--no-mpi-threads-disable", False, "MPI is asked for the threads the engine needs"),
    ("--num-nccl-streams", True, "streams are chosen by the engine"),
    ("--thread-affinity", True, "the system places the engine's thread; see --bind-to"),
    ("--no-autotune", False, ""),
    ("--no-timeline-mark-cycles", False, ""),
    ("--stall-check", False, ""),
    ("--log-with-timestamp", False, "see --prefix-output-with-timestamp"),
    ("--log-without-timestamp", False, "see --prefix-output-with-timestamp"),
    ("--log-hide-timestamp", False, "see --prefix-output-with-timestamp"),
    ("--master_addr", True, _MPI_ONLY),
    ("--master_port", True, _MPI_ONLY),
    ("--bagua_service_port", True, "there is no service"),
    ("--no_python", False, "what is no script.py runs as it is"),
)

_ELASTIC = "a job has a fixed number of ranks; give it with -np"
_TUNING = "set --fusion-mb, --bucket-mb and --allreduce by hand"
_TIMELINE = "there is no timeline yet"

_ONE_STARTS_ALL = "one bagua-run starts all hosts; name them with -H or --hostfile"

# Accepted with this one value: flag, value, what to do instead of another.
ONLY = (
    ("--nnodes", "1", _ONE_STARTS_ALL),
    ("--node_rank", "0", _ONE_STARTS_ALL),
    ("--autotune_level", "0", _TUNING),
)

# Refused rather than ignored: flag, whether it takes a value, what to do instead.
NOT_YET = (
    ("--timeline-filename", True, _TIMELINE),
    ("--timeline-mark-cycles", False, _TIMELINE),
    ("--autotune", False, _TUNING),
    ("--autotune-log-file", True, _TUNING),
    ("--autotune-warmup-samples", True, _TUNING),
    ("--autotune-steps-per-sample", True, _TUNING),
    ("--autotune-bayes-opt-max-samples", True, _TUNING),
    ("--autotune-gaussian-process-noise", True, _TUNING),
    ("--min-np", True, _ELASTIC),
    ("--min-num-proc", True, _ELASTIC),
    ("--max-np", True, _ELASTIC),
    ("--max-num-proc", True, _ELASTIC),
    ("--slots-per-host", True, _ELASTIC),
    ("--slots", True, _ELASTIC),
    ("--elastic-timeout", True, _ELASTIC),
    ("--reset-limit", True, _ELASTIC),
    ("--blacklist-cooldown-range", True, _ELASTIC),
    ("--host-discovery-script", True, "name the hosts with -H or --hostfile"),
    ("--jsrun", False, "only mpirun is driven; name yours with --mpirun"),
    ("--host_list", True, "name the hosts with -H or --hostfile"),
    ("--default_bucket_size", True, "give megabytes to --bucket-mb"),
    ("--report_metrics", False, "there are no metrics yet"),
    ("--set_additional_flag", False, "a rank learns its number from bagua.get_local_rank()"),
    ("--tcp", False, "on Open MPI --mpi-args='--mca pml ob1 --mca btl self,sm,tcp' does it"),
)
