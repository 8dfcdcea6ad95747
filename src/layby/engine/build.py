"""From settings to a running engine: the model is loaded, the pools are sized, torch comes in."""

from __future__ import annotations

import logging
import os

from layby.engine.config import EngineConfig
from layby.engine.elastic import ElasticPool, elastic_pool
from layby.engine.engine import Engine
from layby.engine.memory import available_host_bytes
from layby.engine.recorder import RecordedScheduler, Recorder
from layby.engine.recording import RecordingFile, check_recordable
from layby.errors import counted, sized
from layby.scheduling import Scheduler, SchedulerConfig

logger = logging.getLogger("layby.engine")


def build_engine(config: EngineConfig, *, allow_download: bool = True) -> Engine:
    """Load the model of ``config`` and build the engine over it.

    Args:
        config: Settings.
        allow_download: Whether a model that is not on this machine may be fetched.

    Raises:
        ConfigError: The settings do not fit the machine or the model.
        ModelError: The model cannot be found, read or run.
    """
    if config.record is not None:
        check_recordable(config.record)
    # Read when torch is first imported. By default its threads spin between operations; on a
    # machine with other work that makes a step several times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from layby import kernels
    from layby.execution import TorchExecutor, resolve_device
    from layby.execution.faults import VARIABLE, Faults
    from layby.models import load
    from layby.models.networks import build_network, resolve_dtype

    faults = Faults.from_environment()
    if faults:
        logger.warning("%s is set: faults are injected on purpose", VARIABLE)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
        if kernels.available():
            kernels.set_num_threads(config.num_threads)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    model = load(config.model, allow_download=allow_download)
    geometry = model.config
    network = build_network(
        model,
        dtype=dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        device=device,
        block_size=config.block_size,
    )
    # Memory is looked at only now, when the weights have theirs.
    on_cuda = device.type == "cuda"
    block_bytes = network.kv_format(config.block_size).block_bytes
    resolved = config.resolve(
        context_length=geometry.context_length,
        block_bytes=block_bytes,
        host_bytes=available_host_bytes(),
        cuda_bytes=torch.cuda.mem_get_info(device)[0] if on_cuda else None,
    )
    executor = TorchExecutor(
        network,
        block_size=resolved.block_size,
        num_blocks=resolved.num_blocks,
        num_swap_blocks=resolved.num_swap_blocks,
        num_disk_blocks=resolved.num_disk_blocks,
        swap_dir=None if config.swap_dir is None else os.fspath(config.swap_dir),
        faults=faults,
    )

    def most_blocks() -> int:
        free = torch.cuda.mem_get_info(device)[0] if on_cuda else available_host_bytes()
        return executor.cache.most_blocks(free)

    max_model_len = resolved.max_model_len or geometry.context_length
    elastic: ElasticPool | None = None
    if config.elastic_memory:
        elastic = elastic_pool(
            executor.cache,
            min_blocks=-(-max_model_len // resolved.block_size),
            most_blocks=most_blocks,
            device_memory=(lambda: torch.cuda.mem_get_info(device)) if on_cuda else None,
        )
    logger.info(
        "%s in %s: %s, context %s",
        model.name,
        network.name,
        told_pools(resolved, block_bytes),
        counted(max_model_len, "token"),
    )
    recorder: Recorder | None = None
    if config.record is None:
        scheduler = Scheduler(resolved)
    else:
        recorder = Recorder(
            RecordingFile(config.record),
            model_name=model.name,
            max_bytes=config.record_max_mib * 2**20,
        )
        scheduler = RecordedScheduler(resolved, recorder)
        logger.info("recording to %s", config.record)
    return Engine(
        scheduler,
        executor,
        model.tokenizer,
        model.chat_template if model.chat_template.available else None,
        model_name=model.name,
        vocab_size=geometry.vocab_size,
        max_model_len=max_model_len,
        seed=config.seed,
        device=str(device),
        dtype=dtype,
        identity={
            "model": model.name,
            "fingerprint": model.fingerprint,
            "dtype": dtype,
            "kv_cache_dtype": dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
            "block_size": str(resolved.block_size),
        },
        recorder=recorder,
        shed_load=config.shed_load,
        most_blocks=most_blocks,
        elastic=elastic,
    )


def told_pools(config: SchedulerConfig, block_bytes: int) -> str:
    """The pools there are and what they take, for the log."""
    pools = [("KV cache", config.num_blocks), ("swap", config.num_swap_blocks)]
    if config.num_disk_blocks:
        pools.append(("on disk", config.num_disk_blocks))
    return ", ".join(
        f"{name} {counted(number, 'block')}"
        + (f" ({sized(number * block_bytes)})" if number else "")
        for name, number in pools
    )
