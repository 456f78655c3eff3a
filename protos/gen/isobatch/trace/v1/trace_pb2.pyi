from isobatch.executor.v1 import provenance_pb2 as _provenance_pb2
from isobatch.executor.v1 import token_rows_pb2 as _token_rows_pb2
from isobatch.scheduler.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Trace(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[TraceRecord]
    def __init__(self, records: _Optional[_Iterable[_Union[TraceRecord, _Mapping]]] = ...) -> None: ...

class TraceRecord(_message.Message):
    __slots__ = ("header", "kernel_paths", "step", "kv", "end")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    KERNEL_PATHS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    header: TraceHeader
    kernel_paths: KernelPaths
    step: TraceStep
    kv: TraceKv
    end: TraceEnd
    def __init__(self, header: _Optional[_Union[TraceHeader, _Mapping]] = ..., kernel_paths: _Optional[_Union[KernelPaths, _Mapping]] = ..., step: _Optional[_Union[TraceStep, _Mapping]] = ..., kv: _Optional[_Union[TraceKv, _Mapping]] = ..., end: _Optional[_Union[TraceEnd, _Mapping]] = ...) -> None: ...

class TraceHeader(_message.Message):
    __slots__ = ("format_version", "request_id", "arrival_unix_ns", "model", "weights_digest", "numeric_class", "kv_class", "device", "block_size", "prompt_token_ids", "sampling", "stopping", "include_special_tokens", "has_kv_digests")
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUMERIC_CLASS_FIELD_NUMBER: _ClassVar[int]
    KV_CLASS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HAS_KV_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    request_id: str
    arrival_unix_ns: int
    model: str
    weights_digest: str
    numeric_class: str
    kv_class: str
    device: str
    block_size: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sampling_pb2.SamplingParams
    stopping: _sampling_pb2.StoppingParams
    include_special_tokens: bool
    has_kv_digests: bool
    def __init__(self, format_version: _Optional[int] = ..., request_id: _Optional[str] = ..., arrival_unix_ns: _Optional[int] = ..., model: _Optional[str] = ..., weights_digest: _Optional[str] = ..., numeric_class: _Optional[str] = ..., kv_class: _Optional[str] = ..., device: _Optional[str] = ..., block_size: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_sampling_pb2.StoppingParams, _Mapping]] = ..., include_special_tokens: _Optional[bool] = ..., has_kv_digests: _Optional[bool] = ...) -> None: ...

class KernelPaths(_message.Message):
    __slots__ = ("paths",)
    PATHS_FIELD_NUMBER: _ClassVar[int]
    paths: _containers.RepeatedCompositeFieldContainer[_token_rows_pb2.KernelPathCount]
    def __init__(self, paths: _Optional[_Iterable[_Union[_token_rows_pb2.KernelPathCount, _Mapping]]] = ...) -> None: ...

class TraceStep(_message.Message):
    __slots__ = ("step_id", "generation", "start_position", "num_row_tokens", "num_step_tokens", "num_step_rows", "num_wanted", "max_neighbour_tokens", "kernel_paths", "start_ns", "duration_ns", "executor_ns", "tokens")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    START_POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_ROW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEP_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_WANTED_FIELD_NUMBER: _ClassVar[int]
    MAX_NEIGHBOUR_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KERNEL_PATHS_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_NS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    generation: int
    start_position: int
    num_row_tokens: int
    num_step_tokens: int
    num_step_rows: int
    num_wanted: int
    max_neighbour_tokens: int
    kernel_paths: int
    start_ns: int
    duration_ns: int
    executor_ns: int
    tokens: _containers.RepeatedCompositeFieldContainer[TraceToken]
    def __init__(self, step_id: _Optional[int] = ..., generation: _Optional[int] = ..., start_position: _Optional[int] = ..., num_row_tokens: _Optional[int] = ..., num_step_tokens: _Optional[int] = ..., num_step_rows: _Optional[int] = ..., num_wanted: _Optional[int] = ..., max_neighbour_tokens: _Optional[int] = ..., kernel_paths: _Optional[int] = ..., start_ns: _Optional[int] = ..., duration_ns: _Optional[int] = ..., executor_ns: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[TraceToken, _Mapping]]] = ...) -> None: ...

class TraceToken(_message.Message):
    __slots__ = ("position", "token_id", "logits_digest", "top_ids", "top_logits")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGITS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGITS_FIELD_NUMBER: _ClassVar[int]
    position: int
    token_id: int
    logits_digest: bytes
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logits: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, position: _Optional[int] = ..., token_id: _Optional[int] = ..., logits_digest: _Optional[bytes] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logits: _Optional[_Iterable[float]] = ...) -> None: ...

class TraceKv(_message.Message):
    __slots__ = ("generation", "provenance")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    provenance: _provenance_pb2.GetProvenanceResponse
    def __init__(self, generation: _Optional[int] = ..., provenance: _Optional[_Union[_provenance_pb2.GetProvenanceResponse, _Mapping]] = ...) -> None: ...

class TraceEnd(_message.Message):
    __slots__ = ("outcome", "num_tokens", "logits_digest", "num_preemptions")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    outcome: str
    num_tokens: int
    logits_digest: bytes
    num_preemptions: int
    def __init__(self, outcome: _Optional[str] = ..., num_tokens: _Optional[int] = ..., logits_digest: _Optional[bytes] = ..., num_preemptions: _Optional[int] = ...) -> None: ...
