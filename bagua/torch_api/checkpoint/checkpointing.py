"""`save_checkpoint` and `load_checkpoint`: a model on all ranks, each thing once.

    latest_checkpointed_iteration.txt    the number of the last checkpoint that is whole
    iter_0000100/shared.pt               what rank 0 has, and others like it
    iter_0000100/rank_00003.pt           what rank 3 has otherwise, or alone, and what it lacks

Of a job that averages gradients, and has no experts, the files of ranks hold next to nothing. Where
an algorithm lets replicas differ they hold weights and states, too: what differs is found by
comparing checksums. Cost: a checksum of everything on every rank, beside writing.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Union

import torch

from bagua.common.errors import UsageError
from bagua.common.objects import allgather_object, broadcast_object
from bagua.common.together import together
from bagua.common.warn import warn
from bagua.torch_api.checkpoint import files
from bagua.torch_api.checkpoint.items import Items, Key, digest, items_of, take_up
from bagua.torch_api.data_parallel import DistributedDataParallel
from bagua.torch_api.world import get_rank, get_world_size

_Folder = Union[str, "os.PathLike[str]"]
_Optimizers = Union[torch.optim.Optimizer, Sequence[torch.optim.Optimizer], None]


def save_checkpoint(
    iteration: int,
    checkpoints_path: _Folder,
    model: torch.nn.Module,
    optimizer: _Optimizers = None,
    lr_scheduler: Any = None,
) -> None:
    """Saves what is needed to go on in the same bits; every rank calls it.

    Numbers of chance are not part of it.

    Args:
        iteration: a number for this checkpoint.
        checkpoints_path: a folder that all ranks see; it is made if need be.
        optimizer: one, or a list of them.
        lr_scheduler: or anything else that has a `state_dict()`; each rank's, if they differ.
    """
    folder = Path(checkpoints_path) / files.folder_name(iteration)
    items, own = items_of(_plain(model), _listed(optimizer), lr_scheduler)
    mine, lacks = _unlike_the_first(items, own)
    # Equal in all files of one checkpoint, also where an earlier one of this number is replaced.
    head: files.State = {"token": broadcast_object(uuid.uuid4().hex), "ranks": get_world_size()}
    experts = {key for key in own if key[0] != "kept"}
    about = (bool(lacks or set(mine) - own), bool(experts), bool(own - experts))
    differ, any_experts, kept = (any(each) for each in zip(*allgather_object(about)))
    with together(f"checkpoint {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        files.write(folder / files.rank_file(get_rank()), {**head, "items": mine, "lacks": lacks})
        if get_rank() == 0:
            shared = {key: value for key, value in items.items() if key not in own}
            flags = {"differ": differ, "experts": any_experts, "kept": kept}
            files.write(folder / files.SHARED, {**head, **flags, "items": shared})
    with together(f"checkpoint {folder}"):
        if not (folder / files.SHARED).exists():
            raise UsageError(f"{folder} is not where rank 0 has it; give a folder all ranks see")
        if get_rank() == 0:
            files.replace(Path(checkpoints_path) / files.TRACKER, f"{iteration}\n".encode())


def load_checkpoint(
    checkpoints_path: _Folder,
    model: torch.nn.Module,
    optimizer: _Optimizers = None,
    lr_scheduler: Any = None,
    strict: bool = True,
) -> int:
    """Goes on from the last checkpoint in the folder, and returns its number; 0 if there is none.

    Every rank calls it, after `with_bagua`, which would make all ranks' states rank 0's. Another
    number of ranks is an error only where there are experts; else all begin with what rank 0 had,
    and what algorithms keep from step to step begins anew, which a warning tells. Files are loaded
    as pickles: load none from strangers.

    Args:
        strict: the model has exactly the weights of the checkpoint.
    """
    with together(f"checkpoints in {checkpoints_path}"):
        found = files.latest(Path(checkpoints_path))
    numbers = allgather_object(None if found is None else found[0])
    if any(number != numbers[0] for number in numbers):
        raise UsageError(
            f"ranks find different checkpoints in {checkpoints_path}: {numbers}; give a folder "
            "all ranks see"
        )
    if found is None:
        return 0
    iteration, folder = found
    with together(f"checkpoint {folder}"):
        shared = files.read(folder / files.SHARED)
        items = _of_this_rank(folder, shared)
        take_up(items, _plain(model), _listed(optimizer), lr_scheduler, strict)
    return iteration


def _unlike_the_first(items: Items, own: set[Key]) -> tuple[Items, list[Key]]:
    """What this rank has alone, or otherwise than rank 0; and the keys of what only rank 0 has."""
    mine = {key: digest(value) for key, value in items.items() if key not in own}
    first = broadcast_object(mine)
    unlike = {k: value for k, value in items.items() if k in own or mine[k] != first.get(k)}
    return unlike, [key for key in first if key not in items]


def _of_this_rank(folder: Path, shared: files.State) -> Items:
    """Rank 0's where the checkpoint is of another number of ranks."""
    items: Items = shared["items"]
    ranks = shared["ranks"]
    if ranks != get_world_size():
        if shared["experts"]:
            raise UsageError(
                f"{folder} has the experts of {ranks} ranks, here are {get_world_size()}: start "
                "as many"
            )
        if (shared["differ"] or shared["kept"]) and get_rank() == 0:
            warn(
                f"{folder} is of {ranks} ranks, here are {get_world_size()}: all begin with what "
                "rank 0 had, and what the algorithm had kept begins anew",
            )
        return items
    own = files.read(folder / files.rank_file(get_rank()))
    if own["token"] != shared["token"]:
        raise UsageError(
            f"{folder} has files of two checkpoints, since a save over an earlier one with the "
            f"same number was interrupted; write the number of another one into {files.TRACKER}"
        )
    items = {key: value for key, value in items.items() if key not in own["lacks"]}
    return {**items, **own["items"]}


def _plain(model: torch.nn.Module) -> torch.nn.Module:
    """A checkpoint is of the model, whatever it is wrapped in."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _listed(optimizers: _Optimizers) -> Sequence[torch.optim.Optimizer]:
    if optimizers is None:
        return []
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
