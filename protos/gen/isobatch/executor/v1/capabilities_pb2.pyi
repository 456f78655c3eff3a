from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ModelRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODEL_ROLE_UNSPECIFIED: _ClassVar[ModelRole]
    MODEL_ROLE_TARGET: _ClassVar[ModelRole]
    MODEL_ROLE_DRAFT: _ClassVar[ModelRole]

class SelfTestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SELF_TEST_STATE_UNSPECIFIED: _ClassVar[SelfTestState]
    SELF_TEST_STATE_RUNNING: _ClassVar[SelfTestState]
    SELF_TEST_STATE_PASSED: _ClassVar[SelfTestState]
    SELF_TEST_STATE_FELL_BACK: _ClassVar[SelfTestState]

class ProfileOrigin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROFILE_ORIGIN_UNSPECIFIED: _ClassVar[ProfileOrigin]
    PROFILE_ORIGIN_OFF: _ClassVar[ProfileOrigin]
    PROFILE_ORIGIN_MEASURED: _ClassVar[ProfileOrigin]
    PROFILE_ORIGIN_STORED: _ClassVar[ProfileOrigin]
MODEL_ROLE_UNSPECIFIED: ModelRole
MODEL_ROLE_TARGET: ModelRole
MODEL_ROLE_DRAFT: ModelRole
SELF_TEST_STATE_UNSPECIFIED: SelfTestState
SELF_TEST_STATE_RUNNING: SelfTestState
SELF_TEST_STATE_PASSED: SelfTestState
SELF_TEST_STATE_FELL_BACK: SelfTestState
PROFILE_ORIGIN_UNSPECIFIED: ProfileOrigin
PROFILE_ORIGIN_OFF: ProfileOrigin
PROFILE_ORIGIN_MEASURED: ProfileOrigin
PROFILE_ORIGIN_STORED: ProfileOrigin

class SelfTest(_message.Message):
    __slots__ = ("state", "num_cases", "refused")
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_CASES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    state: SelfTestState
    num_cases: int
    refused: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, state: _Optional[_Union[SelfTestState, str]] = ..., num_cases: _Optional[int] = ..., refused: _Optional[_Iterable[str]] = ...) -> None: ...

class BuildInfo(_message.Message):
    __slots__ = ("version", "backend", "device", "unit", "mlx_version", "num_threads")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    MLX_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    version: str
    backend: str
    device: str
    unit: str
    mlx_version: str
    num_threads: int
    def __init__(self, version: _Optional[str] = ..., backend: _Optional[str] = ..., device: _Optional[str] = ..., unit: _Optional[str] = ..., mlx_version: _Optional[str] = ..., num_threads: _Optional[int] = ...) -> None: ...

class CostPoint(_message.Message):
    __slots__ = ("num_tokens", "context_length", "duration_ns", "num_rows", "median_ns")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_NS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    context_length: int
    duration_ns: int
    num_rows: int
    median_ns: int
    def __init__(self, num_tokens: _Optional[int] = ..., context_length: _Optional[int] = ..., duration_ns: _Optional[int] = ..., num_rows: _Optional[int] = ..., median_ns: _Optional[int] = ...) -> None: ...

class ModelCapabilities(_message.Message):
    __slots__ = ("model_id", "role", "architecture", "vocab_size", "context_length", "numeric_class", "kv_class", "weights_digest", "block_size", "num_blocks", "cost_curve", "num_parameters", "source", "profile_origin", "profile_measured_at", "max_draft_rows", "max_draft_tokens")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUMERIC_CLASS_FIELD_NUMBER: _ClassVar[int]
    KV_CLASS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COST_CURVE_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PROFILE_ORIGIN_FIELD_NUMBER: _ClassVar[int]
    PROFILE_MEASURED_AT_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    role: ModelRole
    architecture: str
    vocab_size: int
    context_length: int
    numeric_class: str
    kv_class: str
    weights_digest: str
    block_size: int
    num_blocks: int
    cost_curve: _containers.RepeatedCompositeFieldContainer[CostPoint]
    num_parameters: int
    source: str
    profile_origin: ProfileOrigin
    profile_measured_at: int
    max_draft_rows: int
    max_draft_tokens: int
    def __init__(self, model_id: _Optional[str] = ..., role: _Optional[_Union[ModelRole, str]] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., context_length: _Optional[int] = ..., numeric_class: _Optional[str] = ..., kv_class: _Optional[str] = ..., weights_digest: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., cost_curve: _Optional[_Iterable[_Union[CostPoint, _Mapping]]] = ..., num_parameters: _Optional[int] = ..., source: _Optional[str] = ..., profile_origin: _Optional[_Union[ProfileOrigin, str]] = ..., profile_measured_at: _Optional[int] = ..., max_draft_rows: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ...) -> None: ...
