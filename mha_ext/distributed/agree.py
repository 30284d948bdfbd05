"""What the ranks of a group settle before any work: that they pose one problem, and one seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional


def check_member(group: dist.ProcessGroup) -> None:
    """Raises where this process is not one of the group's ranks."""
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"group must have this process among its ranks, but rank {dist.get_rank()} of the default group is not in "
            "it; call this on the group's own ranks alone"
        )


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def agree(group: dist.ProcessGroup, describe: Callable[[], dict[str, Any]]) -> None:
    """Raises on every rank where any rank refuses its arguments, or describes another problem than the first one.

    ``describe`` checks this rank's arguments and says what all ranks must have in common.

    Raises:
        ValueError, TypeError: what ``describe`` raised here; where it raised elsewhere, a ValueError names the rank.
        RuntimeError: where a rank is gone, or does not answer within the group's timeout.
    """
    mine: dict[str, Any] = {}
    refused: Exception | None = None
    try:
        mine = describe()
    except Exception as error:  # whatever it is, the other ranks wait for an answer
        refused = error
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, str(refused) if refused else mine, group=group)
    if refused:
        raise refused
    for rank, answer in enumerate(answers):
        if isinstance(answer, str):
            raise ValueError(
                f"every rank must have valid arguments, but rank {rank} says: {answer}"
            )
    first = answers[0]
    for rank, answer in enumerate(answers):
        if answer.keys() != first.keys():
            raise ValueError(
                "every rank must be given the same arguments, mask and key_padding_mask on all ranks or on none and in "
                f"one form, but those of rank {rank} are others than those of rank 0"
            )
        for name in first:
            if answer[name] != first[name]:
                raise ValueError(
                    f"{name} must be the same on every rank of the group, not {first[name]} on rank 0 and "
                    f"{answer[name]} on rank {rank}; give each rank its shard of one problem"
                )


def shared_seed(device: torch.device, groups: list[dist.ProcessGroup]) -> Tensor:
    """A seed for dropout, int64 [2], that is the same on all ranks of the groups: that of their first rank.

    Every rank draws one, so that the generators of ranks that were seeded alike stay alike.
    """
    seed = torch.randint(0, 2**32, (2,), device=device)
    for group in groups:
        seed = functional.wait_tensor(functional.broadcast(seed, 0, group))
    return seed
