from isobatch.executor.v1 import capabilities_pb2 as _capabilities_pb2
from isobatch.executor.v1 import drafts_pb2 as _drafts_pb2
from isobatch.executor.v1 import provenance_pb2 as _provenance_pb2
from isobatch.executor.v1 import token_rows_pb2 as _token_rows_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetCapabilitiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetCapabilitiesResponse(_message.Message):
    __slots__ = ("executor_epoch", "ready", "models", "build", "max_num_seqs", "max_num_batched_tokens", "max_top_k", "supports_step_output_source", "shared_memory_namespace", "num_ranks", "self_test", "max_steps_in_flight")
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOP_K_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_STEP_OUTPUT_SOURCE_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    SELF_TEST_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    executor_epoch: int
    ready: bool
    models: _containers.RepeatedCompositeFieldContainer[_capabilities_pb2.ModelCapabilities]
    build: _capabilities_pb2.BuildInfo
    max_num_seqs: int
    max_num_batched_tokens: int
    max_top_k: int
    supports_step_output_source: bool
    shared_memory_namespace: str
    num_ranks: int
    self_test: _capabilities_pb2.SelfTest
    max_steps_in_flight: int
    def __init__(self, executor_epoch: _Optional[int] = ..., ready: _Optional[bool] = ..., models: _Optional[_Iterable[_Union[_capabilities_pb2.ModelCapabilities, _Mapping]]] = ..., build: _Optional[_Union[_capabilities_pb2.BuildInfo, _Mapping]] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_top_k: _Optional[int] = ..., supports_step_output_source: _Optional[bool] = ..., shared_memory_namespace: _Optional[str] = ..., num_ranks: _Optional[int] = ..., self_test: _Optional[_Union[_capabilities_pb2.SelfTest, _Mapping]] = ..., max_steps_in_flight: _Optional[int] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ("model_id",)
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    def __init__(self, model_id: _Optional[str] = ...) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("model_id", "tokenizer_json", "chat_template", "eos_token_ids", "bos_token_id", "add_bos_token", "special_token_ids")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ADD_BOS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    tokenizer_json: bytes
    chat_template: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token_id: int
    add_bos_token: bool
    special_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model_id: _Optional[str] = ..., tokenizer_json: _Optional[bytes] = ..., chat_template: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., bos_token_id: _Optional[int] = ..., add_bos_token: _Optional[bool] = ..., special_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("start", "open", "step", "fetch_logits", "release", "draft")
    START_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FETCH_LOGITS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    start: StartSession
    open: _token_rows_pb2.OpenSequences
    step: _token_rows_pb2.Step
    fetch_logits: _token_rows_pb2.FetchLogits
    release: _token_rows_pb2.ReleaseSequences
    draft: _drafts_pb2.DraftTokens
    def __init__(self, start: _Optional[_Union[StartSession, _Mapping]] = ..., open: _Optional[_Union[_token_rows_pb2.OpenSequences, _Mapping]] = ..., step: _Optional[_Union[_token_rows_pb2.Step, _Mapping]] = ..., fetch_logits: _Optional[_Union[_token_rows_pb2.FetchLogits, _Mapping]] = ..., release: _Optional[_Union[_token_rows_pb2.ReleaseSequences, _Mapping]] = ..., draft: _Optional[_Union[_drafts_pb2.DraftTokens, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("started", "opened", "step_result", "logits_fetched", "released", "drafted")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    STEP_RESULT_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FETCHED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    started: SessionStarted
    opened: _token_rows_pb2.SequencesOpened
    step_result: _token_rows_pb2.StepResult
    logits_fetched: _token_rows_pb2.LogitsFetched
    released: _token_rows_pb2.SequencesReleased
    drafted: _drafts_pb2.TokensDrafted
    def __init__(self, started: _Optional[_Union[SessionStarted, _Mapping]] = ..., opened: _Optional[_Union[_token_rows_pb2.SequencesOpened, _Mapping]] = ..., step_result: _Optional[_Union[_token_rows_pb2.StepResult, _Mapping]] = ..., logits_fetched: _Optional[_Union[_token_rows_pb2.LogitsFetched, _Mapping]] = ..., released: _Optional[_Union[_token_rows_pb2.SequencesReleased, _Mapping]] = ..., drafted: _Optional[_Union[_drafts_pb2.TokensDrafted, _Mapping]] = ...) -> None: ...

class StartSession(_message.Message):
    __slots__ = ("scheduler_epoch", "shared_memory_namespace")
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    scheduler_epoch: int
    shared_memory_namespace: str
    def __init__(self, scheduler_epoch: _Optional[int] = ..., shared_memory_namespace: _Optional[str] = ...) -> None: ...

class SessionStarted(_message.Message):
    __slots__ = ("executor_epoch", "kv_occupancy")
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    KV_OCCUPANCY_FIELD_NUMBER: _ClassVar[int]
    executor_epoch: int
    kv_occupancy: _token_rows_pb2.KvOccupancy
    def __init__(self, executor_epoch: _Optional[int] = ..., kv_occupancy: _Optional[_Union[_token_rows_pb2.KvOccupancy, _Mapping]] = ...) -> None: ...
