"""Capabilities and tokenizer as messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from executor_service.engine.capabilities import KV_CLASS, package_version
from executor_service.engine.profile import MEASURED, OFF, STORED
from executor_service.engine.step_request import MAX_STEPS_IN_FLIGHT
from isobatch.executor.v1 import capabilities_pb2
from isobatch.executor.v1 import executor_service_pb2 as pb

if TYPE_CHECKING:
    from executor_service.config import ExecutorConfig
    from executor_service.engine.capabilities import (
        Capabilities,
        DraftCapabilities,
        ModelDescription,
        SelfTestResult,
    )
    from executor_service.engine.profile import CostPoint, Profile
    from executor_service.engine.step_request import Limits

_ORIGINS = {
    OFF: capabilities_pb2.PROFILE_ORIGIN_OFF,
    MEASURED: capabilities_pb2.PROFILE_ORIGIN_MEASURED,
    STORED: capabilities_pb2.PROFILE_ORIGIN_STORED,
}


def capabilities(
    executor_epoch: int, config: ExecutorConfig, known: Capabilities | None
) -> pb.GetCapabilitiesResponse:
    """Encode what the executor says about itself; `known` is None while it is not ready."""
    response = pb.GetCapabilitiesResponse(
        executor_epoch=executor_epoch,
        ready=known is not None,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        supports_step_output_source=True,
        max_steps_in_flight=MAX_STEPS_IN_FLIGHT,
        num_ranks=1,
    )
    if known is None:
        response.build.version = package_version("isobatch")
        response.self_test.state = capabilities_pb2.SELF_TEST_STATE_RUNNING
        return response
    response.max_top_k = known.limits.max_top_k
    response.build.CopyFrom(
        capabilities_pb2.BuildInfo(
            version=known.build.version,
            backend=known.build.backend,
            device=known.build.device,
            unit=known.build.unit,
            mlx_version=known.build.mlx_version,
            num_threads=known.build.num_threads,
        )
    )
    response.self_test.CopyFrom(_self_test(known.self_test))
    response.models.append(_model(known.model, known.limits, known.profile))
    if known.draft is not None:
        response.models.append(_draft(known.draft))
    return response


def _draft(draft: DraftCapabilities) -> capabilities_pb2.ModelCapabilities:
    described = _model(draft.model, draft.limits, draft.profile)
    described.role = capabilities_pb2.MODEL_ROLE_DRAFT
    described.max_draft_rows = draft.limits.max_num_seqs
    described.max_draft_tokens = draft.limits.max_num_batched_tokens
    return described


def _model(
    model: ModelDescription, limits: Limits, profile: Profile
) -> capabilities_pb2.ModelCapabilities:
    return capabilities_pb2.ModelCapabilities(
        model_id=model.model_id,
        role=capabilities_pb2.MODEL_ROLE_TARGET,
        architecture=model.architecture,
        vocab_size=limits.vocab_size,
        context_length=limits.context_length,
        numeric_class=model.numeric_class,
        kv_class=KV_CLASS,
        weights_digest=model.weights_digest,
        block_size=model.block_size,
        num_blocks=model.num_blocks,
        num_parameters=model.num_parameters,
        source=model.source,
        cost_curve=[_cost_point(point) for point in profile.points],
        profile_origin=_ORIGINS[profile.origin],
        profile_measured_at=profile.measured_at,
    )


def _cost_point(point: CostPoint) -> capabilities_pb2.CostPoint:
    return capabilities_pb2.CostPoint(
        num_tokens=point.shape.num_tokens,
        context_length=point.shape.context_length,
        duration_ns=point.duration_ns,
        num_rows=point.shape.num_rows,
        median_ns=point.median_ns,
    )


def _self_test(result: SelfTestResult) -> capabilities_pb2.SelfTest:
    state = (
        capabilities_pb2.SELF_TEST_STATE_FELL_BACK
        if result.refused
        else capabilities_pb2.SELF_TEST_STATE_PASSED
    )
    return capabilities_pb2.SelfTest(
        state=state, num_cases=result.num_cases, refused=result.refused
    )


def tokenizer(known: Capabilities) -> pb.GetTokenizerResponse:
    """Encode the tokenizer of the loaded model."""
    data = known.tokenizer
    return pb.GetTokenizerResponse(
        model_id=known.model.model_id,
        tokenizer_json=data.tokenizer_json,
        chat_template=data.chat_template,
        eos_token_ids=data.eos_token_ids,
        bos_token_id=data.bos_token_id,
        add_bos_token=data.add_bos_token,
        special_token_ids=data.special_token_ids,
    )
