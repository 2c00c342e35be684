"""Training on several devices: one process each, started by torchrun, and every batch split up.

The batch size is the recipe's for any number of processes: each takes its share of the batch, and
losses are weighted so that the averaged gradient is that of the whole batch. Three things differ
from training in one process. Each process draws the random crops of its share itself. Batch norms
normalise each share by itself, and the running statistics of the first process are saved. With
batch norms, a last batch that would leave a process fewer than two images is dropped. Only the
first process writes files.
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
    """Number of processes that torchrun started together; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1))


def make_accelerator() -> Accelerator:
    """The accelerator of this process, connected to those of the other processes."""
    accelerator = Accelerator(cpu=processes() > 1 and not torch.cuda.is_available())
    count = accelerator.num_processes
    if count != processes():  # accelerate would silently go on alone
        what, cure = "processes that train together", "Start them with --devices or torchrun."
        raise TwoshiftError(what, must_be=processes(), got=count, cure=cure)
    return accelerator


def share(rows: NDArray[np.int64], accelerator: Accelerator) -> tuple[NDArray[np.int64], float]:
    """Rows of a batch that this process takes, and the weight of their mean loss.

    The average of the weighted losses over the processes is the mean loss of the batch, even if the
    shares differ in size. A process without rows takes one with weight 0, since all processes must
    step together.
    """
    own = rows[accelerator.process_index :: accelerator.num_processes]
    if not len(own):
        return rows[:1], 0.0
    return own, len(own) * accelerator.num_processes / len(rows)


def smallest_batch(model: nn.Module, largest: int, accelerator: Accelerator) -> int:
    """Fewest images of a batch that is not dropped: batch norms need two in every process.

    Args:
        model: Model to be trained.
        largest: Number of images in a full batch.
        accelerator: Accelerator of this process.
    """
    count = accelerator.num_processes
    if count == 1 or next(batch_norms(model), None) is None:
        return 2
    if largest < 2 * count:
        what = f"images in a batch, for batch norms in {count} processes"
        cure = "Use fewer devices, or a larger batch_size."
        raise SettingError(what, must_be=f"at least {2 * count}", got=largest, cure=cure)
    return 2 * count


def own_generator(rng: np.random.Generator, accelerator: Accelerator) -> np.random.Generator:
    """A random generator for this process alone; the other processes get other ones."""
    if accelerator.num_processes == 1:
        return rng
    return rng.spawn(accelerator.num_processes)[accelerator.process_index]


def gather(part: Tensor, accelerator: Accelerator) -> Tensor:
    """Rows of all processes, in the order of the processes; their numbers of rows may differ."""
    if accelerator.num_processes == 1:
        return part
    lengths = accelerator.gather(torch.tensor([len(part)], device=part.device)).tolist()
    padded = part.new_zeros(max(lengths), *part.shape[1:])
    padded[: len(part)] = part
    parts = accelerator.gather(padded).split(max(lengths))
    return torch.cat([p[:n] for p, n in zip(parts, lengths, strict=True)])


@contextmanager
def lost_process_errors() -> Iterator[None]:
    """Turn the error that torch raises after another process ended into a TwoshiftError."""
    try:
        yield
    except RuntimeError as e:
        lost = isinstance(e, torch.distributed.DistBackendError) or "Connection" in str(e)
        if processes() == 1 or not lost:
            raise
        what = "another process of this training has ended"
        raise TwoshiftError(what, cure="See its message.") from e


def launch(devices: int, arguments: Sequence[str]) -> None:
    """Run a command of this package in several processes, and wait for all of them.

    Args:
        devices: Number of GPUs to use, or of processes on a machine without GPUs.
        arguments: Arguments of the command line.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    if processes() > 1:
        must_be = f"{processes()}, as many as torchrun started"
        raise SettingError("--devices", must_be=must_be, got=devices)
    if torch.cuda.is_available() and torch.cuda.device_count() < devices:
        must_be = f"at most {torch.cuda.device_count()}, the number of GPUs"
        raise SettingError("--devices", must_be=must_be, got=devices)
    threads = max(1, (os.cpu_count() or 1) // devices)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # torchrun's default is 1
    options = ["--standalone", f"--nproc-per-node={devices}", "-m", "twoshift.cli"]
    try:
        run(parse_args([*options, *arguments]))
    except ChildFailedError as e:
        code = e.get_first_failure()[1].exitcode
        what = f"one of {devices} processes failed with exit code {code}"
        cure = "Its message is above; run the same command again to resume from the last epoch."
        raise TwoshiftError(f"{what}, and the others were stopped", cure=cure) from None
    except SignalException as e:
        raise KeyboardInterrupt from e
