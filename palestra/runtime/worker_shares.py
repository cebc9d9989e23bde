"""What each embedded inference worker of a job has of this machine: a card, cores, and memory for keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from palestra.config import JobConfig
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.runtime.cards import Card, CardShare, deal_cards, trainer_cards, visible_cards

GIB = 2**30


def worker_cards(
    config: JobConfig,
    settings: EmbeddedEngineConfig,
    look: Callable[[], list[Card]] = visible_cards,
    *,
    trainer_is_here: bool = True,
) -> list[CardShare]:
    """Return cards for one worker each, as many as there may be workers; none: the workers compute on CPUs.

    Args:
        look: returns the cards that the job may use.
        trainer_is_here: whether the trainer shares these cards; see `trainer_cards`.

    Raises:
        ConfigError: the engine is to compute on a card, and there is none.
    """
    from palestra.models.device import device_of

    if device_of(settings.device, "engine.device").type == "cpu":
        return []
    cards, trainer = look(), trainer_cards(config, trainer_is_here)
    return deal_cards(cards, max(settings.replicas, len(cards) - trainer), 1, trainer)


def worker_settings(
    settings: EmbeddedEngineConfig, cards: Sequence[CardShare], others: int = 0
) -> EmbeddedEngineConfig:
    """Return the settings of each worker, with its part of the cores, and of the memory for keys and values.

    Args:
        cards: what `worker_cards` has returned.
        others: processes of the engine that compute on this machine beside these workers.
    """
    from palestra.models.device import available_cores, memory_bytes

    cache, processes = settings.cache_gib, settings.replicas + others
    if cache is None and not cards:
        cache = memory_bytes() / 4 / processes / GIB
    elif cache is None and (sharers := max(one.sharers for one in cards)) > 1:
        # Half of what is free, as one worker would take. Several find the same memory free, because they load together.
        free = [card.free_bytes for one in cards for card in one.cards if card.free_bytes is not None]
        cache = min(free) / 2 / sharers / GIB if free else None
    threads = settings.threads or max(available_cores() // processes, 1)
    return settings.model_copy(update={"threads": threads, "cache_gib": cache})
