"""Messages that describe an executor and its models, to values and checked."""

from dataclasses import dataclass

from isobatch.executor.v1 import capabilities_pb2
from isobatch.executor.v1 import executor_service_pb2 as pb
from scheduler_service.core import NO_CURVE, CostCurve, CostPoint
from scheduler_service.text.tokenizer import TokenizerSource


class WireError(Exception):
    """The executor's answer does not follow the contract."""


@dataclass(frozen=True, slots=True)
class Model:
    """The model that serves users. Field meanings are those of ModelCapabilities."""

    model_id: str
    architecture: str
    vocab_size: int
    context_length: int
    numeric_class: str
    kv_class: str
    weights_digest: str
    block_size: int
    num_blocks: int
    num_parameters: int
    cost_curve: CostCurve = NO_CURVE


@dataclass(frozen=True, slots=True)
class DraftModel:
    """The model that drafts tokens for it, and what one request to it may hold."""

    model_id: str
    weights_digest: str
    numeric_class: str
    max_rows: int
    max_tokens: int
    context_length: int
    cost_curve: CostCurve = NO_CURVE


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a ready executor says about itself."""

    executor_epoch: int
    model: Model
    max_num_seqs: int
    max_num_batched_tokens: int
    max_top_k: int
    # Backend and device in words.
    device: str
    mlx_version: str
    # Steps that it takes before the answer to the first of them.
    max_steps_in_flight: int = 1
    # None without a draft model.
    draft: DraftModel | None = None


def read_capabilities(reply: pb.GetCapabilitiesResponse) -> Capabilities | None:
    """Return the capabilities, or None while the executor is not ready.

    Raises WireError when it is ready and has no model for users, or a bound below 1.
    """
    if not reply.ready:
        return None
    target = next(
        (each for each in reply.models if each.role == capabilities_pb2.MODEL_ROLE_TARGET), None
    )
    if target is None:
        raise WireError("[capabilities] a ready executor must have a target model, got none")
    for message, names in (
        (reply, ("max_num_seqs", "max_num_batched_tokens", "max_top_k")),
        (target, ("vocab_size", "context_length", "block_size", "num_blocks")),
    ):
        for name in names:
            if getattr(message, name) < 1:
                raise WireError(f"[capabilities] {name} must be at least 1, got 0")
    build = reply.build
    return Capabilities(
        executor_epoch=reply.executor_epoch,
        model=Model(
            model_id=target.model_id,
            architecture=target.architecture,
            vocab_size=target.vocab_size,
            context_length=target.context_length,
            numeric_class=target.numeric_class,
            kv_class=target.kv_class,
            weights_digest=target.weights_digest,
            block_size=target.block_size,
            num_blocks=target.num_blocks,
            num_parameters=target.num_parameters,
            cost_curve=_cost_curve(target),
        ),
        max_num_seqs=reply.max_num_seqs,
        max_num_batched_tokens=reply.max_num_batched_tokens,
        max_top_k=reply.max_top_k,
        device=" ".join(filter(None, (build.backend, build.unit, build.device))),
        mlx_version=build.mlx_version,
        max_steps_in_flight=max(1, reply.max_steps_in_flight),
        draft=_draft_model(reply),
    )


def _draft_model(reply: pb.GetCapabilitiesResponse) -> DraftModel | None:
    role = capabilities_pb2.MODEL_ROLE_DRAFT
    draft = next((each for each in reply.models if each.role == role), None)
    sizes = (draft.max_draft_rows, draft.max_draft_tokens, draft.context_length) if draft else (0,)
    if draft is None or min(sizes) < 1:
        return None
    return DraftModel(
        model_id=draft.model_id,
        weights_digest=draft.weights_digest,
        numeric_class=draft.numeric_class,
        max_rows=draft.max_draft_rows,
        max_tokens=draft.max_draft_tokens,
        context_length=draft.context_length,
        cost_curve=_cost_curve(draft),
    )


def _cost_curve(model: capabilities_pb2.ModelCapabilities) -> CostCurve:
    return CostCurve(
        CostPoint(each.num_rows, each.num_tokens, each.context_length, each.duration_ns / 1e9)
        for each in model.cost_curve
    )


def read_tokenizer(reply: pb.GetTokenizerResponse) -> TokenizerSource:
    """Return what the text side is built from."""
    return TokenizerSource(
        document=reply.tokenizer_json,
        chat_template=reply.chat_template,
        eos_token_ids=tuple(reply.eos_token_ids),
        bos_token_id=reply.bos_token_id if reply.HasField("bos_token_id") else None,
        add_bos_token=reply.add_bos_token,
        special_token_ids=tuple(reply.special_token_ids),
    )
