"""What an engine is set up with for its settings: the KV cache, what drafts, and which drafts are taken."""

import logging
from dataclasses import dataclass, replace

from specvla_ros.engine.answer import AnswerFormat
from specvla_ros.engine.buckets import ForwardSizes
from specvla_ros.engine.flight import Flight
from specvla_ros.engine.forwards import Forwards
from specvla_ros.engine.graphs import Graphs
from specvla_ros.engine.kv_cache import KVCache
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.engine.slot_ring import allocate_cache
from specvla_ros.engine.verifier import Verifier
from specvla_ros.engine.vision import Vision
from specvla_ros.errors import UserError
from specvla_ros.models.checkpoint import Target
from specvla_ros.speculation.drafters.combine import Drafter
from specvla_ros.speculation.rules.registry import bins_of, make_rule
from specvla_ros.speculation.settings import AcceptanceSettings

_log = logging.getLogger(__name__)


@dataclass
class Setup:
    """See the module.

    Attributes:
        settings: that were asked for; with mode `ar` or `pipeline` where nothing can draft and that is allowed.
        answer: when an answer is complete.
        cache: keys and values.
        drafter: grows the trees.
        verifier: chooses which drafts are committed.
        flight: the requests.
        vision: runs the vision towers.
        forwards: run the packed forward.
        graphs: capture what of this can be captured.
        fallback: why nothing drafts though it was asked for; empty: it does, or was not asked for.
    """

    settings: EngineSettings
    answer: AnswerFormat
    cache: KVCache
    drafter: Drafter
    verifier: Verifier
    flight: Flight
    vision: Vision
    forwards: Forwards
    graphs: Graphs
    fallback: str = ""

    def set_acceptance(self, settings: AcceptanceSettings, policy: Target) -> None:
        """Takes another acceptance rule for the requests that begin from now on.

        Raises:
            UserError: it does not fit the policy; the old one stays.
        """
        self.verifier.set_rule(make_rule(settings, policy))
        self.drafter.set_tolerance(bins_of(settings, policy))
        self.settings = replace(self.settings, acceptance=settings)

    def describe(self) -> dict[str, str | int]:
        """How it decodes, for diagnostics and results."""
        described: dict[str, str | int] = {
            "decode.mode": self.settings.mode,
            "slots": self.settings.slots,
            "drafts": ", ".join(self.drafter.sources),
        }
        said = {"decode.fallback": self.fallback, "cuda_graphs": self.graphs.status}
        return described | {name: text for name, text in said.items() if text}


def set_up(policy: Target, settings: EngineSettings) -> Setup:
    """Loads and allocates what the settings need.

    Raises:
        UserError: they do not fit the policy or the device's memory.
    """
    if policy.action_head:
        settings.check_action_head()
    answer = AnswerFormat.from_target(policy, settings.max_reasoning_tokens)
    rule = make_rule(settings.acceptance, policy)
    cache = allocate_cache(policy, settings, answer)
    drafter, fallback = _make_drafter(policy, settings, cache.slot_rows)
    if fallback:
        settings = replace(settings, mode={"spec": "ar", "specpipe": "pipeline"}[settings.mode])
    drafter.set_tolerance(bins_of(settings.acceptance, policy))
    flight = Flight(cache, chunks=settings.chunks, in_order=settings.in_order)
    vision = Vision(policy.model)
    forwards = Forwards(policy.decoder, cache, ForwardSizes.from_settings(policy, settings))
    verifier = Verifier(rule, answer.actions, cache, max_nodes=settings.tree_nodes, max_depth=answer.longest)
    graphs = Graphs(cache.keys, (forwards, vision, verifier, drafter))
    return Setup(settings, answer, cache, drafter, verifier, flight, vision, forwards, graphs, fallback)


def _make_drafter(policy: Target, settings: EngineSettings, slot_rows: int) -> tuple[Drafter, str]:
    """What drafts; nothing, with the reason, where nothing can be had and the user allowed to go on without."""
    slots = settings.slots
    if not settings.drafts:
        return Drafter(policy, None, slots=slots, slot_rows=slot_rows), ""
    try:
        return Drafter(policy, settings.draft, slots=slots, slot_rows=slot_rows), ""
    except UserError as error:
        if not settings.draft.fallback_to_ar:
            raise
        _log.warning("decoding plainly, as draft.fallback_to_ar allows: %s", error)
        return Drafter(policy, None, slots=slots, slot_rows=slot_rows), str(error)
