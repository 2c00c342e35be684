"""Training on several devices: one process each under torchrun, one batch split between them.

The batch is the recipe's whatever the number of processes: each takes its share, and losses are
weighted so that the averaged gradient is that of the whole batch. Three things differ from one
process: each draws the random crops of its share itself; each normalises its share by itself where
there are batch norms, and the running statistics kept are those of the first; and a last batch that
gives such a share fewer than two images is left out. Only the first one writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn

from twoshift.errors import SettingError, TwoshiftError
from twoshift.models.norm import batch_norms


def processes() -> int:
    """How many processes torchrun started together with this one; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def make_accelerator() -> Accelerator:
    """The device of this process, joined with the others'."""
    several = processes() > 1
    accelerator = Accelerator(cpu=several and not torch.cuda.is_available())
    if accelerator.num_processes != processes():  # it goes on alone without a word
        raise TwoshiftError(
            "processes that train together",
            must_be=processes(),
            got=accelerator.num_processes,
            cure="Start them by --devices, or by torchrun.",
        )
    return accelerator


def share(rows: NDArray[np.int64], accelerator: Accelerator) -> tuple[NDArray[np.int64], float]:
    """The rows of a batch that this process takes, and the weight of their mean loss.

    The average of the weighted losses is the mean over the batch, however it is divided. A
    process without rows takes one with weight 0, since all of them must step together.
    """
    own = rows[accelerator.process_index :: accelerator.num_processes]
    if not len(own):
        return rows[:1], 0.0
    return own, len(own) * accelerator.num_processes / len(rows)


def smallest_batch(model: nn.Module, largest: int, accelerator: Accelerator) -> int:
    """Images without which a batch is left out: batch statistics need two in every process.

    Args:
        model: To be trained.
        largest: Images of a full batch.
        accelerator: Of this process.
    """
    count = accelerator.num_processes
    if count == 1 or next(batch_norms(model), None) is None:
        return 2
    if largest < 2 * count:
        raise SettingError(
            f"images in a batch, for batch norms in {count} processes",
            must_be=f"at least {2 * count}",
            got=largest,
            cure="Use fewer devices, or a larger batch_size.",
        )
    return 2 * count


def own_generator(rng: np.random.Generator, accelerator: Accelerator) -> np.random.Generator:
    """Randomness that the processes do not share, for what only one of them draws."""
    if accelerator.num_processes == 1:
        return rng
    return rng.spawn(accelerator.num_processes)[accelerator.process_index]


def gather(part: Tensor, accelerator: Accelerator) -> Tensor:
    """The rows of all processes, first process first; they may have different numbers of them."""
    if accelerator.num_processes == 1:
        return part
    length = accelerator.gather(torch.tensor([len(part)], device=part.device)).tolist()
    padded = part.new_zeros(max(length), *part.shape[1:])
    padded[: len(part)] = part
    parts = accelerator.gather(padded).split(max(length))
    return torch.cat([p[:n] for p, n in zip(parts, length, strict=True)])


@contextmanager
def told_of_lost_ones() -> Iterator[None]:
    """What a process meets when another one is gone is an error without a traceback."""
    try:
        yield
    except RuntimeError as e:
        lost = isinstance(e, torch.distributed.DistBackendError) or "Connection" in str(e)
        if processes() == 1 or not lost:
            raise
        raise TwoshiftError(
            "another process of this training has ended", cure="See its message."
        ) from e


def launch(devices: int, arguments: Sequence[str]) -> None:
    """Run a command of this package in as many processes; returns when all of them are done.

    Args:
        devices: GPUs to use, or processes where there is none.
        arguments: Of the command line.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    if processes() > 1:
        raise SettingError(
            "--devices", must_be=f"{processes()}, as many as torchrun started", got=devices
        )
    if torch.cuda.is_available() and torch.cuda.device_count() < devices:
        raise SettingError(
            "--devices", must_be=f"at most {torch.cuda.device_count()}, the GPUs here", got=devices
        )
    threads = max(1, (os.cpu_count() or 1) // devices)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # or torchrun would choose 1
    options = ["--standalone", f"--nproc-per-node={devices}", "-m", "twoshift.cli"]
    try:
        run(parse_args([*options, *arguments]))
    except ChildFailedError as e:
        code = e.get_first_failure()[1].exitcode
        raise TwoshiftError(
            f"one of {devices} processes failed with exit code {code}, and the others were ended",
            cure="Its message is above; the same command again goes on from the last epoch.",
        ) from None
    except SignalException as e:
        raise KeyboardInterrupt from e
